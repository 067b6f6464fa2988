"""What training and evaluation read from: packed files or tar files, at one resolution, decoded by
threads.
"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from duetgan.data.decode import RandomCrop, crop_into, decode_crop, stored_image
from duetgan.data.errors import DamageError
from duetgan.data.images import centre_box
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.reading.sampler import SampleKeys
from duetgan.data.reading.several_files import combined_meta, open_files
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.memory import cores
from duetgan.utils.runlog.run_log import say
from duetgan.utils.seeding import numpy_generator

# of the records, replaced at most before reading stops; ten are always allowed
DAMAGED_SHARE = 0.01
CHUNKS = 4  # pieces of a batch per thread, so that no thread waits long for the last one


class Dataset(AbstractContextManager["Dataset"]):
    """Images and labels by index, from one packed file or several shards one after the other, or
    from tar files.

    Images of one size, `spec`: one that is stored is read as it is, otherwise the next larger one
    (or the images of sizes of their own) is cropped in the middle and scaled. `crop` takes a random
    part of every image where `read` is given keys. Raw images of a stored resolution are gathered
    at memory speed in the calling thread; everything else is decoded by `workers` threads (0: the
    calling thread). The images do not depend on `workers`. May be pickled and used after a fork;
    each process opens the files itself.

    `on_damage` "skip" replaces a damaged record by the next whole one of its file, says so once and
    counts it in `damaged`; it stops at DAMAGED_SHARE. Raises UserError for files that do not fit
    together or lack the resolution.
    """

    synthetic: Any = None  # images that stand beside these in training, see data/reading/mixture.py

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],  # see data.reading.several_files.shard_paths
        *,
        # px, or width x height: 96x64; None: the largest that is stored
        resolution: int | str | None = None,
        crop: RandomCrop | None = None,
        workers: int = 0,  # decoding threads
        on_damage: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.path = " + ".join(map(str, path)) if isinstance(path, (list, tuple)) else str(path)
        tolerant = on_damage == "skip"
        wanted = None if resolution is None else ImageSpec.of(1, resolution).size
        # a random crop is of the largest
        self.shards = open_files(path, None if crop else wanted, tolerant=tolerant)
        self.meta = combined_meta(self.shards)
        stored = self.shards[0].spec
        self.spec = (
            stored
            if resolution is None
            else ImageSpec.of(self.meta.channels, resolution, stored.pixel_format)
        )
        if (
            wanted is not None
            and not crop
            and self.meta.spec.side
            and not self.meta.spec.holds(wanted)
        ):
            raise UserError(
                f"{self.path}: its images have {self.meta.spec}, less than the {self.spec} asked for;"
                " choose a lower data.resolution or pack again with a larger --size"
            )
        self.crop, self.workers, self.on_damage = crop, workers, on_damage
        # whether batches are copied as they are stored, without decoding or scaling
        self.gathers = (
            self.meta.encoding == "raw"
            and crop is None
            and {shard.spec for shard in self.shards} == {self.spec}
        )
        self.damaged: dict[int, str] = {}  # records that were replaced, and why
        self._ends = np.cumsum([len(shard) for shard in self.shards])
        for shard, end in zip(self.shards, self._ends.tolist(), strict=True):
            shard.first = end - len(shard)
        self._labels: np.ndarray | None = None
        self._places: np.ndarray | None = None  # of the files' labels among other classes
        self._threads: tuple[int, int, ThreadPoolExecutor] | None = None  # process, size, pool

    def __len__(self) -> int:
        return self.meta.count

    @property
    def classes(self) -> list[str]:
        """Class names by label; empty if the set is unlabelled."""
        return self.meta.classes

    @property
    def resolution(self) -> int | str:
        """The images' size as configurations hold it; 0 where they have sizes of their own."""
        return self.spec.resolution

    @property
    def replaced(self) -> set[int]:
        """Records in whose place another was read because they are damaged (`on_damage` "skip")."""
        return set(self.damaged)

    def labels(self) -> np.ndarray:
        """The class of every image, as `label_numbers`; UserError where an image may have several."""
        if self.meta.sets is not None:
            raise UserError(
                f"{self.path}: its images have several labels each; this needs one label an image"
            )
        return self.label_numbers()

    def label_numbers(self) -> np.ndarray:
        """All labels, places in `classes` or of `meta.sets`: int64 [count], read-only. Raises
        DamageError.
        """
        if self._labels is None:
            labels = np.concatenate([shard.labels() for shard in self.shards])
            self._labels = labels if self._places is None else self._places[labels]
            self._labels.setflags(write=False)
        return self._labels

    def relabel(self, classes: Sequence[str]) -> None:
        """Labels become those of their names among `classes`, which hold all of the files'. Raises
        DamageError.
        """
        self._places = np.array([classes.index(name) for name in self.classes])
        self._labels = None
        histogram = np.bincount(self.labels(), minlength=len(classes)).tolist()
        self.meta = self.meta.model_copy(update={"classes": list(classes), "histogram": histogram})

    def signatures(self) -> np.ndarray:
        """What duplicates are found by: SIGNATURE [count], see data/lmdb/format.py. Raises
        DamageError.
        """
        return np.concatenate([shard.signatures() for shard in self.shards])

    def image(self, index: int) -> tuple[np.ndarray, int]:
        """One image as it is stored, [H, W, C], and its label. Raises IndexError, DamageError."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = self._shard(index)
        return stored_image(shard, index - shard.first)

    def read(
        self,
        indices: Sequence[int] | np.ndarray,
        out: np.ndarray | None = None,
        keys: SampleKeys | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Images [n, C, H, W] and label numbers int64 [n] of the given records, in the given order.

        The images' type is `spec.depth`. `out`, if given, is filled and returned: [n, C, H, W],
        C-contiguous or, where images are decoded, in memory as [n, H, W, C]. With `keys` the crop
        is random: it depends on the sample's key alone. Unlabelled images have label 0. Raises
        IndexError outside 0..len-1, DamageError for a damaged record, UserError without a
        resolution, ValueError for an `out` that does not fit.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"record {wanted.min()}..{wanted.max()} of {len(self)}")
        if not self.resolution:
            raise UserError(
                f"{self.path}: its images have sizes of their own; set data.resolution to read them at one size, or"
                " pack with --size N"
            )
        shape = (len(wanted), *self.spec.shape)
        images = np.empty(shape, self.spec.depth) if out is None else out
        fits = images.shape == shape and images.dtype == self.spec.depth
        if not fits or not (
            images.flags.c_contiguous
            or (not self.gathers and images.transpose(0, 2, 3, 1).flags.c_contiguous)
        ):
            raise ValueError(
                f"out is {images.dtype} {images.shape}, expected contiguous {self.spec.depth} {shape}"
            )
        # a damaged index has no labels to go on with: it always stops reading
        labels = self.label_numbers()
        while len(wanted):
            chosen = self._without_damage(wanted)
            try:
                self._fill(chosen, images, keys)
                return images, labels[chosen]
            except DamageError as error:
                self._note_damage(error)
        return images, np.empty(0, np.int64)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Image uint8 [C, H, W] and label: with `__getitems__` what torch.utils.data asks of a data
        set.
        """
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
                places = np.flatnonzero(numbers == number)
                shard = self.shards[number]
                shard.gather(chosen[places] - shard.first, images, places)

    # --- images that must be decoded or scaled

    def _decode(self, chosen: np.ndarray, images: np.ndarray, keys: SampleKeys | None) -> None:
        """Fill `images` in this thread or, in pieces, in the pool's."""
        if self.workers == 0 or len(chosen) == 1:
            self._decode_piece(chosen, images, keys, range(len(chosen)))
            return
        size = -(-len(chosen) // (self.workers * CHUNKS))
        pieces = [
            range(start, min(start + size, len(chosen))) for start in range(0, len(chosen), size)
        ]
        if self._threads is None or self._threads[:2] != (os.getpid(), self.workers):
            self._threads = (os.getpid(), self.workers, ThreadPoolExecutor(self.workers, "decode"))
        jobs = [
            self._threads[2].submit(self._decode_piece, chosen, images, keys, piece)
            for piece in pieces
        ]
        wait(jobs)  # for all of them, before an error is raised
        for job in jobs:
            job.result()

    def _decode_piece(
        self, chosen: np.ndarray, images: np.ndarray, keys: SampleKeys | None, piece: range
    ) -> None:
        for place in piece:
            index = int(chosen[place])
            shard, out = self._shard(index), images[place]
            record = index - shard.first
            box: Any = centre_box  # of height and width, and those wanted: the part of the image
            if self.crop is not None and keys is not None:
                box = partial(self.crop.box, draws=numpy_generator(*keys.of(place, index)))
            if shard.meta.encoding == "raw":
                pixels = shard.raw_image(record)
                crop_into(
                    pixels, box(*pixels.shape[:2], wanted=self.spec.size), out, self.spec.alpha
                )
                continue
            with shard.encoded(record) as (entry, payload, size):
                decode_crop(
                    payload, entry["codec"], box(*size, wanted=self.spec.size), size, out, self.spec
                )

    # --- damaged records

    def _without_damage(self, wanted: np.ndarray) -> np.ndarray:
        """The records to read: the next whole one of the same file in place of each damaged one."""
        if not self.damaged:
            return wanted
        chosen = wanted.copy()
        for place in np.flatnonzero(np.isin(wanted, list(self.damaged))).tolist():
            record = int(wanted[place])
            shard = self._shard(record)
            others = itertools.chain(
                range(record, shard.first + len(shard)), range(shard.first, record)
            )
            whole = next((record for record in others if record not in self.damaged), None)
            if whole is None:
                raise shard.damage(range(len(shard)), "no record of this file is whole")
            chosen[place] = whole
        return chosen

    def _note_damage(self, error: DamageError) -> None:
        """Count damaged records that are to be skipped; raise `error` if damage stops reading or is
        too much.
        """
        new = [record for record in error.records if record not in self.damaged]
        allowed = max(10, int(DAMAGED_SHARE * len(self)))
        if self.on_damage == "stop" or not new or len(self.damaged) + len(new) > allowed:
            raise error
        self.damaged |= dict.fromkeys(new, error.reason)
        say(
            f"warning: {error}; skipped, the next intact record replaces it ({len(self.damaged)} so far)"
        )

    # --- life

    def close(self) -> None:
        """Let the files go and end the threads. The next read opens the files again."""
        if self._threads is not None and self._threads[0] == os.getpid():
            self._threads[2].shutdown()
        self._threads = None
        for shard in self.shards:
            shard.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_labels": None, "_threads": None}


def dataset_for_model(path: str | Path, checkpoint: Mapping[str, Any]) -> Dataset:
    """Images as a checkpoint's model saw them: at its config's `data.resolution` where it set one,
    else as they are stored. Only images with sizes of their own, and a pyramid that has it, are
    brought to the model's resolution unasked; others are to be refused where they do not fit.
    Classes in another order, and a classifier's where some have no images, are put into the model's
    order. Raises UserError for values of another kind or range.
    """
    trained, resolution = (
        (checkpoint["config"].get("data") or {}).get("resolution"),
        checkpoint["shape"]["resolution"],
    )
    dataset = Dataset(path)
    wanted, found = ImageSpec.read(checkpoint["shape"]), dataset.meta.spec
    if wanted.pixel_format != found.pixel_format:
        raise UserError(
            f"{path}: its images are {found.words}, those of the model's training {wanted.words}; pack them alike, "
            "with --range where that differs"
        )
    stored = [found.at(side).resolution for side in dataset.meta.resolutions]
    if trained is None and (stored == [0] or resolution in stored):
        trained = resolution
    if trained is not None:
        dataset = Dataset(path, resolution=trained, workers=cores())
    classes, given = checkpoint.get("classes", []), set(dataset.classes)
    fits = given == set(classes) or (
        checkpoint.get("task") == "classifier" and given < set(classes)
    )
    if given and fits and dataset.classes != classes and dataset.meta.sets is None:
        dataset.relabel(classes)
    return dataset


# --- progressive growing


class Stage(NamedTuple):
    """From a step on, up to the next stage's: images of one resolution in batches of one size."""

    first_step: int
    resolution: int  # px of the shorter side
    batch_size: int  # global


def checked_stages(stages: Sequence[tuple[int, int, int]], world_size: int) -> list[Stage]:
    """Raises UserError for a batch size that the ranks cannot share, ValueError for steps that do
    not rise from 0.
    """
    checked = [Stage(*stage) for stage in stages]
    firsts = [stage.first_step for stage in checked]
    if firsts and (firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts))):
        raise ValueError(f"stages that begin at steps {firsts}")
    for stage in checked:
        if stage.batch_size < 1 or stage.batch_size % world_size:
            raise UserError(
                f"the batches of {stage.batch_size} images of {stage.resolution} px are not divisible by "
                f"{world_size} processes; make progressive.batch_sizes and batch_size multiples of {world_size}"
            )
    return checked


