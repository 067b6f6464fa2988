"""Read uncompressed tar files: list the members, and read a member by its position."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from duetgan.data.errors import ImageError, read_error
from duetgan.utils import files
from duetgan.utils.errors import explained

NAME_BYTES = 1 << 20  # longest name: tarfile reads it in one call
END = 10_240  # bytes: tar fills its last record with zeros


class Member(NamedTuple):
    name: str
    shard: int
    start: int  # position of its first byte in the tar
    size: int


def read_member(path: Path, member: Member, kind: files.FileLimit) -> bytes:
    """Return the bytes of a member of the tar file at `path`.

    Raises ImageError if the member cannot be read, is cut off, or exceeds the size limit of `kind`.
    """
    with explained(OSError, read_error):
        files.refuse_large(member.size, kind)
        with files.open_file(path, files.ARCHIVE) as file:
            content = os.pread(file.fileno(), member.size, member.start)
    if len(content) != member.size:
        raise ImageError(f"is cut off: {len(content):,} of {member.size:,} bytes")
    return content


class _Bounded:
    """A file for tarfile that refuses to read more than NAME_BYTES at once.

    Without this limit, tarfile would read a name of any length that a header declares.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > NAME_BYTES:
            raise files.Refused(f"a name of {size:,} bytes")
        return self._file.read(size)


def read_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield all members of an uncompressed tar file.

    Raises OSError, the errors of tarfile, and ValueError. Unlike tarfile, which stops silently, it
    raises ValueError at a damaged header, at a missing end mark, and at members after the end mark.
    """
    with (
        files.open_file(path, files.ARCHIVE) as file,
        tarfile.open(fileobj=_Bounded(file), mode="r:") as archive,  # type: ignore[call-overload]
    ):
        last = -1
        while (member := archive.next()) is not None:
            archive.members.clear()  # tarfile keeps all of them
            if member.offset_data <= last or member.size < 0:
                raise ValueError(f"member {member.name} lies before its head")
            last = member.offset_data
            yield member
        end = archive.offset
        size = os.fstat(file.fileno()).st_size
        if end >= size:  # the end mark is missing
            raise ValueError(f"{size:,} of at least {max(end, size + 1):,} bytes")
        file.seek(end)
        if any(file.read(END + 512)):  # another header follows the end mark
            raise ValueError(f"no member begins at byte {end:,}; joined tars must be given apart")
