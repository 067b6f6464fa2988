"""Read a packed data set: `LMDBReader`. The format is in data/format.py and docs/lmdb.md, writing in data/writer.py."""

import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import lmdb
import numpy as np

from data.environment import Handle, acquire
from data.format import (
    COMPLETE_KEY,
    ENTRY,
    FORMAT,
    FORMAT_KEY,
    INDEX_HEAD,
    META_KEY,
    VERSION,
    Meta,
    entry_checksum,
    index_key,
    picture_key,
    pixels_key,
)
from data.pictures import PictureError, decode_packed
from utils.errors import UserError

__all__ = ["DamageError", "LMDBReader", "Meta"]


class DamageError(UserError):
    """Records whose bytes are not those that were written."""

    def __init__(self, path: Path, records: range, reason: str) -> None:
        self.records, self.reason = records, reason
        name = f"record {records[0]}" + (f" to {records[-1]}" if len(records) > 1 else "")
        super().__init__(f"{path}: {name} is damaged: {reason}; copy or pack the file again")


class LMDBReader:
    """Pictures and labels of a packed file by index.

    Checked at opening: a missing, foreign, truncated, unfinished or newer file raises UserError. Checked at reading: a
    raw block's checksum when the process first touches it, an encoded picture's every time; damage raises DamageError
    naming the record. May be pickled, used after a fork and from several threads; each process opens the file itself.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handle: Handle | None = acquire(self.path)
        self._labels: np.ndarray | None = None
        self.meta = read_meta(self.path, self._handle.environment)

    @property
    def classes(self) -> list[str]:
        """Class names by label; empty if the set is unlabelled."""
        return self.meta.classes

    @property
    def resolution(self) -> int:
        """Side of the square pictures in px, or 0 where they have sizes of their own."""
        return self.meta.resolutions[0]

    def __len__(self) -> int:
        return self.meta.count

    def read(self, indices: Sequence[int] | np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Pictures uint8 [n, C, H, W] and labels int64 [n] of the given records, in the given order.

        `out`, if given, is filled and returned: uint8 [n, C, H, W], C-contiguous. Unlabelled pictures have label 0.
        Raises IndexError outside 0..len-1, DamageError for a damaged record, UserError for pictures of different sizes.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"record {wanted.min()}..{wanted.max()} of {len(self)}")
        if not self.resolution:
            raise UserError(f"{self.path}: pictures have sizes of their own; pack with --size N to read batches")
        shape = (len(wanted), self.meta.channels, self.resolution, self.resolution)
        pictures = np.empty(shape, np.uint8) if out is None else out
        if pictures.shape != shape or pictures.dtype != np.uint8 or not pictures.flags.c_contiguous:
            raise ValueError(f"out is {pictures.dtype} {pictures.shape}, expected contiguous uint8 {shape}")
        if not len(wanted):
            return pictures, np.empty(0, np.int64)
        if self.meta.encoding == "raw":
            self._read_raw(wanted, pictures)
        else:
            for row, index in enumerate(wanted.tolist()):
                pictures[row] = self.picture(index)[0].transpose(2, 0, 1)
        return pictures, self.labels()[wanted]

    def picture(self, index: int) -> tuple[np.ndarray, int]:
        """One picture uint8 [H, W, C] and its label. Raises as `read` does; pictures may have sizes of their own."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        if self.meta.encoding == "raw":
            pictures, labels = self.read([index])
            return pictures[0].transpose(1, 2, 0), int(labels[0])
        handle = self.handle()
        with handle.environment.begin(buffers=True) as transaction:
            entry, payload = self.encoded_record(transaction, index)
            try:
                return decode_packed(payload, self.meta.encoding, self.meta.channels), int(entry["label"])
            except PictureError as error:
                raise self.damage(index, str(error)) from None

    def labels(self) -> np.ndarray:
        """All labels, int64 [count], read-only."""
        if self._labels is None:
            handle = self.handle()
            with handle.environment.begin(buffers=True) as transaction:
                blocks = range(self.blocks)
                parts = [self.index_record(transaction, block)[1]["label"].astype(np.int64) for block in blocks]
            labels = np.concatenate(parts)
            labels.setflags(write=False)
            self._labels = labels
        return self._labels

    @property
    def blocks(self) -> int:
        """Number of blocks (raw pictures) or index records (encoded ones)."""
        return -(-len(self) // self.meta.block)

    def block_range(self, block: int) -> range:
        """The records of a block."""
        return range(block * self.meta.block, min(len(self), (block + 1) * self.meta.block))

    def index_record(self, transaction: lmdb.Transaction, block: int) -> tuple[np.void, np.ndarray]:
        """A block's index: its head (INDEX_HEAD) and its entries (ENTRY [n]). Raises UserError if it is damaged."""
        records = self.block_range(block)
        value = self._get(transaction, index_key(block, self.resolution), records)
        if len(value) != INDEX_HEAD.itemsize + len(records) * ENTRY.itemsize:
            raise self.damage(records, "its index is missing or has another length")
        head = np.frombuffer(value, INDEX_HEAD, 1)[0]
        if zlib.crc32(value[INDEX_HEAD.itemsize :]) != head["checksum"]:
            raise self.damage(records, "the checksum of its index does not match")
        return head, np.frombuffer(value, ENTRY, offset=INDEX_HEAD.itemsize).copy()

    def raw_block(self, transaction: lmdb.Transaction, block: int) -> np.ndarray:
        """The pictures of a raw block as a view into the file: uint8 [n, C, H, W]; valid within the transaction."""
        records = self.block_range(block)
        shape = (len(records), self.meta.channels, self.resolution, self.resolution)
        value = self._get(transaction, pixels_key(block, self.resolution), records)
        if len(value) != math.prod(shape):
            raise self.damage(records, "its block is missing or has another length")
        return np.frombuffer(value, np.uint8).reshape(shape)

    def encoded_record(self, transaction: lmdb.Transaction, index: int) -> tuple[np.void, memoryview]:
        """The entry and the checked payload of an encoded picture; the payload is valid within the transaction."""
        value = self._get(transaction, picture_key(index, self.resolution), range(index, index + 1))
        if len(value) < ENTRY.itemsize:
            raise self.damage(index, "it is missing")
        entry, payload = np.frombuffer(value, ENTRY, 1)[0], value[ENTRY.itemsize :]
        # The length first: a damaged one could lead beyond the end of the file.
        if len(payload) != entry["size"] or entry_checksum(entry, payload) != entry["checksum"]:
            raise self.damage(index, "its checksum does not match")
        return entry, payload

    def damaged_in_raw_block(self, transaction: lmdb.Transaction, block: int) -> Iterator[int]:
        """The records of a raw block whose own checksum does not match."""
        _, entries = self.index_record(transaction, block)
        for record, entry, picture in zip(
            self.block_range(block), entries, self.raw_block(transaction, block), strict=True
        ):
            if entry_checksum(entry, picture.tobytes()) != entry["checksum"]:
                yield record

    def damage(self, record: int | range, reason: str) -> DamageError:
        """The error for a damaged record or block."""
        return DamageError(self.path, range(record, record + 1) if isinstance(record, int) else record, reason)

    def close(self) -> None:
        """Let the file go; it is closed when no reader of the process uses it. The next read opens it again."""
        self._handle = None

    def __enter__(self) -> "LMDBReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "meta": self.meta}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._handle = self._labels = None

    def handle(self) -> Handle:
        """The file opened by this process; when it is opened anew it must still hold the same data set."""
        handle = self._handle
        if handle is None or handle.pid != os.getpid():
            handle = acquire(self.path)
            if read_meta(self.path, handle.environment) != self.meta:
                raise UserError(f"{self.path} was replaced by another data set while it was in use; start again")
            self._handle = handle
        return handle

    def _get(self, transaction: lmdb.Transaction, key: bytes, records: range) -> memoryview:
        """The value of a key as a view into the file; empty if there is none. `records` are those it holds."""
        try:
            return memoryview(transaction.get(key, b""))
        except lmdb.Error as error:
            raise self.damage(records, str(error)) from None

    def _read_raw(self, wanted: np.ndarray, out: np.ndarray) -> None:
        """Gather records into `out`, one NumPy gather per block that they lie in."""
        handle = self.handle()
        picture = np.dtype((np.void, out[0].nbytes))  # a picture as one item: NumPy copies it whole
        target = out.reshape(len(out), -1).view(picture)[:, 0]
        blocks, rows = np.divmod(wanted, self.meta.block)
        order = np.argsort(blocks, kind="stable")
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            places = order[start:end]
            pixels = self._verified_block(handle, int(blocks[places[0]]))
            target[places] = pixels.view(picture)[rows[places]]

    def _verified_block(self, handle: Handle, block: int) -> np.ndarray:
        """A raw block's pictures as a flat view into the file, uint8; its checksum is verified at the first touch."""
        key = pixels_key(block, self.resolution)
        pixels = handle.blocks.get(key)
        if pixels is None:
            with handle.lock:
                pixels = self.raw_block(handle.transaction, block).reshape(-1)
                head, _ = self.index_record(handle.transaction, block)
                if zlib.crc32(pixels.data) != head["block_checksum"]:
                    first = next(self.damaged_in_raw_block(handle.transaction, block), None)
                    records = self.block_range(block) if first is None else first
                    raise self.damage(records, "its checksum does not match")
                handle.blocks[key] = pixels
        return pixels


def read_meta(path: Path, environment: lmdb.Environment) -> Meta:
    """The metadata of an open file. Raises UserError if it is not ours, newer, not finished or damaged."""
    try:
        with environment.begin() as transaction:
            mark, complete, record = (transaction.get(key) for key in (FORMAT_KEY, COMPLETE_KEY, META_KEY))
    except lmdb.Error as error:
        raise UserError(f"{path} is damaged ({error}); copy or pack it again") from None
    name, _, version = (mark or b"").decode(errors="replace").partition(" ")
    if name != FORMAT or not version.isdigit():
        raise UserError(f"{path} is an LMDB file but not a packed data set of this program: pack the pictures again")
    if int(version) != VERSION:
        raise UserError(f"{path} has format version {version}, this program reads {VERSION}: update it or pack again")
    if complete is None or record is None:
        raise UserError(f"{path} was not finished: run data.pack again")
    try:
        if json.loads(complete)["meta_checksum"] != zlib.crc32(record):
            raise ValueError("checksum does not match")
        return Meta.from_json(record)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: its metadata record is damaged ({error}); copy or pack it again") from None
