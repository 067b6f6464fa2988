"""Tar files that are not compressed: their members, and the bytes of a member from its place."""

import functools
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from duetgan.data.errors import ImageError, unread
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained

NAME_BYTES = 1 << 20  # of a name: tarfile reads it at once
END = 10_240  # bytes: tar fills its last record with zeros
OPEN = 256  # files kept open at once


class Member(NamedTuple):
    name: str
    shard: int
    start: int  # of its bytes in the tar
    size: int


def state_of(status: os.stat_result) -> tuple[int, int]:
    """What says that a file is the one it was: its size in bytes and the time of its last change in
    ns.
    """
    return status.st_size, status.st_mtime_ns


class _Open:
    """An open file, closed when nobody holds it: a thread may still read one that was let go."""

    descriptor = -1

    def __init__(self, path: Path) -> None:
        with bounded.open_file(path, bounded.ARCHIVE) as file:
            self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class TarFiles:
    """The bytes of members of several tar files. Those read last stay open; threads may share it,
    processes may not.

    With `states` (`state_of`) a file is refused that is not as it was.
    """

    def __init__(
        self, paths: Sequence[Path], states: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._paths, self._states = paths, states
        self._file = functools.lru_cache(OPEN)(self._opened)

    def read(self, member: Member, kind: bounded.FileLimit = bounded.IMAGE) -> bytes:
        """A member's bytes. Raises ImageError, and UserError for a tar that has changed."""
        with explained(OSError, unread):
            bounded.refuse_large(member.size, kind)
            # kept until the read is done: it is closed with its last reference
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
        """Let all files go; the next read opens its own again."""
        self._file.cache_clear()


class _Bounded:
    """An open tar for tarfile, which reads as much at once as a head says that a long name has."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > NAME_BYTES:
            raise bounded.Refused(f"a name of {size:,} bytes")
        content: bytes = self._file.read(size)
        return content


def read_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """All members of a tar that is not compressed. Raises OSError, tarfile's errors and ValueError,
    also at its end for what tarfile ends at silently: a damaged head, no mark of the end, and
    members behind it.
    """
    with (
        bounded.open_file(path, bounded.ARCHIVE) as file,
        tarfile.open(fileobj=_Bounded(file), mode="r:") as archive,  # type: ignore[call-overload]
    ):
        last = -1
        while (member := archive.next()) is not None:
            archive.members.clear()  # tarfile keeps all of them
            if member.offset_data <= last or member.size < 0:
                raise ValueError(f"member {member.name} lies before its head")
            last = member.offset_data
            yield member
        place = archive.offset
        size = os.fstat(file.fileno()).st_size
        if place >= size:
            # an end mark follows the members
            raise ValueError(f"{size:,} of at least {max(place, size + 1):,} bytes")
        file.seek(place)
        if any(file.read(END + 512)):  # and a head behind it
            raise ValueError(f"no member begins at byte {place:,}; joined tars must be given apart")