def at_resolution(reader: Dataset, side: int) -> Dataset:
    """The images of `reader` scaled to another shorter side, read in the same manner; itself at its
    own.

    Raises UserError if the files have changed since `reader` was opened.
    """
    if side == reader.spec.side:
        return reader
    other = Dataset(
        [shard.path for shard in reader.shards],
        resolution=reader.spec.at(side).resolution,
        crop=reader.crop,
        workers=reader.workers,
        on_damage=reader.on_damage,
    )
    if other.meta.content_hash != reader.meta.content_hash:
        raise UserError(
            f"{reader.path}: was changed during the training; put it back, or use a new run folder"
        )
    return other


def stages_text(reader: Dataset, resolutions: Sequence[int]) -> str:
    """What the plan says of the resolutions that are read: stored ones, and those that are scaled
    while training.
    """
    stored = reader.meta.resolutions
    if reader.crop is not None or stored == [0]:
        what = "random crops" if reader.crop is not None else "images of sizes of their own"
        return f"{_sides(resolutions)} scaled from {what}"
    found = [side for side in resolutions if side in stored]
    texts = [f"{_sides(found)} as stored"] if found else []
    missing = [side for side in resolutions if side not in stored]
    for source, sides in itertools.groupby(
        missing, lambda side: min(other for other in stored if other > side)
    ):
        texts.append(f"{_sides(list(sides))} scaled from {source} px while reading")
    hint = f" (duet pack --pyramid {min(missing)} stores them)" if missing else ""
    return ", ".join(texts) + hint


