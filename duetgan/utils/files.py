"""Files that are complete or absent: written beside the target, flushed to the disk, renamed."""

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
from typing import IO, Any

from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained

os.umask(UMASK := os.umask(0o77))  # the process's own, which can only be read by setting it
TIMEOUT = 30  # seconds without an answer before a download is given up


@contextmanager
def downloading(what: str, remedy: str) -> Iterator[None]:
    """Around a download: output goes to stderr, no endless waiting. A failure is a UserError that
    begins with `what`, that something is not here, and ends with the remedy.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)  # a network that swallows packets must not hang the start
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (
        OSError,
        RuntimeError,
    ) as error:  # URLError is an OSError; a wrong hash is a RuntimeError
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(f"{what} and cannot be downloaded ({why}); {remedy}") from error
    finally:
        socket.setdefaulttimeout(before)


def replaceable(path: Path) -> Path:
    """The file that takes the place of `path`: itself, or what it points to if it is a link, which
    stays.

    Raises OSError for what is there and no regular file.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.exists():
        bounded.check(target, bounded.ARCHIVE)
    return target


def hold(file: IO[Any] | int, *, wait: bool = False) -> bool:
    """Hold a file alone until it is closed; False where another process holds it. Where the file
    system has no locks a warning says that nothing is held. Raises OSError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        print(
            f"warning: no file can be locked ({error.strerror}): run one process alone here",
            file=sys.stderr,
        )
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, flushed to the disk and renamed when the context ends
    without an error.

    A crash leaves the old file or the new one, never a part; an exception leaves the old one.
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
    """Write `path` whole, see `replacing`. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def as_json(document: object) -> bytes:
    """A document as a run's files hold it: indented, with an end of line. Raises ValueError for
    NaN.
    """
    return f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: a rename lasts only then. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, *faults: type[Exception]) -> Iterator[None]:
    """Around the writing of a result that was asked for; makes missing folders. UserError if the
    disk refuses, and for what else, of `faults`, is raised inside.
    """
    words = "cannot write {}: {}; choose another place or make room"
    with explained(
        (OSError, *faults), lambda why: words.format(path, getattr(why, "strerror", None) or why)
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """`replacing` for a result that the user asked for, `writing` around it."""
    with writing(path), replacing(path) as temporary:
        yield temporary


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write a file whole, see `building`. Raises UserError."""
    with building(Path(path)) as temporary:
        temporary.write_bytes(content)


def check_writable(folder: Path) -> None:
    """Raise UserError if `folder` cannot be made or written, before the work that fills it. Leaves
    nothing behind.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    refused = explained(
        OSError, lambda why: f"{folder}: cannot be written ({why.strerror}); choose another folder"
    )
    with refused, tempfile.TemporaryFile(dir=existing):
        pass
