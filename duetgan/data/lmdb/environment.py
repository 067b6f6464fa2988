"""Open LMDB files for reading: checked before the first read, one handle per process and file, safe
under fork.

py-lmdb refuses to open a file twice in one process, and a handle must not be used across a fork. So
the readers of a process share one handle per file, which closes when the last of them lets it go,
and a forked child opens its own.
"""

import ctypes
import errno
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
from duetgan.data.tar_files import TarFiles
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import did_you_mean

# gathered at once: NumPy makes a copy on the way, which should not leave the cache
GATHER_BYTES = 512 << 10
MAGIC = bytes.fromhex("dec0efbe")  # LMDB's, little-endian, 16 bytes into its first page


class RawBlocks:
    """The raw blocks of one resolution that were verified, as places in the mapped file.

    py-lmdb touches every page of a value at each `get`, so a block is got once.
    """

    def __init__(self, item: np.dtype, count: int) -> None:
        self.item = item  # an image as one item: NumPy copies it whole
        # of the blocks' first bytes; -1: not verified yet
        self.addresses = np.full(count, -1, np.int64)
        # the records of a block that do not match their checksums
        self.damaged: dict[int, frozenset[int]] = {}
        # first and last address, images
        self._view: tuple[int, int, np.ndarray] = (0, 0, np.empty(0, item))

    def add(self, block: int, pixels: np.ndarray) -> None:
        """Note where a block lies: a view into the file, uint8 [bytes]."""
        low, high, _ = self._view
        address = pixels.ctypes.data
        first, end = min(low or address, address), max(high, address + pixels.nbytes)
        if (first, end) != (low, high):
            # All blocks lie in one mapping. Seen as an image that begins at each of its bytes,
            # whatever blocks a batch comes from, it is one gather.
            memory = np.frombuffer(
                memoryview((ctypes.c_ubyte * (end - first)).from_address(first)), np.uint8
            )
            images = np.ndarray(
                (end - first - self.item.itemsize + 1,), self.item, memory, strides=(1,)
            )
            images.setflags(write=False)
            self._view = (first, end, images)
        self.addresses[block] = address  # last: other threads may take it from now on

    def copy(
        self,
        blocks: np.ndarray,
        rows: np.ndarray,
        out: np.ndarray,
        places: np.ndarray | None = None,
    ) -> None:
        """Copy images of verified blocks into `out`, `item` [n], at `places` (default: in order)."""
        offsets = self.addresses[blocks] + rows * self.item.itemsize
        # after the addresses: another thread may add a block meanwhile
        first, _, images = self._view
        offsets -= first
        step = max(1, GATHER_BYTES // self.item.itemsize)
        for start in range(0, len(offsets), step):
            chosen = slice(start, start + step)
            out[chosen if places is None else places[chosen]] = images[offsets[chosen]]


class Handle:
    """An open file of this process.

    Views into the file are valid as long as the handle lives: whoever uses one keeps a reference to
    it meanwhile.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        self.environment = environment
        self.pid = os.getpid()
        self.lock = threading.Lock()  # for `transaction`, `raw` and `tars`
        # one snapshot for the views, as long as the handle lives
        self.transaction = environment.begin(buffers=True)
        self.raw: dict[int, RawBlocks] = {}  # by resolution
        self.tars: TarFiles | None = None  # that hold the images of an index


_lock = threading.RLock()
# By (device, inode). No __del__ closes a file: another thread could take a handle from here while
# it runs.
_handles: dict[tuple[int, int], tuple[weakref.ref[Handle], lmdb.Environment]] = {}


def acquire(path: Path) -> Handle:
    """The process's handle on `path`; opened and checked if it is not open yet.

    Raises UserError for a file that is missing, is no LMDB file or is truncated.
    """
    with _lock:
        status = _status(path)
        key = (status.st_dev, status.st_ino)
        if key in _handles:
            reference, environment = _handles[key]
            if (handle := reference()) is not None:
                return handle
            _close(key, environment)  # let go in another thread, which has yet to call this
        environment = _open(path, status.st_size)
        handle = Handle(environment)
        _handles[key] = (weakref.ref(handle), environment)
        # threads may be reading until the end
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
    try:
        return bounded.check(path, bounded.ARCHIVE)
    except FileNotFoundError:
        if partial_path(path).exists():
            raise UserError(f"{path} was not finished: run duet pack again") from None
        hint = f", nor a folder {path.parent}"
        if path.parent.is_dir():
            hint = did_you_mean(path.name, [item.name for item in path.parent.glob("*.lmdb")])
        raise UserError(f"{path}: no such file{hint}; make it with duet pack") from None
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or errno.errorcode.get(error.errno or 0)}; check the path"
        ) from None


def partial_path(path: Path) -> Path:
    """Where a file is built before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


def is_lmdb(path: Path) -> bool:
    """Whether a file begins as LMDB's do. Raises UserError if it cannot be read."""
    with (
        bounded.reading(path, "check its permissions"),
        bounded.open_file(path, bounded.ARCHIVE) as file,
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
    with bounded.reading(path, "it is damaged or truncated: pack it again", lmdb.Error):
        environment = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, create=False, readahead=ahead
        )
    # A read beyond the end of a mapped file kills the process (SIGBUS): compare sizes before the
    # first one.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        environment.close()
        raise UserError(f"{path} is truncated: {size:,} of {needed:,} bytes; copy or pack it again")
    try:
        with bounded.open_file(path, bounded.ARCHIVE) as file:
            check_tree(file.fileno(), environment.stat()["psize"], size)
    except (OSError, ValueError) as error:
        environment.close()
        raise UserError(f"{path} is damaged ({error}); copy or make it again") from None
    return environment


def read_meta(path: Path, environment: lmdb.Environment) -> Meta:
    """The metadata of an open file. Raises UserError if it is not ours, newer, not finished or
    damaged.
    """
    damaged = explained(lmdb.Error, lambda why: f"{path} is damaged ({why}); copy or pack it again")
    with damaged, environment.begin() as transaction:
        mark, complete, meta_record = (
            transaction.get(key) for key in (FORMAT_KEY, COMPLETE_KEY, META_KEY)
        )
        entries = transaction.stat()["entries"]
    name, _, version = (mark or b"").decode(errors="replace").partition(" ")
    if name != FORMAT or not version.isdecimal():
        raise UserError(
            f"{path} is an LMDB file but not a packed data set of this program: pack the images again"
        )
    if version != str(VERSION):
        raise UserError(
            f"{path} has format version {version[:20]}, this program reads {VERSION}: update it or pack again"
        )
    if complete is None or meta_record is None:
        raise UserError(f"{path} was not finished: run duet pack again")
    with bounded.reading(
        f"{path}: its metadata record", "copy or pack it again", ValueError, RecursionError
    ):
        end = Completion.read(json.loads(complete), "the completion record")
        if end.meta_checksum != zlib.crc32(meta_record):
            raise ValueError("checksum does not match")
        meta = Meta.from_json(meta_record)
        if end.count not in (None, meta.count) or end.content_hash not in (None, meta.content_hash):
            raise ValueError("the completion record has another count or content_hash")
        meta.check_room(
            (environment.info()["last_pgno"] + 1) * environment.stat()["psize"], entries
        )
        return meta


def _forked_child() -> None:
    """Close what the parent had open: closing unmaps the child's own copy and leaves the parent's
    alone.
    """
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