def _sides(resolutions: Sequence[int]) -> str:
    return ", ".join(map(str, resolutions)) + " px"


# --- how many threads decode images here (`data.workers: auto`)

MEASURED_IMAGES = 64  # read for one at most
REPEATS = 3
GAIN = 1.1  # another thread count must be so much faster to be taken


def choose_workers(dataset: Dataset, batch_size: int) -> tuple[int, dict[int, float]]:
    """The number of decoding threads that reads batches fastest, and the images per second of each
    number tried.

    Raw images need none: nothing is measured. Otherwise 0, 2, 4, ... threads up to the cores of
    this process read the same few images; the count grows as long as it pays. The dataset's own
    number stays as it was.
    """
    if dataset.gathers or len(dataset) == 0:
        return 0, {}
    count = min(len(dataset), batch_size, MEASURED_IMAGES)
    records = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    before = dataset.workers
    rates: dict[int, float] = {}
    best = 0
    try:
        for workers in candidates(cores()):
            dataset.workers = workers
            rates[workers] = count / _seconds(dataset, records)
            if rates[workers] > GAIN * rates[best]:
                best = workers
            elif workers:
                break
    finally:
        dataset.workers = before
    return best, rates


def candidates(limit: int) -> list[int]:
    """0 and the powers of two from 2 up to the number of cores, which itself is the last."""
    powers = [2**power for power in range(1, limit.bit_length()) if 2**power < limit]
    return [0, *powers, *([limit] if limit > 1 else [])]


def _seconds(dataset: Dataset, records: np.ndarray) -> float:
    """The median time of reading the records; once before, to start the threads."""
    zeros = np.zeros(len(records), np.int64)
    keys = SampleKeys(0, zeros, zeros)
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        dataset.read(records, keys=keys)
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))
