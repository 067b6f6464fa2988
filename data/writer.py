"""Write a packed data set: `LMDBWriter` builds the file beside its target and renames it when it is complete."""

import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import lmdb
import numpy as np

from data.environment import partial_path
from data.format import (
    COMPLETE_KEY,
    ENCODINGS,
    FORMAT,
    FORMAT_KEY,
    INDEX_HEAD,
    META_KEY,
    VERSION,
    Meta,
    block_length,
    content_hasher,
    index_key,
    make_entry,
    picture_key,
    pixels_key,
)
from data.pictures import encode
from data.statistics import PixelStatistics
from utils.errors import UserError

BATCH_PUTS = 1000  # records per transaction at most
BATCH_BYTES = 16 << 20
FIRST_MAP = 64 << 20  # bytes; doubled whenever it is full


class LMDBWriter:
    """Write pictures one after the other; `finish` makes the file appear under its name.

    Until then the file is called `.NAME.partial` and has no completion record. Leaving the `with` block without
    `finish` removes it; one left by a killed process is overwritten by the next run. Raises UserError if the target
    exists and `overwrite` is false, if another process is writing it, and if the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        classes: Sequence[str],  # names by label; empty: unlabelled
        channels: int,  # 1 or 3
        resolution: int,  # side of the square pictures in px; 0: sizes of their own
        encoding: str = "raw",
        resize_filter: str = "none",
        source: str = "",
        overwrite: bool = False,
        first_map: int = FIRST_MAP,  # bytes
    ) -> None:
        if encoding not in ENCODINGS or channels not in (1, 3) or (resolution == 0) != (encoding == "source"):
            raise ValueError(f"encoding {encoding!r}, channels {channels}, resolution {resolution} do not fit together")
        self.path = Path(path)
        self.classes, self.channels, self.resolution, self.encoding = list(classes), channels, resolution, encoding
        self._resize_filter, self._source = resize_filter, source
        self._block = block_length(channels, resolution, encoding)
        self._entries: list[np.ndarray] = []  # of the block being filled
        self._pixels: list[bytes] = []
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_bytes = 0
        self.count = 0  # pictures so far
        self.histogram = np.zeros(len(self.classes), np.int64)  # pictures so far by label
        self._statistics = PixelStatistics(channels)
        self._hash = content_hasher(self.classes, channels, encoding, resolution)
        self._new_folders = _make_folders(self.path, overwrite)
        self._partial = partial_path(self.path)
        self._lock: IO[bytes] | None = None
        self._environment: lmdb.Environment | None = None
        try:
            self._open(first_map)
        except BaseException:
            self.abort()
            raise

    def _open(self, first_map: int) -> None:
        try:
            lock = self._partial.open("ab")
        except OSError as error:
            raise UserError(f"{self._partial}: {error.strerror}; choose a folder that can be written") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(f"{self.path} is being written by another process: wait or choose another name") from None
        self._lock = lock
        os.truncate(self._partial, 0)  # what a killed run has left
        self._environment = lmdb.open(str(self._partial), subdir=False, lock=False, sync=False, map_size=first_map)
        self._batch.append((FORMAT_KEY, f"{FORMAT} {VERSION}".encode()))
        self._commit()

    def add(self, picture: np.ndarray, label: int = 0, payload: bytes | None = None) -> None:
        """Append a picture uint8 [H, W, C] with its label.

        `payload` is the encoded file to store; it is required for encoding "source", made here for "jpeg" and "png" if
        not given, and not allowed for "raw". Raises ValueError for a wrong shape, type or label.
        """
        self._check(picture, label, payload)
        if self.encoding == "raw":
            payload = np.ascontiguousarray(picture.transpose(2, 0, 1)).tobytes()
            self._pixels.append(payload)
        elif payload is None:
            payload = encode(picture, self.encoding)
        entry = make_entry(payload, label, picture.shape[0], picture.shape[1])
        if self.encoding != "raw":
            self._put(picture_key(self.count, self.resolution), entry.tobytes() + payload)
        self._entries.append(entry)
        self._hash.update(entry.tobytes())
        self._hash.update(payload)
        self.count += 1
        if self.classes:
            self.histogram[label] += 1
        self._statistics.add(picture)
        if len(self._entries) == self._block:
            self._flush_block()

    def _check(self, picture: np.ndarray, label: int, payload: bytes | None) -> None:
        side = self.resolution
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != self.channels:
            raise ValueError(f"picture {picture.dtype} {picture.shape}, expected uint8 [H, W, {self.channels}]")
        if side and picture.shape[:2] != (side, side):
            raise ValueError(f"picture of {picture.shape[1]}x{picture.shape[0]} px, expected {side}x{side}")
        if not 0 <= label < max(1, len(self.classes)):
            raise ValueError(f"label {label} is outside 0..{max(1, len(self.classes)) - 1}")
        if (payload is None) == (self.encoding == "source") or (payload is not None and self.encoding == "raw"):
            raise ValueError(f"encoding {self.encoding!r} and payload do not fit together")

    def _flush_block(self) -> None:
        """Put the block's pixels and its index."""
        if not self._entries:
            return
        block = (self.count - 1) // self._block
        entries, pixels = np.concatenate(self._entries), b"".join(self._pixels)
        if self.encoding == "raw":
            self._put(pixels_key(block, self.resolution), pixels)
        head = np.zeros(1, INDEX_HEAD)
        head["checksum"] = zlib.crc32(entries.tobytes())
        head["block_checksum"] = zlib.crc32(pixels) if pixels else 0
        self._put(index_key(block, self.resolution), head.tobytes() + entries.tobytes())
        self._entries, self._pixels = [], []

    def _put(self, key: bytes, value: bytes) -> None:
        self._batch.append((key, value))
        self._batch_bytes += len(value)
        if len(self._batch) >= BATCH_PUTS or self._batch_bytes >= BATCH_BYTES:
            self._commit()

    def _commit(self) -> None:
        """Write the batch in one transaction; a full map is doubled and the batch replayed."""
        environment = self._opened()
        while True:
            try:
                with environment.begin(write=True) as transaction:
                    for key, value in self._batch:
                        # Pictures have the last keys and come in order: appending keeps pages full. The rest is small.
                        transaction.put(key, value, append=key.startswith(b"pi"))
                break
            except lmdb.MapFullError:
                environment.set_mapsize(environment.info()["map_size"] * 2)
            except (lmdb.Error, OSError) as error:
                raise UserError(f"{self.path}: cannot write ({error}); free some space or change the disk") from None
        self._batch, self._batch_bytes = [], 0

    def finish(self) -> Meta:
        """Write metadata and completion record, sync, rename. Raises ValueError if no picture was added."""
        if not self.count:
            raise ValueError("no pictures were added")
        self._flush_block()
        meta = self._meta()
        record = meta.to_json()
        self._put(META_KEY, record)
        self._commit()
        complete = {"content_hash": meta.content_hash, "count": meta.count, "meta_checksum": zlib.crc32(record)}
        self._put(COMPLETE_KEY, json.dumps(complete, sort_keys=True).encode())
        self._commit()
        self._publish()
        return meta

    def _meta(self) -> Meta:
        mean, std = self._statistics.mean_and_std()
        return Meta(
            count=self.count,
            classes=self.classes,
            channels=self.channels,
            resolutions=[self.resolution],
            encoding=self.encoding,
            histogram=self.histogram.tolist(),
            mean=mean,
            std=std,
            resize_filter=self._resize_filter,
            source=self._source,
            content_hash=self._hash.hexdigest(),
            block=self._block,
        )

    def _publish(self) -> None:
        environment = self._opened()
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        environment.close()
        self._environment = None
        try:
            with self._partial.open("rb+") as file:
                if os.fstat(file.fileno()).st_size < needed:  # pages that were reserved but never written
                    file.truncate(needed)
                os.fsync(file.fileno())
            os.replace(self._partial, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; free some space or choose another folder") from None
        self._new_folders = []
        self._unlock()

    def _opened(self) -> lmdb.Environment:
        if self._environment is None:
            raise ValueError(f"{self.path}: the writer is closed")
        return self._environment

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def abort(self) -> None:
        """Remove what was written. Does nothing after `finish`."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None
        if self._lock is not None:  # the partial file is ours
            self._partial.unlink(missing_ok=True)
            self._unlock()
        for folder in self._new_folders:
            folder.rmdir()
        self._new_folders = []

    def __enter__(self) -> "LMDBWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def check_target(path: Path, overwrite: bool) -> None:
    """Raise UserError if `path` must not be written."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: DEST is one file, for example {path / 'data.lmdb'}")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: choose another name or add --overwrite")


def _make_folders(path: Path, overwrite: bool) -> list[Path]:
    """Make the folders above `path`; returns the new ones, innermost first."""
    check_target(path, overwrite)
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: {error.strerror}; choose a folder that can be written") from None
    return missing


def pack_arrays(
    path: str | Path,
    images: np.ndarray,  # uint8 [n, C, H, H]
    labels: Sequence[int] | np.ndarray | None = None,  # [n]
    classes: Sequence[str] = (),
    *,
    encoding: str = "raw",
    source: str = "arrays",
    overwrite: bool = False,
) -> Meta:
    """Pack pictures that are in memory. Raises UserError and ValueError as LMDBWriter does."""
    with LMDBWriter(
        path,
        classes=classes,
        channels=images.shape[1],
        resolution=images.shape[2],
        encoding=encoding,
        source=source,
        overwrite=overwrite,
    ) as writer:
        for index, image in enumerate(images):
            writer.add(image.transpose(1, 2, 0), 0 if labels is None else int(labels[index]))
        return writer.finish()
