"""Open LMDB files for reading, and check them before the first read.

py-lmdb refuses to open a file twice in one process. Therefore all readers of a file in a process
share one handle. The file is closed when nothing refers to the handle any more. A handle must not
be used across a fork, so a forked child opens the file again.
"""

import ctypes
import json
import os
import threading
import weakref
import zlib
from pathlib import Path

import lmdb
import numpy as np

from duetgan.data.lmdb.format import (
    COMPLETE_KEY,
    FORMAT,
    FORMAT_KEY,
    META_KEY,
    VERSION,
    Completion,
    Meta,
)
from duetgan.data.lmdb.tree import check_tree
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained, refuse
from duetgan.utils.text import did_you_mean

# bytes copied at a time; NumPy makes an intermediate copy, which should stay in the CPU's cache
GATHER_BYTES = 512 << 10
MAGIC = bytes.fromhex("dec0efbe")  # at byte 16 of an LMDB file, little-endian


class RawBlocks:
    """Addresses, in the mapped file, of the verified raw blocks of one resolution.

    With an address, images are copied without LMDB. py-lmdb touches every page of a block at each
    `get`, so a block should be fetched only once.
    """

    def __init__(self, item: np.dtype, count: int) -> None:
        self.item = item  # a whole image is one item, so that NumPy copies it at once
        # address of the first byte of each block; -1: not verified yet
        self.addresses = np.full(count, -1, np.int64)
        # first address and end address of the added blocks, and a view of the memory in between, in
        # which an image starts at each byte
        self._view: tuple[int, int, np.ndarray] = (0, 0, np.empty(0, item))

    def add(self, block: int, pixels: np.ndarray) -> None:
        """Add the address of a verified block; `pixels` is a view of the block, uint8 [bytes]."""
        low, high, _ = self._view
        address = pixels.ctypes.data
        first, end = min(low or address, address), max(high, address + pixels.nbytes)
        if (first, end) != (low, high):
            # All blocks are in one mapping, so a batch from any blocks is a single gather from a
            # view in which an image starts at each byte.
            memory = np.frombuffer(
                memoryview((ctypes.c_ubyte * (end - first)).from_address(first)), np.uint8
            )
            images = np.ndarray(
                (end - first - self.item.itemsize + 1,), self.item, memory, strides=(1,)
            )
            images.setflags(write=False)
            self._view = (first, end, images)
        self.addresses[block] = address  # last, because other threads may use it from now on

    def copy(
        self,
        blocks: np.ndarray,
        rows: np.ndarray,
        out: np.ndarray,
        positions: np.ndarray | None = None,
    ) -> None:
        """Copy images of verified blocks into `out`, an array [n] of type `item`.

        Image `rows[i]` of block `blocks[i]` is copied to `out[positions[i]]` (default: `out[i]`).
        """
        offsets = self.addresses[blocks] + rows * self.item.itemsize
        # The view is read after the addresses, because another thread may add a block in between.
        first, _, images = self._view
        offsets -= first
        step = max(1, GATHER_BYTES // self.item.itemsize)
        for start in range(0, len(offsets), step):
            chosen = slice(start, start + step)
            out[chosen if positions is None else positions[chosen]] = images[offsets[chosen]]


class Handle:
    """An open LMDB file of this process.

    Views into the file are valid only as long as the handle exists, so each user of a view must
    keep a reference to the handle.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        self.environment = environment
        self.pid = os.getpid()
        self.lock = threading.Lock()  # for `transaction` and `raw`
        # one snapshot for all views
        self.transaction = environment.begin(buffers=True)
        self.raw: dict[int, RawBlocks] = {}  # by resolution


_lock = threading.RLock()
# Open files by (device, inode). A handle does not close its file in a method __del__, because
# another thread could acquire the handle while __del__ runs.
_handles: dict[tuple[int, int], tuple[weakref.ref[Handle], lmdb.Environment]] = {}


def acquire(path: Path) -> Handle:
    """Return the process's handle of the file `path`. If the file is not open, check and open it.

    Raises UserError for a file that is missing, truncated or not an LMDB file.
    """
    with _lock:
        status = _status(path)
        key = (status.st_dev, status.st_ino)
        if key in _handles:
            reference, environment = _handles[key]
            if (handle := reference()) is not None:
                return handle
            _close(key, environment)  # The thread that released the handle has not closed it yet.
        environment = _open(path, status.st_size)
        handle = Handle(environment)
        _handles[key] = (weakref.ref(handle), environment)
        # Not at the program's exit: threads may still be reading.
        weakref.finalize(handle, _close, key, environment).atexit = False
        return handle


def _close(key: tuple[int, int], environment: lmdb.Environment) -> None:
    with _lock:
        environment.close()
        if key in _handles and _handles[key][1] is environment:
            del _handles[key]


def _status(path: Path) -> os.stat_result:
    if path.is_dir():
        raise UserError(
            f"{path} is a folder, not a packed file: pack it with `duet pack {path} DEST.lmdb`"
        )
    if partial_path(path).exists() and not path.exists():
        raise UserError(f"{path} was not finished: run duet pack again")
    try:
        return files.check(path, files.ARCHIVE)
    except FileNotFoundError:
        hint = did_you_mean(path.name, [item.name for item in path.parent.glob("*.lmdb")])
        raise UserError(f"{path}: no such file{hint}; make it with duet pack") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; check the path") from None


def partial_path(path: Path) -> Path:
    """Return the path at which a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


def is_lmdb(path: Path) -> bool:
    """Return True if a file has LMDB's header. Raises UserError if it cannot be read."""
    with (
        files.reading(path, "check its permissions"),
        files.open_file(path, files.ARCHIVE) as file,
    ):
        return file.read(20)[16:] == MAGIC


def _open(path: Path, size: int) -> lmdb.Environment:
    if size == 0:
        raise UserError(
            f"{path} is empty: packing was not finished or the copy failed; run duet pack again"
        )
    if not is_lmdb(path):
        raise UserError(f"{path} is not an LMDB file: give a file made by duet pack")
    ahead = size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with files.reading(path, "it is damaged or truncated: pack it again", lmdb.Error):
        environment = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, create=False, readahead=ahead
        )
    try:
        # A read beyond the end of a mapped file kills the process (SIGBUS), so that the size must
        # be checked first.
        needed = used_bytes(environment)
        if size < needed:
            raise UserError(
                f"{path} is truncated: {size:,} of {needed:,} bytes; copy or pack it again"
            )
        with (
            files.reading(path, "it is damaged: copy or make it again", ValueError),
            files.open_file(path, files.ARCHIVE) as file,
        ):
            check_tree(file.fileno(), environment.stat()["psize"], size)
    except UserError:
        environment.close()
        raise
    return environment


