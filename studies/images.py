"""A study's images: training, held-out and held-back ones of one file, drawn by a seed, and the test images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.lmdb.format import Meta
from duetgan.data.pack import pack
from duetgan.data.reading.dataset import Dataset
from duetgan.data.sources import open_source
from duetgan.inference.dataset import write_labelled
from duetgan.studies.config import StudyData
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.seeding import numpy_generator

PARTS = "parts"  # the job
TRAIN, HELD_OUT, HELD_BACK, TEST = "train", "held_out", "held_back", "test"
ROUNDING = 1e-6  # a power that is a whole number may come out a little below it
EVEN_SOURCE = 10**6  # images of each class: those of a named source are even
EVEN = 1.5  # largest class over rarest, up to which classes count as equally large


def make_parts(data: StudyData, place: Path) -> dict[str, Any]:
    """Make all four files; returns `classes` and each part's `counts` by class. Raises UserError for images without
    classes, of other ones, or of sizes of their own.
    """
    train, test = _sources(data, place)
    with Dataset(train) as reader, Dataset(test) as tested:
        if len(reader.classes) < 2:
            raise UserError(f"{train}: a study needs images of two classes or more; pack class folders")
        require_same_classes(str(test), tested.classes, str(train), reader.classes, "pack both from the same folders")
        for each in (reader, tested):
            if not each.resolution:
                raise UserError(f"{each.path}: its images have sizes of their own; pack with --size N")
        chosen = divide(usable(reader, tested), reader.labels(), len(reader.classes), data)
        metas = {name: write_subset(reader, rows, place / f"{name}.lmdb") for name, rows in chosen.items()}
        metas[TEST] = write_subset(tested, np.arange(len(tested)), place / f"{TEST}.lmdb")
    return {"classes": reader.classes, "counts": {name: list(meta.histogram) for name, meta in metas.items()}}


def _sources(data: StudyData, place: Path) -> tuple[Path, Path]:
    """The packed training and test images; a source is packed first."""
    if data.path is not None and data.test_path is not None:
        return Path(data.path), Path(data.test_path)
    files = place / "whole-train.lmdb", place / "whole-test.lmdb"
    for file, split in zip(files, ("train", "test"), strict=True):
        root = None if data.root is None else Path(data.root)
        with open_source(str(data.source), split=split, root=root) as source:
            pack(source, file, size=data.size, overwrite=True, duplicates=False)
    return files


def usable(reader: Dataset, tested: Dataset) -> np.ndarray:
    """Records of the training file that are no test image's twin, pixel for pixel, and no earlier record's."""
    digests = reader.signatures()["digest"]
    first = np.zeros(len(digests), bool)
    first[np.unique(digests, return_index=True)[1]] = True
    return np.flatnonzero(first & ~np.isin(digests, tested.signatures()["digest"]))


def divide(records: np.ndarray, labels: np.ndarray, classes: int, data: StudyData) -> dict[str, np.ndarray]:
    """Which of these records are in which part, ascending: of each class, in the order of the key (seed, "study",
    class), first the held-out ones, then as many training ones as `training_counts` says; all others are held back.
    Raises UserError for a class that is too small.
    """
    by_class = [records[labels[records] == label] for label in range(classes)]
    order = [numpy_generator(data.seed, "study", label).permutation(rows) for label, rows in enumerate(by_class)]
    held, left = _shares([len(rows) for rows in order], data)
    wanted = training_counts(left, data)
    if min(wanted) < 1 or any(have < want for have, want in zip(left, wanted, strict=True)):
        small = int(np.argmin(left))
        raise UserError(
            f"class {small} has {len(order[small])} images that are not among the test images, too few to divide; add "
            "some, or lower data.held_out and data.held_back"
        )
    drawn = [np.split(rows, [first, first + count]) for rows, first, count in zip(order, held, wanted, strict=True)]
    parts = [np.sort(np.concatenate(rows)) for rows in zip(*drawn, strict=True)]
    return dict(zip((HELD_OUT, TRAIN, HELD_BACK), parts, strict=True))


def _shares(counts: Sequence[int], data: StudyData) -> tuple[list[int], list[int]]:
    """Of each class how many images are held out, and how many are left for training at most."""
    held = [max(1, round(data.held_out * count)) for count in counts]
    return held, [int((1 - data.held_back) * count) - kept for count, kept in zip(counts, held, strict=True)]


def expected_counts(data: StudyData) -> list[int]:
    """Training images of each class, before anything is packed; but for twins that are left out."""
    if data.path is None:
        return training_counts([EVEN_SOURCE] * 10, data.changed(largest=None))
    with Dataset(data.path) as reader:
        return training_counts(_shares(reader.meta.histogram, data)[1], data)


def training_counts(available: Sequence[int], data: StudyData) -> list[int]:
    """Training images of each class: all, or `largest` at most, and with a long tail those of its `profile`, at least
    one.
    """
    largest = min(max(available), data.largest or max(available))
    if data.long_tail == 1:
        return [min(count, largest) for count in available]
    largest = min(largest, *available[:1])
    tail = profile(largest, data.long_tail, len(available)).tolist()
    return [min(count, max(1, wanted)) for count, wanted in zip(available, tail, strict=True)]


def profile(largest: int, ratio: float, classes: int) -> np.ndarray:
    """Images of each of K classes, int64 [K]: of class k largest * ratio ** (-k / (K - 1)), rounded down (Cui et al.
    2019, "Class-Balanced Loss Based on Effective Number of Samples", section 5.1).
    """
    steps = np.arange(classes) / max(1, classes - 1)
    return np.floor(largest * float(ratio) ** -steps + ROUNDING).astype(np.int64)


def write_subset(reader: Dataset, records: Sequence[int] | np.ndarray, out: Path) -> Meta:
    """Copy records, as they are read, into a file of raw images; one that is there is replaced."""
    source = f"{len(records)} images of {reader.meta.source}"
    images = (reader, records, reader.labels()[records])
    return write_labelled(out, [images], reader.classes, source=source, encoding="raw", overwrite=True)


def groups_of(counts: Sequence[int], classes: Sequence[str]) -> dict[str, list[int]]:
    """Sets of labels by name: `all`; for classes of unequal size `many`, `medium` and `few`, a third of the classes
    each by the number of training images (`medium` takes what does not divide); and every class by its name.
    """
    groups = {"all": list(range(len(counts)))}
    order = sorted(groups["all"], key=lambda label: (-counts[label], label))
    third = len(order) // 3
    if third and not even(counts):
        groups |= {"many": order[:third], "medium": order[third : len(order) - third], "few": order[-third:]}
    return groups | {name: [label] for label, name in enumerate(classes) if name not in groups}


def even(counts: Sequence[int]) -> bool:
    """Whether classes count as equally large."""
    return max(counts) <= EVEN * min(counts)
