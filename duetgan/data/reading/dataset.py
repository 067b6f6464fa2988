"""Read the images of packed files at one resolution, for training and evaluation."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from duetgan.data.images import centre_box
from duetgan.data.images.decode import Box, RandomCrop, Size, crop_into, decode_crop
from duetgan.data.lmdb.format import Meta
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import stored_image
from duetgan.data.reading.sampler import SampleKeys
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import numpy_generator

# fields of Meta in which the files of a data set must agree
COMMON = ("classes", "sets", "channels", "pixel_format", "resolutions", "size", "encoding")
CHUNKS = 4  # chunks of a batch per thread, so that no thread waits long for the last one


class Dataset(AbstractContextManager["Dataset"]):
    """Images and labels by index, from one packed file or from several concatenated files.

    All images are read at one size, that of `spec`. If this size is stored, the images are not
    changed. Otherwise, images of the next larger resolution, or of individual sizes, are
    centre-cropped and scaled. If there is a `crop`, and `read` gets keys, a random part of every
    image is scaled instead of the centre.

    Raw images of a stored resolution are copied at memory speed in the calling thread. All other
    images are decoded by `workers` threads (0: in the calling thread); the result does not depend
    on their number. A Dataset may be pickled and used after a fork. Each process opens the files
    itself.

    Raises UserError for files that do not belong together, or whose images are smaller than the
    resolution.
    """

    # Synthetic images of the training set, only in a MixedDataset (data/reading/mixture.py).
    synthetic: Any = None

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],  # packed files; other forms: data.opening
        *,
        name: str = "",  # name of the images in messages; by default the path
        # px, or WIDTHxHEIGHT such as 96x64; None: the largest that is stored
        resolution: int | str | None = None,
        crop: RandomCrop | None = None,
        workers: int = 0,  # decoding threads
    ) -> None:
        paths = [path] if isinstance(path, (str, Path)) else path
        self.path = name or " + ".join(map(str, paths))
        self.shards = [LMDBReader(file) for file in paths]
        self.meta = combined_meta(self.shards)
        size = None if resolution is None else ImageSpec.of(1, resolution).size
        if size is not None and not crop:  # A random crop is taken from the largest resolution.
            for shard in self.shards:
                shard.resolution = min(
                    (side for side in self.meta.resolutions if self.meta.spec.at(side).holds(size)),
                    default=shard.resolution,
                )
        self.spec = self.shards[0].spec
        if resolution is not None:
            self.spec = ImageSpec.of(self.meta.channels, resolution, self.spec.pixel_format)
        stored = self.meta.spec
        if size is not None and not crop and stored.side and not stored.holds(size):
            raise UserError(
                f"{self.path}: its images have {stored}, less than the {self.spec} asked for;"
                " choose a lower data.resolution or pack again with a larger --size"
            )
        self.crop = crop
        self.workers = workers
        # True if batches are copied as they are stored, without decoding or scaling
        self.gathers = (
            self.meta.encoding == "raw"
            and crop is None
            and all(shard.spec == self.spec for shard in self.shards)
        )
        self._ends = np.cumsum(list(map(len, self.shards)))
        for shard, end in zip(self.shards, self._ends.tolist(), strict=True):
            shard.first = end - len(shard)
        self._labels: np.ndarray | None = None
        self._new_labels: np.ndarray | None = None  # of each label in the files, after `relabel`
        # process id, number of threads, pool
        self._threads: tuple[int, int, ThreadPoolExecutor] | None = None

    def __len__(self) -> int:
        return self.meta.count

    @property
    def classes(self) -> list[str]:
        """Class names by label; empty if the data set is unlabelled."""
        return self.meta.classes

    @property
    def resolution(self) -> int | str:
        """Size of the images, in the form of the key `data.resolution`; 0 for individual sizes."""
        return self.spec.resolution

    def labels(self) -> np.ndarray:
        """Return the class index of every image: int64 [count], read-only.

        Raises UserError if images may have several classes, and DamageError.
        """
        if self.meta.sets is not None:
            raise UserError(
                f"{self.path}: its images have several labels each; this needs one label an image"
            )
        return self.label_numbers()

    def label_numbers(self) -> np.ndarray:
        """Return all labels, int64 [count], read-only.

        A label is an index into `meta.sets`, or into `classes` if there are no label sets. Raises
        DamageError.
        """
        if self._labels is None:
            labels = np.concatenate([shard.labels() for shard in self.shards])
            if self._new_labels is not None:
                labels = self._new_labels[labels]
            labels.setflags(write=False)
            self._labels = labels
        return self._labels

    def relabel(self, classes: Sequence[str]) -> None:
        """Change the labels to indices into `classes`, which must include all classes of the files.

        Raises UserError if images may have several classes, and DamageError.
        """
        self._new_labels = np.array([classes.index(name) for name in self.shards[0].classes])
        self._labels = None
        histogram = np.bincount(self.labels(), minlength=len(classes)).tolist()
        self.meta = self.meta.model_copy(update={"classes": list(classes), "histogram": histogram})

    def signatures(self) -> np.ndarray:
        """Return the signatures of all images, SIGNATURE [count], by which duplicates are found.

        data/lmdb/format.py describes the type SIGNATURE. Raises DamageError.
        """
        return np.concatenate([shard.signatures() for shard in self.shards])

    def image(self, index: int) -> tuple[np.ndarray, int]:
        """Return an image [H, W, C], decoded but not scaled, and its label.

        Raises IndexError for a number without a record, and DamageError for a damaged record.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = self._shard(index)
        pixels, label = stored_image(shard, index - shard.first)
        if self._new_labels is not None:
            label = int(self._new_labels[label])
        return pixels, label

    def read(
        self,
        indices: Sequence[int] | np.ndarray,
        keys: SampleKeys | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read records, in the order of `indices`.

        Args:
            indices: int64 [n].
            keys: keys of random crops. A crop depends only on its sample's key and on `self.crop`.

        Returns:
            Images [n, C, H, W] of type `spec.depth`, and labels int64 [n] (see `label_numbers`).
            Decoded images are channels last in memory. Unlabelled images have label 0.

        Raises:
            IndexError: for an index outside 0..len-1.
            DamageError: for a damaged record.
            UserError: if images have individual sizes and no resolution is set.
        """
        requested = np.asarray(indices, dtype=np.int64)
        if len(requested) and (requested.min() < 0 or requested.max() >= len(self)):
            raise IndexError(f"record {requested.min()}..{requested.max()} of {len(self)}")
        if not self.resolution:
            raise UserError(
                f"{self.path}: its images have sizes of their own; set data.resolution to read them"
                " at one size, or pack with --size N"
            )
        channels, height, width = self.spec.shape
        if self.gathers:
            images = np.empty((len(requested), channels, height, width), self.spec.depth)
        else:
            images = np.empty((len(requested), height, width, channels), self.spec.depth)
            images = images.transpose(0, 3, 1, 2)
        labels = self.label_numbers()[requested]
        if len(requested):
            self._fill(requested, images, keys)
        return images, labels

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Return an image [C, H, W] and its label, for torch.utils.data."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        images, labels = self.read(indices)
        return list(zip(images, labels.tolist(), strict=True))

    def _shard(self, index: int) -> LMDBReader:
        return self.shards[int(np.searchsorted(self._ends, index, side="right"))]

    def _fill(self, chosen: np.ndarray, images: np.ndarray, keys: SampleKeys | None) -> None:
        if not self.gathers:
            self._decode(chosen, images, keys)
        elif len(self.shards) == 1:
            self.shards[0].gather(chosen, images)
        else:
            numbers = np.searchsorted(self._ends, chosen, side="right")
            for number in np.unique(numbers).tolist():
                rows = np.flatnonzero(numbers == number)
                shard = self.shards[number]
                shard.gather(chosen[rows] - shard.first, images, rows)

    # --- images that must be decoded or scaled

    def _decode(self, chosen: np.ndarray, images: np.ndarray, keys: SampleKeys | None) -> None:
        """Decode records into `images`: in this thread, or in chunks in the thread pool."""
        if self.workers == 0 or len(chosen) == 1:
            self._decode_rows(chosen, images, keys, range(len(chosen)))
            return
        if self._threads is None or self._threads[:2] != (os.getpid(), self.workers):
            self._threads = (os.getpid(), self.workers, ThreadPoolExecutor(self.workers, "decode"))
        pool = self._threads[2]
        size = -(-len(chosen) // (self.workers * CHUNKS))
        jobs = []
        for start in range(0, len(chosen), size):
            rows = range(start, min(start + size, len(chosen)))
            jobs.append(pool.submit(self._decode_rows, chosen, images, keys, rows))
        wait(jobs)  # No thread may still write to `images` when an error is raised.
        for job in jobs:
            job.result()

    def _decode_rows(
        self, chosen: np.ndarray, images: np.ndarray, keys: SampleKeys | None, rows: range
    ) -> None:
        for row in rows:
            index = int(chosen[row])
            key = () if keys is None else keys.of(row, index)
            shard = self._shard(index)
            record = index - shard.first
            if shard.meta.encoding == "raw":
                pixels = shard.raw_image(record)
                height, width, _ = pixels.shape
                crop_into(pixels, self._box((height, width), key), images[row], self.spec.alpha)
                continue
            with shard.encoded(record) as (entry, payload, size):
                box = self._box(size, key)
                decode_crop(payload, entry["codec"], box, size, images[row], self.spec)

    def _box(self, size: Size, key: tuple[int | str, ...]) -> Box:
        """Return the part of an image of height and width `size` that is read and scaled.

        If there are a crop and a random key, the part is random. Otherwise it is the largest centre
        crop with the aspect ratio of the result.
        """
        if self.crop is None or not key:
            return centre_box(*size, self.spec.size)
        return self.crop.box(*size, numpy_generator(*key), self.spec.size)

    # --- closing and pickling

    def close(self) -> None:
        """Close the files and end the threads. The next read opens the files again."""
        if self._threads is not None and self._threads[0] == os.getpid():
            self._threads[2].shutdown()
        self._threads = None
        for shard in self.shards:
            shard.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_labels": None, "_threads": None}


def combined_meta(shards: Sequence[LMDBReader]) -> Meta:
    """Combine the metadata of shards into that of one data set.

    `mean` and `std` are averages, weighted by the number of images of each file. They are exact if
    all images have one size. `passport` is that of the first file with generated images.

    Raises UserError if the shards do not belong together.
    """
    metas = [shard.meta for shard in shards]
    first = metas[0]
    if len(metas) == 1:
        return first
    for shard in shards[1:]:
        for name in COMMON:
            value, expected = getattr(shard.meta, name), getattr(first, name)
            if value != expected:
                raise UserError(
                    f"{shard.path} does not belong to {shards[0].path}: {name}"
                    f" {shorten(str(value), 80)} and {shorten(str(expected), 80)}; pack them alike"
                )
    parts = {meta.split.part for meta in metas if meta.split}
    if len(parts) > 1:
        paths = " + ".join(str(shard.path) for shard in shards)
        raise UserError(
            f"{paths} hold training images and images held out from training: give a pattern that"
            " leaves one kind out"
        )
    counts = np.array([meta.count for meta in metas])
    means = np.array([meta.mean for meta in metas])
    deviations = np.array([meta.std for meta in metas])
    weights = counts / counts.sum()
    mean = weights @ means
    square = weights @ (deviations**2 + means**2)

    def joined(name: str) -> str:
        return hashlib.sha256("".join(getattr(meta, name) for meta in metas).encode()).hexdigest()

    combined = {
        "count": int(counts.sum()),
        "histogram": np.sum([meta.histogram for meta in metas], axis=0).astype(int).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(np.maximum(square - mean**2, 0)).tolist(),
        "source": " + ".join(meta.source for meta in metas),
        "fingerprint": joined("fingerprint") if all(meta.fingerprint for meta in metas) else "",
        "content_hash": joined("content_hash"),
        "split": None,
        "passport": next((meta.passport for meta in metas if meta.passport), None),
    }
    return first.model_copy(update=combined)
