"""Write files atomically: to a temporary file, flushed to the disk, then renamed."""

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO

from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained

os.umask(UMASK := os.umask(0o77))  # a process can read its umask only by setting it
TIMEOUT = 30  # seconds without an answer before a download is abandoned


@contextmanager
def downloading(problem: str, remedy: str) -> Iterator[None]:
    """Set a timeout for a download inside the block, and send its output to stderr.

    Raises UserError for a failed download: `PROBLEM and cannot be downloaded (REASON); REMEDY`.

    Args:
        problem: says that a file is missing.
        remedy: tells the user what to do instead.
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
    """Return the file that a write to `path` replaces: `path`, or the target of a link.

    Raises OSError if something other than a regular file is there.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.exists():
        bounded.check(target, bounded.ARCHIVE)
    return target


def hold(file: IO[bytes] | IO[str] | int, *, wait: bool = False) -> bool:
    """Lock a file until it is closed. If another process holds the lock, wait or return False.

    Where the file system has no locks, print a warning and return True. Raises OSError.
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

    The file is flushed to the disk before it is renamed. After a crash `path` is the old file or
    the new one, never a part; an exception leaves the old one. Raises OSError.
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
    """Write `content` to `path` atomically, by way of `replacing`. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def as_json(document: object) -> bytes:
    """Return a document as indented JSON with a final newline. Raises ValueError for NaN."""
    return f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, without which a rename may be lost. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, *faults: type[Exception]) -> Iterator[None]:
    """Create the parent folders of a result at `path`; turn failures into UserError.

    Failures are an OSError, or one of `faults`, inside the block.
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

    Creates missing folders. Raises UserError for failures.
    """
    with writing(path), replacing(path) as temporary:
        yield temporary


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write a file atomically and create missing folders. Raises UserError if that fails."""
    with building(Path(path)) as temporary:
        temporary.write_bytes(content)


def check_writable(folder: Path) -> None:
    """Raise UserError if `folder` cannot be created or written. To be called before long work.

    Leaves no file behind.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    refused = explained(
        OSError,
        lambda error: f"{folder}: cannot be written ({error.strerror}); choose another folder",
    )
    with refused, tempfile.TemporaryFile(dir=existing):
        pass