def used_bytes(environment: lmdb.Environment) -> int:
    """Return the number of bytes in a file up to the end of its last page in use."""
    return (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]


def read_meta(path: Path, environment: lmdb.Environment) -> Meta:
    """Read the metadata of an open file.

    Raises UserError if the file was made by another program, is of a newer version, unfinished or
    damaged.
    """
    damaged = explained(
        lmdb.Error, lambda error: f"{path} is damaged ({error}); copy or pack it again"
    )
    with damaged, environment.begin() as transaction:
        mark, complete, meta_record = (
            transaction.get(key) for key in (FORMAT_KEY, COMPLETE_KEY, META_KEY)
        )
        entries = transaction.stat()["entries"]
    name, _, version = (mark or b"").decode(errors="replace").partition(" ")
    refuse(
        (
            name != FORMAT or not version.isdecimal(),
            f"{path} is an LMDB file but not a packed data set of this program: pack the images"
            " again",
        ),
        (
            version != str(VERSION),
            f"{path} has format version {version[:20]}, this program reads {VERSION}: update it or"
            " pack again",
        ),
    )
    if complete is None or meta_record is None:
        raise UserError(f"{path} was not finished: run duet pack again")
    with files.reading(
        f"{path}: its metadata record", "copy or pack it again", ValueError, RecursionError
    ):
        end = Completion.read(json.loads(complete), "the completion record")
        if end.meta_checksum != zlib.crc32(meta_record):
            raise ValueError("checksum does not match")
        meta = Meta.from_json(meta_record)
        if end.count not in (None, meta.count) or end.content_hash not in (None, meta.content_hash):
            raise ValueError("the completion record has another count or content_hash")
        meta.check_room(used_bytes(environment), entries)
        return meta


def _forked_child() -> None:
    """Close the parent's files in a forked child. In the parent, they stay open."""
    global _lock
    _lock = threading.RLock()
    for _, environment in list(_handles.values()):
        environment.close()
    _handles.clear()


os.register_at_fork(
    before=lambda: _lock.acquire() and None,
    after_in_parent=lambda: _lock.release(),
    after_in_child=_forked_child,
)
