"""Read a packed data set: `LMDBReader`. The format is in data/lmdb/format.py and docs/lmdb.md."""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import numpy as np
from pydantic import TypeAdapter

from duetgan.data.errors import MOST_PIXELS, ImageError
from duetgan.data.lmdb.environment import Handle, RawBlocks, acquire, read_meta
from duetgan.data.lmdb.format import (
    ENTRY,
    IMAGE_KEY,
    INDEX_HEAD,
    INDEX_KEY,
    NAME_KEY,
    PIXELS_KEY,
    SIGNATURE,
    SIGNATURE_KEY,
    SIGNATURES,
    entry_checksum,
)
from duetgan.utils.errors import DamageError, UserError
from duetgan.utils.image_spec import ImageSpec

NAMES = TypeAdapter(list[str])


class LMDBReader(AbstractContextManager["LMDBReader"]):
    """A reader of the images and labels of a packed file, by index and at one resolution.

    `resolution` is the shorter side of the images in px, by default the largest that is stored. It
    is 0 for images of individual sizes.

    Opening raises UserError for a file that is missing, made by another program, truncated,
    unfinished or of a newer version. Reading verifies checksums: a raw block's when the process
    first uses the block, an encoded image's every time. A mismatch raises DamageError, which names
    the record. A reader may be pickled, used after a fork, and used by several threads. Each
    process opens the file itself.
    """

    def __init__(self, path: str | Path, *, resolution: int | None = None) -> None:
        self.path = Path(path)
        # index of this file's first record in a data set of several files, for DamageError
        self.first = 0
        self._handle: Handle | None = acquire(self.path)
        self._labels: np.ndarray | None = None
        self.meta = read_meta(self.path, self._handle.environment)
        if resolution not in (None, *self.meta.resolutions):
            stored = ", ".join(map(str, self.meta.resolutions))
            raise UserError(
                f"{self.path} holds no images of {resolution} px, only of {stored}: choose one of"
                " them"
            )
        self.resolution: int = resolution or self.meta.resolutions[-1]

    @property
    def classes(self) -> list[str]:
        """Class names by label; empty if the data set is unlabelled."""
        return self.meta.classes

    @property
    def spec(self) -> ImageSpec:
        """Size, channels and pixel format of the images at this resolution."""
        return self.meta.spec.at(self.resolution)

    @property
    def block(self) -> int:
        """Images per block at this resolution."""
        return self.meta.blocks[self.meta.resolutions.index(self.resolution)]

    def __len__(self) -> int:
        return self.meta.count

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [count], read-only.

        Raises DamageError for a damaged index, and for a label without a class.
        """
        if self._labels is None:
            handle = self.handle()
            parts = []
            with handle.environment.begin(buffers=True) as transaction:
                for block in range(self.blocks):
                    _, entries = self.index_record(transaction, block)
                    parts.append(entries["label"].astype(np.int64))
            labels = np.concatenate(parts)
            unknown = np.flatnonzero((labels < 0) | (labels >= max(1, self.meta.labels)))
            if len(unknown):
                label, classes = labels[unknown[0]], len(self.classes)
                reason = f"label {label} has no class, the file has {classes} classes"
                raise self.damage(unknown.tolist(), reason)
            labels.setflags(write=False)
            self._labels = labels
        return self._labels

    def signatures(self) -> np.ndarray:
        """Return the signatures of all images, SIGNATURE [count], by which duplicates are found.

        data/lmdb/format.py describes the type SIGNATURE. Raises DamageError.
        """
        parts = []
        for records, value in self._read_groups(SIGNATURE_KEY, "signatures"):
            if len(value) != len(records) * SIGNATURE.itemsize:
                raise self.damage(records, "its signatures are missing or have another length")
            parts.append(np.frombuffer(value, SIGNATURE))
        return np.concatenate(parts)

    def names(self) -> list[str]:
        """Return the images' names in the packed source, with "" for an image without a name.

        Raises DamageError.
        """
        names: list[str] = []
        for records, value in self._read_groups(NAME_KEY, "names"):
            stored = [""] * len(records)
            if value:
                try:
                    stored = NAMES.validate_json(value)
                except ValueError:
                    raise self.damage(records, "its names are no list of text") from None
            if len(stored) != len(records):
                raise self.damage(records, f"it has {len(stored)} names")
            names += stored
        return names

    def _read_groups(self, key: bytes, content: str) -> Iterator[tuple[range, bytes]]:
        """Yield the records of each group of SIGNATURES images, and the group's stored value.

        The records are a range. The value comes without its checksum; it is b"" if the file has
        none.

        Args:
            key: the value's key, with %d for the number of the group, such as NAME_KEY.
            content: name of the value in messages.
        """
        with self.handle().environment.begin(buffers=True) as transaction:
            for start in range(0, len(self), SIGNATURES):
                records = range(start, min(len(self), start + SIGNATURES))
                value = bytes(self._get(transaction, key % (start // SIGNATURES), records))
                if value and zlib.crc32(value[4:]) != int.from_bytes(value[:4], "little"):
                    raise self.damage(records, f"the checksum of its {content} does not match")
                yield records, value[4:]

    @property
    def blocks(self) -> int:
        """Number of blocks. A block is a group of images whose entries share one index record."""
        return -(-len(self) // self.block)

    def block_range(self, block: int) -> range:
        """Return the indices of a block's records."""
        return range(block * self.block, min(len(self), (block + 1) * self.block))

    def index_record(self, transaction: lmdb.Transaction, block: int) -> tuple[np.void, np.ndarray]:
        """Read the index of a block: its head (INDEX_HEAD) and its entries (ENTRY [n]).

        Raises DamageError, also for an impossible image size.
        """
        records = self.block_range(block)
        value = self._get(transaction, INDEX_KEY % (block, self.resolution), records)
        if len(value) != INDEX_HEAD.itemsize + len(records) * ENTRY.itemsize:
            raise self.damage(records, "its index is missing or has another length")
        head = np.frombuffer(value, INDEX_HEAD, 1)[0]
        if zlib.crc32(value[INDEX_HEAD.itemsize :]) != head["checksum"]:
            raise self.damage(records, "the checksum of its index does not match")
        entries = np.frombuffer(value, ENTRY, offset=INDEX_HEAD.itemsize).copy()
        height, width = entries["height"], entries["width"]
        if self.resolution:
            wrong = (height != self.spec.height) | (width != self.spec.width)
        else:
            wrong = (height == 0) | (width == 0) | (height.astype(np.float64) * width > MOST_PIXELS)
        if wrong.any():
            damaged = (np.flatnonzero(wrong) + records.start).tolist()
            raise self.damage(damaged, "its size cannot be")
        return head, entries

    def raw_block(self, transaction: lmdb.Transaction, block: int) -> np.ndarray:
        """Return the images of a raw block, [n, C, H, W], as a view into the file.

        The view is valid within the transaction. The checksum of the block is not compared. Raises
        DamageError if the block is missing or has a wrong length.
        """
        records = self.block_range(block)
        shape = (len(records), *self.spec.shape)
        value = self._get(transaction, PIXELS_KEY % (block, self.resolution), records)
        if len(value) != len(records) * self.spec.nbytes:
            raise self.damage(records, "its block is missing or has another length")
        return np.frombuffer(value, self.spec.depth).reshape(shape)

    @contextmanager
    def encoded(self, index: int) -> Iterator[tuple[np.void, memoryview, tuple[int, int]]]:
        """Yield the entry, the payload, and the height and width of an encoded image.

        They are valid inside the `with` block. An ImageError that is raised there becomes a
        DamageError.
        """
        # The reference keeps the views valid if another thread closes the reader.
        handle = self.handle()
        with handle.environment.begin(buffers=True) as transaction:
            value = self._get(
                transaction, IMAGE_KEY % (index, self.resolution), range(index, index + 1)
            )
            try:
                if len(value) < ENTRY.itemsize:
                    raise ImageError("it is missing")
                entry, payload = np.frombuffer(value, ENTRY, 1)[0], value[ENTRY.itemsize :]
                # Compare the length first: a damaged one could exceed the end of the file.
                if (
                    len(payload) != entry["size"]
                    or entry_checksum(entry, payload) != entry["checksum"]
                ):
                    raise ImageError("its checksum does not match")
                yield entry, payload, (int(entry["height"]), int(entry["width"]))
            except ImageError as error:
                raise self.damage([index], str(error)) from None

    def damaged_in_raw_block(self, transaction: lmdb.Transaction, block: int) -> Iterator[int]:
        """Yield the numbers of records in a raw block whose images do not match their checksums."""
        _, entries = self.index_record(transaction, block)
        images = self.raw_block(transaction, block)
        for record, entry, image in zip(self.block_range(block), entries, images, strict=True):
            if entry_checksum(entry, image.tobytes()) != entry["checksum"]:
                yield record

    def damage(self, records: Sequence[int], reason: str) -> DamageError:
        """Return the error for damaged records; `reason` says what is wrong with them."""
        return DamageError(self.path, records, reason, self.first)

    def close(self) -> None:
        """Release the file. The file is closed when all its readers have released it.

        The next read opens it again.
        """
        self._handle = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None, "_labels": None}

    def handle(self) -> Handle:
        """Return this process's handle of the file, and open the file first if it is not open.

        Raises UserError if the file has been replaced by another data set.
        """
        handle = self._handle
        if handle is None or handle.pid != os.getpid():
            handle = acquire(self.path)
            if read_meta(self.path, handle.environment) != self.meta:
                raise UserError(
                    f"{self.path} was replaced by another data set while it was in use; start again"
                )
            self._handle = handle
        return handle

    def _get(self, transaction: lmdb.Transaction, key: bytes, records: range) -> memoryview:
        """Return the value of a key as a view into the file, empty if the key is missing.

        A DamageError names `records`, the records that the value describes.
        """
        try:
            return memoryview(transaction.get(key, b""))
        except lmdb.Error as error:
            raise self.damage(records, str(error)) from None

    def gather(
        self, records: np.ndarray, out: np.ndarray, positions: np.ndarray | None = None
    ) -> None:
        """Copy raw images into `out`, an array [n, C, H, W] of the file's data type.

        Image i, of record `records[i]`, is copied to `out[positions[i]]` (default: `out[i]`).
        Raises DamageError if a block that holds one of these records is damaged.
        """
        blocks, rows = np.divmod(records, self.block)
        handle = self.handle()  # The reference keeps the file mapped until the copy is made.
        if (raw := handle.raw.get(self.resolution)) is None:
            raw = handle.raw.setdefault(
                self.resolution, RawBlocks(np.dtype((np.void, self.spec.nbytes)), self.blocks)
            )
        for block in np.unique(blocks[raw.addresses[blocks] < 0]).tolist():
            with handle.lock:
                raw.add(block, self._verified(handle, block))
        # Here each image of `out` is a single item of an array [n].
        raw.copy(blocks, rows, out.reshape(len(out), -1).view(raw.item)[:, 0], positions)

    def raw_image(self, record: int) -> np.ndarray:
        """Return a record's raw image, [H, W, C]. Raises DamageError if its block is damaged."""
        image = np.empty((1, *self.spec.shape), self.spec.depth)
        self.gather(np.array([record]), image)
        return image[0].transpose(1, 2, 0)

    def _verified(self, handle: Handle, block: int) -> np.ndarray:
        """Verify the checksum of a raw block, and return the block's bytes, uint8.

        Raises DamageError, which names the damaged records of the block.
        """
        pixels = self.raw_block(handle.transaction, block).reshape(-1).view(np.uint8)
        head, _ = self.index_record(handle.transaction, block)
        if zlib.crc32(pixels.data) != head["block_checksum"]:
            damaged = list(self.damaged_in_raw_block(handle.transaction, block))
            raise self.damage(damaged or self.block_range(block), "its checksum does not match")
        return pixels
