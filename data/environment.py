"""Open LMDB files for reading: checked before the first read, one handle per process and file, safe under fork.

py-lmdb refuses to open a file twice in one process, and a handle must not be used across a fork. So the readers of a
process share one handle per file, which closes when the last of them lets it go, and a forked child opens its own.
"""

import errno
import os
import threading
import weakref
from pathlib import Path

import lmdb
import numpy as np

from utils.cli import did_you_mean
from utils.errors import UserError

MAGIC = bytes.fromhex("dec0efbe")  # LMDB's, little-endian, 16 bytes into its first page


class Handle:
    """An open file of this process.

    `blocks` holds the raw blocks that were read and verified, as views into the file: py-lmdb touches every page of a
    value at each `get`, so a block is got once. The views are valid as long as the handle lives: whoever uses one
    keeps a reference to the handle meanwhile.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        self.environment = environment
        self.pid = os.getpid()
        self.lock = threading.Lock()  # for `transaction` and `blocks`
        self.transaction = environment.begin(buffers=True)  # one snapshot for the views, as long as the handle lives
        self.blocks: dict[bytes, np.ndarray] = {}

    def __del__(self) -> None:
        self.environment.close()


_lock = threading.RLock()
_handles: weakref.WeakValueDictionary[tuple[int, int], Handle] = weakref.WeakValueDictionary()  # by (device, inode)


def acquire(path: Path) -> Handle:
    """The process's handle on `path`; opened and checked if it is not open yet.

    Raises UserError for a file that is missing, is no LMDB file or is truncated.
    """
    with _lock:
        status = _status(path)
        key = (status.st_dev, status.st_ino)
        handle = _handles.get(key)
        if handle is None:
            handle = _handles[key] = Handle(_open(path, status.st_size))
        return handle


def _status(path: Path) -> os.stat_result:
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a packed file: pack it with `python -m data.pack {path} DEST.lmdb`")
    try:
        return path.stat()
    except FileNotFoundError:
        if partial_path(path).exists():
            raise UserError(f"{path} was not finished: run data.pack again") from None
        names = [item.name for item in path.parent.glob("*.lmdb")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, names) if path.parent.is_dir() else f", nor a folder {path.parent}"
        raise UserError(f"{path}: no such file{hint}; make it with data.pack") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or errno.errorcode.get(error.errno or 0)}; check the path") from None


def partial_path(path: Path) -> Path:
    """Where a file is built before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


def _open(path: Path, size: int) -> lmdb.Environment:
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    if size == 0:
        raise UserError(f"{path} is empty: packing was not finished or the copy failed; run data.pack again")
    if head[16:] != MAGIC:
        raise UserError(f"{path} is not an LMDB file: give a file made by data.pack")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        environment = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, create=False, meminit=False, readahead=size <= physical
        )
    except lmdb.Error as error:
        raise UserError(f"{path} cannot be opened ({error}), it is damaged or truncated: pack it again") from None
    # A read beyond the end of a mapped file kills the process (SIGBUS): compare sizes before the first one.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        environment.close()
        raise UserError(f"{path} is truncated: {size:,} of {needed:,} bytes; copy or pack it again")
    return environment


def _forked_child() -> None:
    """Close what the parent had open: closing unmaps the child's own copy and leaves the parent's alone."""
    global _lock
    _lock = threading.RLock()
    for handle in list(_handles.values()):
        handle.environment.close()
    _handles.clear()


os.register_at_fork(
    before=lambda: _lock.acquire() and None, after_in_parent=lambda: _lock.release(), after_in_child=_forked_child
)
