"""Draw samples in proportion to weights, and compute weights from the samples' classes."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

# An expected number of draws is rounded if a whole number is within this relative distance.
ROUNDING = 1e-12
FRACTION_BITS = 40  # the unit of fractions of a draw is 2**-40


class WeightedEpochs:
    """Epochs of n draws among n samples, in which the weights decide how often a sample appears.

    Sample i appears n * w_i / sum(w) times, rounded down or up.

    The method is systematic resampling (Kitagawa 1996, "Monte Carlo filter and smoother for
    non-Gaussian nonlinear state space models"; Carpenter, Clifford and Fearnhead 1999, "Improved
    particle filter for nonlinear problems"). The samples are laid on a line in random order; the
    length of a sample is its expected number of draws. Marks at distance one, shifted by one random
    number, select the draws, which are then permuted. On average over epochs, each sample gets
    exactly its expected number. With groups, the samples of a group are contiguous on the line
    (groups and samples in random order). The number of draws from a group then differs from its
    expected number by at most one.

    Only the fractional parts of the expected numbers are on the line; the whole parts are always
    drawn. Lengths are integers (units of 2**-40 of a draw, coarser above four million samples), so
    that no rounding error moves a mark.
    """

    def __init__(self, weights: np.ndarray, groups: np.ndarray | None) -> None:
        expected = _expected_draws(weights)
        whole = np.floor(expected)
        fractions = expected - whole
        self._whole = whole.astype(np.int64)  # certain draws of each sample
        self._marks = len(weights) - int(self._whole.sum())  # random draws in an epoch
        # length of one draw on the line
        self._unit = 1 << min(FRACTION_BITS, 62 - len(weights).bit_length())
        self._open = np.flatnonzero(fractions)  # the samples that may be drawn once more
        self._lengths = _lengths(fractions[self._open], self._marks, self._unit)
        self._group_count = 0
        self._groups = np.empty(0, np.uint8)
        if groups is not None:
            names, numbers = np.unique(groups[self._open], return_inverse=True)
            self._group_count = len(names)
            # NumPy sorts small integers faster.
            self._groups = numbers.astype(np.min_scalar_type(len(names)))
        digest = hashlib.blake2b(digest_size=16)  # of everything that `draw` depends on
        for part in (
            np.array([self._unit, self._group_count]),
            self._whole,
            self._open,
            self._lengths,
            self._groups,
        ):
            digest.update(part.astype("<i8", copy=False).tobytes())
        self.digest = digest.hexdigest()

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw an epoch; return its sample indices, and how often each occurs earlier in the epoch.

        Both are int64 [n].
        """
        line = generator.permutation(len(self._open))
        if self._group_count:
            ranks = generator.permutation(self._group_count).astype(self._groups.dtype)
            line = line[np.argsort(ranks[self._groups[line]], kind="stable")]
        marks = generator.integers(self._unit) + self._unit * np.arange(self._marks, dtype=np.int64)
        ends = np.cumsum(self._lengths[line])
        copies = self._whole.copy()
        # A sample is selected at most once: it is shorter than the distance of two marks.
        copies[self._open[line[np.searchsorted(ends, marks, side="right")]]] += 1
        order = generator.permutation(np.repeat(np.arange(len(copies), dtype=np.int64), copies))
        return order, count_repeats(order)


def weighted_epochs(
    count: int, weights: np.ndarray | None, groups: np.ndarray | None
) -> WeightedEpochs | None:
    """Return the weighted epochs of `count` samples, or None if all weights are equal or not given.

    Raises UserError unless there are `count` weights, finite, not negative and not all 0.
    """
    if weights is None:
        return None
    weights = np.asarray(weights, np.float64)
    _check(weights, "weights", count)
    return None if (weights == weights[0]).all() else WeightedEpochs(weights, groups)


def _check(weights: np.ndarray, source: str, count: int) -> None:
    """Raise UserError unless there are `count` weights, finite, not negative and not all 0."""
    is_valid = weights.shape == (count,) and np.isfinite(weights).all() and weights.min() >= 0
    if not is_valid or not weights.any():
        raise UserError(f"{source}: give {count} finite weights of at least 0 that are not all 0")


def _expected_draws(weights: np.ndarray) -> np.ndarray:
    """Return the expected number of draws of each sample, n * w_i / sum(w): float64 [n]."""
    relative = weights / weights.max()  # The sum of huge weights would overflow.
    # The sum is exact: the last bits of NumPy's depend on the machine, and the order must not.
    expected = relative * (len(weights) / math.fsum(relative.tolist()))
    nearest = np.rint(expected)
    return np.where(np.abs(expected - nearest) <= ROUNDING * nearest, nearest, expected)


def _lengths(fractions: np.ndarray, marks: int, unit: int) -> np.ndarray:
    """Convert fractions of a draw in (0, 1) to int64 lengths in 0..unit with sum marks * unit."""
    lengths = np.rint(fractions * unit).astype(np.int64)
    missing = marks * unit - int(lengths.sum())  # by rounding: about a unit for each sample
    room = unit - lengths if missing > 0 else lengths
    correction = np.clip(abs(missing) - (np.cumsum(room) - room), 0, room)
    return lengths + correction if missing > 0 else lengths - correction


def balanced_weights(labels: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return weights, float64 [n], with which images of every class are drawn equally often.

    `labels` are int [n] in 0..len(classes)-1. Raises UserError for an unlabelled data set and for a
    class without images.
    """
    if not classes:
        raise UserError("data.sampling: the images have no labels to balance; use uniform sampling")
    images = np.bincount(labels, minlength=len(classes))
    if not images.all():
        name = classes[int(np.argmin(images))]
        raise UserError(
            f"data.sampling: class {name!r} has no images to draw; add some or pack without the"
            " class"
        )
    return 1.0 / images[labels]


def class_weights(
    labels: np.ndarray, class_names: Sequence[str], rates: Mapping[str, float]
) -> np.ndarray:
    """Return the weights of images, float64 [n], for sampling with different rates of classes.

    An image of class c is drawn rates[c] times as often as an image of a class without a rate. A
    rate of 0 leaves the class out. `labels` are int [n] in 0..len(class_names)-1. Raises UserError
    for an unknown class, a rate that is negative or not finite, and rates that leave nothing to
    draw.
    """
    by_class = np.ones(max(1, len(class_names)))  # unlabelled images have label 0
    for name, rate in rates.items():
        if name not in class_names:
            raise UserError(
                f"data.class_rates: there is no class {name!r}{did_you_mean(name, class_names)}"
            )
        by_class[class_names.index(name)] = rate
    weights = by_class[labels]
    _check(weights, "data.class_rates", len(labels))
    return weights


def count_repeats(order: np.ndarray) -> np.ndarray:
    """Return how often each entry occurs earlier in `order`: [5, 7, 5, 5] -> [0, 0, 1, 2].

    The result is int64 [n].
    """
    by_value = np.argsort(order, kind="stable")
    ordered = order[by_value]
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    counts = np.empty(len(order), np.int64)
    counts[by_value] = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    return counts
