"""Read the user's files within size limits, and write files atomically.

Only regular files are opened, so that a named pipe never hangs the program. A read stops at the
limit of the file's kind, whatever size the file claims to have. New content goes to a temporary
file, which is flushed to the disk and then renamed.

tests/utils/test_bounded.py checks that no other module opens a user's file directly.
"""

import errno
import fcntl
import gzip
import io
import json
import os
import socket
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
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
os.umask(UMASK := os.umask(0o77))  # a process can read its umask only by setting it
TIMEOUT = 30  # seconds without an answer before a download is abandoned


# --- reading


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
    """The error for a file that Duet refuses to read.

    `strerror` is the reason, without the file's name.
    """

    def __init__(self, reason: str, path: object = None) -> None:
        super().__init__(errno.EINVAL, reason, path)

    def __str__(self) -> str:
        return str(self.strerror)


def refuse_large(size: int, kind: FileLimit, path: object = None) -> None:
    """Raise Refused if `size` bytes are more than `kind` allows."""
    if size > kind.limit:
        raise Refused(f"has {size:,} bytes, more than {kind.remedy}", path)


def check(path: str | Path, kind: FileLimit) -> os.stat_result:
    """Check that a path leads to a regular file of an allowed size, and return its `os.stat`.

    Links are followed. Raises Refused if the check fails, and OSError if there is no such file.
    """
    if "\0" in os.fspath(path):
        raise Refused("is no file name: it holds a NUL character", path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        file_kind = FILE_KINDS.get(stat.filemode(status.st_mode)[0], "something else")
        raise Refused(f"is {file_kind}, not a regular file", path)
    refuse_large(status.st_size, kind, path)
    return status


def open_file(path: str | Path, kind: FileLimit) -> io.BufferedReader:
    """Check a file (see `check`) and open it for reading. Raises OSError."""
    check(path, kind)
    # Non-blocking, because a pipe may have replaced the file since the check: the read then fails
    # or is empty, but never waits.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def read_file(path: str | Path, kind: FileLimit) -> bytes:
    """Check a file (see `check`) and return its bytes. Raises OSError."""
    with open_file(path, kind) as file:
        return read_stream(file, kind)


def read_stream(stream: IO[bytes] | io.BufferedIOBase, kind: FileLimit) -> bytes:
    """Return the remaining bytes of a stream.

    Raises Refused if these are more than `kind` allows, and OSError if they cannot be read.
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

    Raises Refused if these are more than `kind` allows, and OSError if the file is damaged or
    cannot be read.
    """
    damaged = explained((EOFError, zlib.error), lambda error: Refused(str(error), path))
    with damaged, open_file(path, kind) as file, gzip.GzipFile(fileobj=file) as unpacked:
        return read_stream(unpacked, kind)


@contextmanager
def reading(path: object, remedy: str, *faults: type[Exception]) -> Iterator[None]:
    """Turn exceptions in the block into UserError `PATH cannot be read (REASON); REMEDY`.

    This applies to OSError and to the types in `faults`. A UserError passes unchanged.
    """
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


# --- writing


@contextmanager
def downloading(problem: str, remedy: str) -> Iterator[None]:
    """Limit the time that a download in the block waits, and redirect its stdout to stderr.

    Raises UserError for a failed download: `PROBLEM and cannot be downloaded (REASON); REMEDY`.

    Args:
        problem: the beginning of the message, which says that a file is missing.
        remedy: the end of the message, which tells the user what to do instead.
    """
    previous_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)  # a network that drops packets must not hang the program
    try:
        with redirect_stdout(sys.stderr):
            yield
    # URLError is an OSError; torch raises RuntimeError for a wrong hash.
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(f"{problem} and cannot be downloaded ({reason}); {remedy}") from error
    finally:
        socket.setdefaulttimeout(previous_timeout)


def replaceable(path: Path) -> Path:
    """Return the file that a write to `path` replaces: a link's target, otherwise `path`.

    Raises OSError if something other than a regular file is there.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.exists():
        check(target, ARCHIVE)
    return target


def hold(file: IO[bytes] | IO[str] | int, *, wait: bool = False) -> bool:
    """Lock a file until it is closed, and return True.

    If another process holds the lock, wait for it if `wait` is True; otherwise return False. On a
    file system without locks, print a warning and return True. Raises OSError for other failures.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        print(
            f"warning: files cannot be locked ({error.strerror}): run only one process in this folder",
            file=sys.stderr,
        )
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends without an error.

    The temporary file is flushed to the disk before it is renamed. After a crash `path` holds the
    complete old content or the complete new content. After an exception it holds the old content.
    Raises OSError.
    """
    path = replaceable(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically (see `replacing`). Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def as_json(document: object) -> bytes:
    """Encode a document as indented JSON with a final newline. Raises ValueError for NaN."""
    return f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk; before that, a crash may undo a rename in the folder.

    Raises OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, *faults: type[Exception]) -> Iterator[None]:
    """Create the parent folders of `path`, then run the block, which writes a result there.

    An OSError, or an exception of one of the types in `faults`, becomes UserError.
    """
    words = "cannot write {}: {}; choose another place or make room"
    with explained(
        (OSError, *faults),
        lambda error: words.format(path, getattr(error, "strerror", None) or error),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends without an error.

    Missing folders are created. An OSError becomes UserError.
    """
    with writing(path), replacing(path) as temporary:
        yield temporary


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write a file atomically and create missing folders. Raises UserError if that fails."""
    with building(Path(path)) as temporary:
        temporary.write_bytes(content)


def check_writable(folder: Path) -> None:
    """Raise UserError if `folder` cannot be created, or files cannot be written into it.

    Call this before long work. It leaves no file or folder behind.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    refused = explained(
        OSError,
        lambda error: f"{folder}: cannot be written ({error.strerror}); choose another folder",
    )
    with refused, tempfile.TemporaryFile(dir=existing):
        pass
