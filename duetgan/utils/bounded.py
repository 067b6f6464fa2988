"""Open and read the user's files within size limits.

Only regular files are opened, so that a named pipe never hangs the program. A read stops at the
limit of the file's kind, whatever size the file claims to have.

tests/utils/test_bounded.py checks that no other module opens a user's file directly.
"""

import errno
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from duetgan.utils.errors import UserError, explained

STEP = 1 << 20  # bytes per read from a stream of unknown length
# first letter of `ls -l` -> name for a message
FILE_KINDS = {
    "d": "a folder",
    "p": "a named pipe",
    "c": "a device",
    "b": "a device",
    "s": "a socket",
}


@dataclass(frozen=True)
class FileLimit:
    """A kind of file and its largest allowed size."""

    name: str
    mib: int  # limit in MiB; 0: no limit, because the file is read in parts
    variable: str = ""  # environment variable that overrides the limit

    @property
    def limit(self) -> int:
        """Return the largest allowed size in bytes."""
        text = os.environ.get(self.variable, "")
        mib = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else self.mib
        return mib << 20 if mib else 1 << 63

    @property
    def remedy(self) -> str:
        """Return the end of a message about a file that is too large."""
        return (
            f"the {self.limit >> 20:,} MiB for {self.name}: make it smaller or set {self.variable}"
        )


# The uncompressed size of an RGB image of as many pixels as Pillow allows.
IMAGE = FileLimit("an image file", 256, "DUET_MAX_IMAGE_MIB")
UPLOAD = FileLimit("an image sent by a browser", 32, "DUET_MAX_UPLOAD_MIB")
# idx and CIFAR-10 files, which are read into memory whole.
ARRAY = FileLimit("a file of many images", 2048, "DUET_MAX_ARRAY_MIB")
# CSV, JSON and image weights. A million names take 50 MiB.
TABLE = FileLimit("a list", 512, "DUET_MAX_TABLE_MIB")
CONFIG = FileLimit("a configuration", 4, "DUET_MAX_CONFIG_MIB")
WEIGHTS = FileLimit("a file of weights", 64 << 10, "DUET_MAX_WEIGHTS_MIB")
ARCHIVE = FileLimit("an archive", 0)  # zip, Parquet, LMDB: each member has a limit


class Refused(OSError):
    """A file that is not read; `strerror` is the reason without the file's name."""

    def __init__(self, reason: str, path: object = None) -> None:
        super().__init__(errno.EINVAL, reason, path)

    def __str__(self) -> str:
        return str(self.strerror)


def refuse_large(size: int, kind: FileLimit, path: object = None) -> None:
    """Raise Refused if `size` bytes are more than `kind` allows."""
    if size > kind.limit:
        raise Refused(f"has {size:,} bytes, more than {kind.remedy}", path)


def check(path: str | Path, kind: FileLimit) -> os.stat_result:
    """Return the status of a file that is regular and not too large; links are followed.

    Raises OSError.
    """
    if "\0" in os.fspath(path):
        raise Refused("is no file name: it holds a NUL character", path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        file_kind = FILE_KINDS.get(stat.filemode(status.st_mode)[0], "something else")
        raise Refused(f"is {file_kind}, not a regular file", path)
    refuse_large(status.st_size, kind, path)
    return status


def refuse_page(path: Path) -> None:
    """Raise UserError if a file is an HTML page, which a failed download leaves under the file's
    name.
    """
    if path.is_file():
        with open_file(path, WEIGHTS) as file:
            if file.read(512).lstrip().lower().startswith((b"<!doctype", b"<html", b"<head")):
                raise UserError(
                    f"{path}: is an HTML page, the download failed; fetch the file itself"
                )


def open_file(path: str | Path, kind: FileLimit) -> io.BufferedReader:
    """Open a file that `check` accepts, for reading. Raises OSError."""
    check(path, kind)
    # Non-blocking, because a pipe may have replaced the file since the check: the read then fails
    # or is empty, but never waits.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def read_file(path: str | Path, kind: FileLimit) -> bytes:
    """Return the bytes of a file that `check` accepts. Raises OSError."""
    with open_file(path, kind) as file:
        return read_stream(file, kind)


def read_stream(stream: IO[bytes] | io.BufferedIOBase, kind: FileLimit) -> bytes:
    """Return the remaining bytes of a stream. Raises OSError, which is Refused if they exceed the
    limit of `kind`.
    """
    parts = []
    size = 0
    limit = kind.limit
    while part := stream.read(min(STEP, limit + 1 - size)):
        size += len(part)
        parts.append(part)
        if size > limit:
            raise Refused(f"has more than {kind.remedy}")
    return b"".join(parts)


def read_gzip(path: str | Path, kind: FileLimit) -> bytes:
    """Return the unpacked bytes of a gzip file.

    Raises OSError, also for a damaged file; Refused if the unpacked bytes exceed the limit of
    `kind`.
    """
    damaged = explained((EOFError, zlib.error), lambda error: Refused(str(error), path))
    with damaged, open_file(path, kind) as file, gzip.GzipFile(fileobj=file) as unpacked:
        return read_stream(unpacked, kind)


@contextmanager
def reading(path: object, remedy: str, *faults: type[Exception]) -> Iterator[None]:
    """Turn an OSError, or one of `faults`, into UserError: PATH cannot be read (REASON); REMEDY."""
    expected: tuple[type[Exception], ...] = (OSError, *faults)
    try:
        yield
    except UserError:
        raise
    except expected as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise UserError(
            f"{path} cannot be read ({' '.join(reason.split())[:200]}); {remedy}"
        ) from error
