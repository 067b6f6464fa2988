"""Files that are whole or not there: written beside the target, flushed to the disk, renamed."""

import os
import tempfile
from pathlib import Path

from utils.errors import UserError


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a crash leaves the old file or the new one, never a part. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | Path, content: bytes) -> None:
    """`replace_file` for a result that the user asked for; makes missing folders.

    Raises:
        UserError: the folder cannot be made or the file cannot be written (no permission, disk full, ...).
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place or make room") from error


def check_writable(folder: Path) -> None:
    """Raise UserError if `folder` cannot be made or written, before the work that fills it. Leaves nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
