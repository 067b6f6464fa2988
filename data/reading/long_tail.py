"""A long-tailed part of a balanced set: `data.pack --long-tail`. docs/lmdb.md has the rules.

The exponential profile of Cui et al. 2019 ("Class-Balanced Loss Based on Effective Number of Samples", section 5.1):
of K classes number k keeps n * ratio ** (-k / (K - 1)) images, rounded down.
"""

import bisect
import math
from collections.abc import Sequence

import numpy as np

from data.sources.base import ArraySource, Item, Source
from utils.errors import UserError

ROUNDING = 1e-6  # a power that is a whole number may come out a little below it


def profile(largest: int, ratio: float, classes: int) -> np.ndarray:
    """Images of each class, int64 [classes]: `largest` of the first, largest / ratio of the last."""
    steps = np.arange(classes) / max(1, classes - 1)
    return np.floor(largest * float(ratio) ** -steps + ROUNDING).astype(np.int64)


def long_tail(
    labels: np.ndarray,  # int64 [n]
    ratio: float,
    seed: int,
    largest: int | None = None,  # images that the first class keeps; None: the most for which every class has enough
    names: Sequence[str] = (),  # of the classes; default: their numbers
) -> np.ndarray:
    """The records that follow the profile, int64 [m], ascending.

    Those of class k are the first of a permutation with the key (seed, "long-tail", k): a smaller part of the same
    images and seed lies within a larger one. Raises UserError for a ratio below 1, fewer than two classes, a class
    that would keep no image, and one that has not as many as the profile asks for.
    """
    counts = np.bincount(labels, minlength=len(names))
    classes = names or [str(label) for label in range(len(counts))]
    return drawn(labels, _wanted(counts, ratio, largest, classes).tolist(), seed, "long-tail")


def drawn(labels: np.ndarray, wanted: Sequence[int], seed: int, purpose: str) -> np.ndarray:
    """Records, int64 ascending: of class k the first wanted[k] of a permutation with the key (seed, purpose, k)."""
    from utils.seeding import numpy_generator  # imports PyTorch, which packing does without

    rows = []
    for label, number in enumerate(wanted):
        own = np.flatnonzero(labels == label)
        rows.append(own[numpy_generator(seed, purpose, label).permutation(len(own))[:number]])
    return np.sort(np.concatenate(rows))


def _wanted(counts: np.ndarray, ratio: float, largest: int | None, names: Sequence[str]) -> np.ndarray:
    """How many images each class keeps, int64 [K]. Raises UserError as `long_tail` does."""
    if not (math.isfinite(ratio) and ratio >= 1):
        raise UserError(f"--long-tail {ratio:g}: give a ratio of 1 or more, for example 100")
    if len(counts) < 2:
        raise UserError(f"--long-tail {ratio:g} needs two classes or more, there is one; drop it")
    if not counts.all():
        raise UserError(f"class {names[int(counts.argmin())]} has no images; add some")
    if largest is None:
        sizes = range(1, int(counts[0]) + 1)
        largest = bisect.bisect_left(sizes, True, key=lambda n: bool((profile(n, ratio, len(counts)) > counts).any()))
    elif not 1 <= largest <= counts[0]:
        raise UserError(f"--long-tail-max {largest}: class {names[0]} has {counts[0]:,} images; give 1 to {counts[0]}")
    wanted = profile(largest, ratio, len(counts))
    if not wanted.all():
        raise UserError(
            f"--long-tail {ratio:g} leaves no image of class {names[-1]}, for class {names[0]} has {largest:,}; give a"
            f" ratio of at most {largest}"
        )
    if (short := wanted > counts).any():
        label = int(short.argmax())
        raise UserError(
            f"--long-tail-max {largest} asks for {wanted[label]:,} images of class {names[label]}, there are"
            f" {counts[label]:,}; lower it"
        )
    return wanted


def thin(source: Source, ratio: float, largest: int | None = None, seed: int = 0) -> Source:
    """The part of a source that follows the profile; `long_tail` of it says so, for the metadata.

    Raises UserError as `long_tail` does, and for a source without labels.
    """
    if not source.classes:
        raise UserError(f"{source.name} is unlabelled: --long-tail needs classes; drop it")
    rows = long_tail(source.labels(), ratio, seed, largest, source.classes)
    part = _part(source, rows)
    kept = int(np.count_nonzero(part.labels() == 0))
    part.long_tail = {"ratio": float(ratio), "largest": kept, "seed": seed, "images": len(source)}
    return part


def _part(source: Source, rows: np.ndarray) -> Source:
    """These images of a source alone."""
    if not isinstance(source, ArraySource):
        return _Chosen(source, rows)
    part = ArraySource(source.name, source.images[rows], source.labels()[rows], source.classes)
    part.splits, part.remarks = source.splits, source.remarks
    return part


class _Chosen(Source):
    """Some images of another source, which stays its owner's to close."""

    def __init__(self, source: Source, rows: np.ndarray) -> None:
        super().__init__(source.name, source.classes, source.shape, source.channels)
        self.problems, self.ignored, self.remarks = source.problems, source.ignored, source.remarks
        self.splits, self.passport = source.splits, source.passport
        self._source, self._rows, self._labels = source, rows, source.labels()[rows]

    def item(self, index: int) -> Item:
        return self._source.item(int(self._rows[index]))

    def item_name(self, index: int) -> str:
        return self._source.item_name(int(self._rows[index]))

    def stored_name(self, index: int) -> str:
        return self._source.stored_name(int(self._rows[index]))
