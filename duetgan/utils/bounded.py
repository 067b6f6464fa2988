"""The user's files, opened and read within bounds: every byte of theirs comes in through here.
Regular files only, so that a named pipe never hangs, and no more of one than the limit of its kind,
whatever it claims to hold.

tests/utils/test_bounded.py keeps other ways of opening a file out of the program.
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

STEP = 1 << 20  # bytes read at a time from what does not say how long it is
# as `ls -l` has it
OTHERS = {"d": "a folder", "p": "a named pipe", "c": "a device", "b": "a device", "s": "a socket"}


@dataclass(frozen=True)
class FileLimit:
    """A kind of file and how large one may be."""

    name: str
    mib: int  # limit; 0: none, it is read in parts
    variable: str = ""  # of the environment: another limit

    @property
    def limit(self) -> int:
        text = os.environ.get(self.variable, "")
        mib = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else self.mib
        return mib << 20 if mib else 1 << 63

    @property
    def remedy(self) -> str:
        return (
            f"the {self.limit >> 20:,} MiB for {self.name}: make it smaller or set {self.variable}"
        )


# Pillow's limit of pixels in 24 bits, uncompressed
IMAGE = FileLimit("an image file", 256, "DUET_MAX_IMAGE_MIB")
UPLOAD = FileLimit("an image sent by a browser", 32, "DUET_MAX_UPLOAD_MIB")
# idx and CIFAR-10: they are held whole
ARRAY = FileLimit("a file of many images", 2048, "DUET_MAX_ARRAY_MIB")
# CSV, JSON, weights of images; a million names are 50 MiB
TABLE = FileLimit("a list", 512, "DUET_MAX_TABLE_MIB")
CONFIG = FileLimit("a configuration", 4, "DUET_MAX_CONFIG_MIB")
WEIGHTS = FileLimit("a file of weights", 64 << 10, "DUET_MAX_WEIGHTS_MIB")
ARCHIVE = FileLimit("an archive", 0)  # zip, Parquet, LMDB: their parts have limits


class Refused(OSError):
    """A file that does not come in; `strerror` is the reason without its name."""

    def __init__(self, reason: str, path: object = None) -> None:
        super().__init__(errno.EINVAL, reason, path)

    def __str__(self) -> str:
        return str(self.strerror)


def refuse_large(size: int, kind: FileLimit, path: object = None) -> None:
    """Raise Refused for a file of so many bytes, if they are too many."""
    if size > kind.limit:
        raise Refused(f"has {size:,} bytes, more than {kind.remedy}", path)


def check(path: str | Path, kind: FileLimit) -> os.stat_result:
    """The status of a regular file that is not too large; what a link points to counts. Raises
    OSError.
    """
    if "\0" in os.fspath(path):
        raise Refused("is no file name: it holds a NUL character", path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        what = OTHERS.get(stat.filemode(status.st_mode)[0], "something else")
        raise Refused(f"is {what}, not a regular file", path)
    refuse_large(status.st_size, kind, path)
    return status


def refuse_page(path: Path) -> None:
    """Raise UserError for an HTML page under the name of another file, as a failed download leaves
    it.
    """
    if path.is_file():
        with open_file(path, WEIGHTS) as file:
            if file.read(512).lstrip().lower().startswith((b"<!doctype", b"<html", b"<head")):
                raise UserError(
                    f"{path}: is an HTML page, the download failed; fetch the file itself"
                )


def open_file(path: str | Path, kind: FileLimit) -> io.BufferedReader:
    """A file that `check` accepts, for reading. Raises OSError."""
    check(path, kind)
    # Not blocking: where a pipe has taken the file's place since, there is an error or no content,
    # and never a wait.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def read_file(path: str | Path, kind: FileLimit) -> bytes:
    """The bytes of a file that `check` accepts. Raises OSError."""
    with open_file(path, kind) as file:
        return read_stream(file, kind)


def read_stream(stream: IO[bytes] | io.BufferedIOBase, kind: FileLimit) -> bytes:
    """All that is left in a stream. Raises OSError, at the kind's limit Refused."""
    parts, size, limit = [], 0, kind.limit
    while part := stream.read(min(STEP, limit + 1 - size)):
        size += len(part)
        parts.append(part)
        if size > limit:
            raise Refused(f"has more than {kind.remedy}")
    return b"".join(parts)


def read_gzip(path: str | Path, kind: FileLimit) -> bytes:
    """The unpacked bytes of a gzip file. Raises OSError, also for what is damaged; at the kind's
    limit Refused.
    """
    damaged = explained((EOFError, zlib.error), lambda why: Refused(str(why), path))
    with damaged, open_file(path, kind) as file, gzip.GzipFile(fileobj=file) as unpacked:
        return read_stream(unpacked, kind)


@contextmanager
def reading(path: object, remedy: str, *faults: type[Exception]) -> Iterator[None]:
    """An OSError or one of `faults` that is raised inside becomes `PATH cannot be read (WHY);
    REMEDY`, a UserError.
    """
    expected: tuple[type[Exception], ...] = (OSError, *faults)
    try:
        yield
    except UserError:
        raise
    except expected as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"{path} cannot be read ({' '.join(why.split())[:200]}); {remedy}"
        ) from error
