"""Uncompressed tar files: list their members, and read a member from its position."""

import functools
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from duetgan.data.errors import ImageError, read_error
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained

NAME_BYTES = 1 << 20  # longest name: tarfile reads it in one call
END = 10_240  # bytes: tar fills its last record with zeros
OPEN = 256  # files kept open at once


class Member(NamedTuple):
    name: str
    shard: int
    start: int  # position of its first byte in the tar
    size: int


def state_of(status: os.stat_result) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in ns, by which changes are noticed."""
    return status.st_size, status.st_mtime_ns


class _Open:
    """An open file that is closed with its last reference: a thread may still read it after the
    cache has dropped it.
    """

    descriptor = -1

    def __init__(self, path: Path) -> None:
        with files.open_file(path, files.ARCHIVE) as file:
            self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class TarFiles:
    """Read members of several tar files; the last OPEN files that were read stay open.

    Threads may share an instance, processes may not. `states` are earlier results of `state_of`; a
    file that has changed since is refused.
    """

    def __init__(
        self, paths: Sequence[Path], states: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._paths, self._states = paths, states
        self._file = functools.lru_cache(OPEN)(self._opened)

    def read(self, member: Member, kind: files.FileLimit = files.IMAGE) -> bytes:
        """Read the bytes of a member. Raises ImageError, and UserError for a changed tar."""
        with explained(OSError, read_error):
            files.refuse_large(member.size, kind)
            # The reference keeps the file open during the read.
            file = self._file(member.shard)
            content = os.pread(file.descriptor, member.size, member.start)
        if len(content) != member.size:
            raise ImageError(f"is cut off: {len(content):,} of {member.size:,} bytes")
        return content

    def _opened(self, number: int) -> _Open:
        file = _Open(self._paths[number])
        if self._states is not None and state_of(os.fstat(file.descriptor)) != self._states[number]:
            raise UserError(f"{self._paths[number]} was changed since it was indexed: start again")
        return file

    def close(self) -> None:
        """Close all files. The next read opens its file again."""
        self._file.cache_clear()


class _Bounded:
    """An open tar for tarfile, with a limit for names: tarfile reads as many bytes as a header
    declares.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > NAME_BYTES:
            raise files.Refused(f"a name of {size:,} bytes")
        return self._file.read(size)


def read_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield all members of an uncompressed tar.

    Raises OSError, tarfile's errors and ValueError. ValueError is also raised where tarfile stops
    silently: at a damaged header, a missing end mark, and members after the end mark.
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
