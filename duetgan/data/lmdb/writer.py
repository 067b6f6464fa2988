"""Write a packed data set.

`LMDBWriter` writes a hidden file next to its target, and renames it when it is complete.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import lmdb
import numpy as np

from duetgan.data.lmdb.environment import partial_path, used_bytes
from duetgan.data.lmdb.format import (
    BLOCK_BYTES,
    BLOCK_IMAGES,
    COMPLETE_KEY,
    FORMAT,
    FORMAT_KEY,
    IMAGE_KEY,
    INDEX_HEAD,
    INDEX_KEY,
    META_KEY,
    NAME_KEY,
    PIXELS_KEY,
    SIGNATURE_KEY,
    SIGNATURES,
    VERSION,
    Meta,
    Split,
)
from duetgan.data.lmdb.record import Layout, Record, mean_and_std, value_range
from duetgan.utils import files
from duetgan.utils.checkpoint.provenance import Generated, Provenance
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import hold, replaceable, sync_folder, writing

BATCH_PUTS = 1000  # records per transaction at most
BATCH_BYTES = 16 << 20
LAST_KEYS = b"picture/"  # these keys sort after all others
FIRST_MAP = 64 << 20  # bytes; doubled when it is full


class _Level:
    """The images of one resolution that are collected until their block is complete."""

    def __init__(self, side: int, layout: Layout) -> None:
        self.side = side
        self.block = BLOCK_IMAGES
        if layout.encoding == "raw":
            self.block = max(1, min(BLOCK_IMAGES, BLOCK_BYTES // layout.spec.at(side).nbytes))
        self.digests: list[bytes] = []  # of the complete blocks
        self.start()

    def start(self) -> None:
        self.entries: list[bytes] = []
        self.pixels: list[bytes] = []
        self.payloads = hashlib.sha256()


class LMDBWriter(contextlib.AbstractContextManager["LMDBWriter"]):
    """A writer of a packed file, image by image. `finish` completes the file and gives it its name.

    Until then the file is called `.NAME.partial` and has no completion record. Leaving the `with`
    block without `finish` removes the file. If the process is killed, the file remains, and the
    next writer of NAME overwrites it.

    Raises:
        UserError: if the target exists and `overwrite` is false, if another process is writing it,
            or if the disk is full.
        ValueError: for a passport (the origin of generated images) that could not be read back.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout,
        *,
        classes: Sequence[str],  # names by label; empty: unlabelled
        # class indices of each label; None: a label is a class
        label_sets: Sequence[Sequence[int]] | None = None,
        resize_filter: str = "none",
        source: str = "",
        passport: Provenance | None = None,  # origin of generated images
        split: Split | None = None,
        overwrite: bool = False,
    ) -> None:
        check_target(Path(path), overwrite)
        if passport is not None:
            Generated.read(passport, "passport")
        self.path = replaceable(Path(path))  # the target of a link: the link remains
        self.split = split
        self.layout = layout
        self.classes = list(classes)
        self.label_sets = None if label_sets is None else list(map(list, label_sets))
        self.labels = len(self.classes if self.label_sets is None else self.label_sets)
        self._resize_filter = resize_filter
        self._source = source
        self._passport = passport
        self._levels = [_Level(side, layout) for side in layout.resolutions]
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_bytes = 0
        self.count = 0  # images added
        self.histogram = np.zeros(self.labels, np.int64)  # images added, by label
        # None: a record has no digest
        self._fingerprint: hashlib._Hash | None = hashlib.sha256()
        # int64 is exact for up to 10**14 pixels of 8 bits
        dtype = np.float64 if layout.spec.deep else np.int64
        self._sums = np.zeros((2, layout.spec.channels), dtype)
        self._pixels = 0  # in `_sums`
        self._ends = (math.inf, -math.inf)  # smallest and largest value added
        self._signatures: list[np.ndarray] = []  # not written yet
        self._names: list[str] = []  # not written yet
        self._partial = partial_path(self.path)
        self._undo = contextlib.ExitStack()  # removes an incomplete file
        try:
            self._open()
        except BaseException:
            self._undo.close()
            raise

    def _open(self) -> None:
        with writing(self._partial):
            replaceable(self._partial)  # Opening a named pipe would block.
            self._lock = self._undo.enter_context(self._partial.open("ab"))
        if not hold(self._lock):
            raise UserError(
                f"{self.path} is being written by another process: wait or choose another name"
            )
        self._undo.callback(self._partial.unlink, missing_ok=True)
        os.truncate(self._partial, 0)  # A killed run may have left records.
        with writing(self.path, lmdb.Error):
            self._environment = lmdb.open(
                str(self._partial), subdir=False, lock=False, sync=False, map_size=FIRST_MAP
            )
        self._undo.callback(self._environment.close)
        self._batch.append((FORMAT_KEY, f"{FORMAT} {VERSION}".encode()))
        self._commit()

    def add_record(self, record: Record, name: str = "") -> None:
        """Append an image; `name` is its name in the source.

        Raises ValueError for an unknown label.
        """
        if not 0 <= record.label < max(1, self.labels):
            raise ValueError(f"label {record.label} is outside 0..{max(1, self.labels) - 1}")
        for level, entry, payload in zip(
            self._levels, record.entries, record.payloads, strict=True
        ):
            level.entries.append(entry.tobytes())
            level.payloads.update(payload)
            if self.layout.encoding == "raw":
                level.pixels.append(payload)
            else:
                self._put(IMAGE_KEY % (self.count, level.side), level.entries[-1] + payload)
        if not record.digest:
            self._fingerprint = None
        elif self._fingerprint is not None:
            self._fingerprint.update(record.label.to_bytes(8, "little") + record.digest)
        self._signatures.append(record.signature)
        self._names.append(name)
        self._sums += record.sums
        self._pixels += record.pixels
        self._ends = min(self._ends[0], record.ends[0]), max(self._ends[1], record.ends[1])
        self.count += 1
        if self.classes:
            self.histogram[record.label] += 1
        for level in self._levels:
            if len(level.entries) == level.block:
                self._flush_block(level)
        if len(self._signatures) == SIGNATURES:
            self._flush_signatures()

    def _flush_block(self, level: _Level) -> None:
        if not level.entries:
            return
        block = (self.count - 1) // level.block
        entries, pixels = b"".join(level.entries), b"".join(level.pixels)
        if pixels:
            self._put(PIXELS_KEY % (block, level.side), pixels)
        head = np.array([(zlib.crc32(entries), zlib.crc32(pixels))], INDEX_HEAD)
        self._put(INDEX_KEY % (block, level.side), head.tobytes() + entries)
        level.payloads.update(entries)
        level.digests.append(level.payloads.digest())
        level.start()

    def _flush_signatures(self) -> None:
        if self._signatures:
            values = {SIGNATURE_KEY: np.concatenate(self._signatures).tobytes()}
            if any(self._names):
                values[NAME_KEY] = json.dumps(self._names).encode()
            for key, value in values.items():
                self._put(
                    key % ((self.count - 1) // SIGNATURES),
                    zlib.crc32(value).to_bytes(4, "little") + value,
                )
            self._signatures, self._names = [], []

    def _put(self, key: bytes, value: bytes) -> None:
        self._batch.append((key, value))
        self._batch_bytes += len(value)
        if len(self._batch) >= BATCH_PUTS or self._batch_bytes >= BATCH_BYTES:
            self._commit()

    def _commit(self) -> None:
        """Write the batch in one transaction.

        If the LMDB map is full, double it and try again.
        """
        with writing(self.path, lmdb.Error):
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, value in self._batch:
                        # Images have the last keys, in ascending order. Appending them keeps pages
                        # full; other records are few.
                        if not transaction.put(key, value, append=key.startswith(LAST_KEYS)):
                            raise RuntimeError(f"{key!r} is not the last key")
            except lmdb.MapFullError:
                self._environment.set_mapsize(self._environment.info()["map_size"] * 2)
                self._commit()
        self._batch, self._batch_bytes = [], 0

    def finish(self) -> Meta:
        """Complete the file, rename it to its target, and return its metadata.

        Raises ValueError if no image was added.
        """
        meta = self.complete()
        self.publish()
        return meta

    def complete(self, split: Split | None = None) -> Meta:
        """Write the metadata and the completion record, and sync the file to the disk.

        The file keeps its hidden name until `publish`, so that several complete files can be
        renamed together. `split`, if given, replaces the split of the constructor. Returns the
        metadata. Raises ValueError if no image was added.
        """
        if not self.count:
            raise ValueError("no images were added")
        for level in self._levels:
            self._flush_block(level)
        self._flush_signatures()
        digests = {level.side: level.digests for level in self._levels}
        layout, spec = self.layout, self.layout.spec
        if not layout.ranged:
            low, high = value_range(spec.depth, *self._ends)
            spec = dataclasses.replace(spec, low=low, high=high)
            layout = dataclasses.replace(layout, spec=spec)
        mean, std = mean_and_std(self._sums, self._pixels, spec.low, spec.high)
        meta = Meta(
            count=self.count,
            classes=self.classes,
            sets=self.label_sets,
            **layout.document,
            histogram=self.histogram.tolist(),
            mean=mean,
            std=std,
            fingerprint="" if self._fingerprint is None else self._fingerprint.hexdigest(),
            content_hash="",
            blocks=[level.block for level in self._levels],
            split=split or self.split,
            resize_filter=self._resize_filter,
            source=self._source,
            passport=self._passport,
        )
        meta = meta.model_copy(update={"content_hash": meta.hash_of(digests)})
        record = meta.to_json()
        self._put(META_KEY, record)
        self._commit()
        complete = {
            "content_hash": meta.content_hash,
            "count": meta.count,
            "meta_checksum": zlib.crc32(record),
        }
        self._put(COMPLETE_KEY, json.dumps(complete, sort_keys=True).encode())
        self._commit()
        needed = used_bytes(self._environment)
        self._environment.close()
        with writing(self.path, lmdb.Error), self._partial.open("rb+") as file:
            # The last pages may be allocated but not written.
            if os.fstat(file.fileno()).st_size < needed:
                file.truncate(needed)
            os.fsync(file.fileno())
        return meta

    def publish(self) -> None:
        """Rename the complete file to its target."""
        with writing(self.path, lmdb.Error):
            os.replace(self._partial, self.path)
            sync_folder(self.path.parent)
        self._undo.pop_all()
        self._lock.close()

    def __exit__(self, *error: object) -> None:
        self._undo.close()


def check_target(path: Path, overwrite: bool) -> None:
    """Raise UserError if a packed file must not be written at `path`.

    A folder or a special file is never overwritten, and a file only if `overwrite` is true. For a
    link, its target is checked.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: DEST is one file, for example {path / 'data.lmdb'}")
    with explained(files.Refused, lambda error: f"{path} {error}: choose another name"):
        replaceable(path)
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: choose another name or add --overwrite")
