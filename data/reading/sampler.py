"""The order of samples in training: derived from (seed, epoch), the same for any number of ranks and workers."""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from utils import bounded
from utils.config.cli import did_you_mean
from utils.errors import UserError
from utils.seeding import numpy_generator

ROUNDING = 1e-12  # relative; an expected number of draws as near as this to a whole number is that number
FRACTION_BITS = 40  # a draw is counted in units of 2**-40


class SampleKeys(NamedTuple):
    """The keys of a batch's CPU augmentation, besides the sample indices."""

    seed: int
    epochs: np.ndarray  # int64 [n]
    repeats: np.ndarray | None = None  # int64 [n]: how often the sample has come before in its epoch; None: never
    synthetic: bool = False  # of images that stand beside the real ones (data/reading/mixture.py)

    def of(self, place: int, index: int) -> tuple[int | str, ...]:
        """The key of the sample at `place`: (seed, "augment", epoch, index), and its repeat if it is one; synthetic:
        (seed, "synthetic", "augment", epoch, ...).
        """
        repeat = 0 if self.repeats is None else int(self.repeats[place])
        kind = ("synthetic", "augment") if self.synthetic else ("augment",)
        key = (self.seed, *kind, int(self.epochs[place]), index)
        return (*key, repeat) if repeat else key

    def at(self, places: np.ndarray, *, synthetic: bool = False) -> "SampleKeys":
        """The keys of some places; int [m]."""
        repeats = None if self.repeats is None else self.repeats[places]
        return SampleKeys(self.seed, self.epochs[places], repeats, synthetic)


class GlobalSampler:
    """Indices of an endless concatenation of epochs of `count` draws, in global batches.

    Epoch e's order is drawn from the key (seed, "order", e), with a `stream` from (seed, stream, "order", e), so that
    two data sets of one run have orders of their own. It is a permutation; with `shuffle=False` it is
    0..count-1. With `weights` sample i appears count * w_i / sum(w) times in every epoch, rounded down or up (see
    WeightedEpochs); `groups` (the labels) keep each class's total within one of its expected number too. Equal weights
    are no weights: the plain permutation, and `groups` without weights change nothing.

    A global batch is the next `batch_size` indices, across an epoch's end where it falls there; rank r of N takes the
    contiguous slice [r*B/N, (r+1)*B/N) of it. The state is `consumed`, the number of samples that all ranks together
    have taken, so any number of ranks continues the same sequence. Raises UserError if N does not divide B and for
    weights that are not `count` finite numbers >= 0, or all 0; ValueError for wrong groups, or weights unshuffled.
    """

    def __init__(
        self,
        count: int,  # samples in the data set
        *,
        batch_size: int,  # global
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        weights: np.ndarray | None = None,  # float64 [count], >= 0, relative to each other
        groups: np.ndarray | None = None,  # int [count]
        stream: str | None = None,
    ) -> None:
        if count < 1:
            raise UserError("the data set is empty: pack some images")
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size}: must be at least 1")
        if batch_size % world_size:
            nearest = max(world_size, batch_size // world_size * world_size)
            raise UserError(f"batch_size {batch_size} is not divisible by {world_size} processes: try {nearest}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self._stream = () if stream is None else (stream,)
        self.consumed = 0  # samples, of all ranks together
        self.batches = 0  # global batches; counted by a mixture (data/reading/mixture.py)
        self._weighted = _weighted_epochs(count, shuffle, weights, groups)
        self._weights_hash = "" if self._weighted is None else self._weighted.digest
        # The last epochs; one dict for all shallow copies, so that a loader's copies draw an epoch once.
        self._epochs: dict[int, _Epoch] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.consumed // self.count

    def order(self, epoch: int) -> np.ndarray:
        """An epoch's order: int64 [count], read-only."""
        return self._drawn(epoch).order

    def _drawn(self, epoch: int) -> "_Epoch":
        drawn = self._epochs.get(epoch)
        if drawn is None:
            drawn = self._draw(epoch)
            drawn.order.setflags(write=False)
            while len(self._epochs) > 1:  # this one and the one before: memory stays flat
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = drawn
        return drawn

    def _draw(self, epoch: int) -> "_Epoch":
        generator = numpy_generator(self.seed, *self._stream, "order", epoch)
        if self._weighted is not None:
            order = self._weighted.draw(generator)
            return _Epoch(order, occurrences(order))
        indices = generator.permutation(self.count) if self.shuffle else np.arange(self.count)
        return _Epoch(indices.astype(np.int64, copy=False), np.empty(0, np.int64))

    def next_batch(self) -> tuple[np.ndarray, int]:
        """This rank's indices, int64 [batch_size // world_size], and the global batch's start.

        The start is the number of samples that were consumed before this global batch.
        """
        start, share = self.consumed, self.batch_size // self.world_size
        indices = self._slice(start + self.rank * share, share)
        self.advance()
        return indices, start

    def batch_keys(self, start: int) -> SampleKeys:
        """The keys of this rank's samples in the global batch that begins at `start`."""
        share = self.batch_size // self.world_size
        return self.keys_at(start + self.rank * share + np.arange(share, dtype=np.int64))

    def next_keys(self) -> SampleKeys:
        """The keys of what `next_batch` will return."""
        return self.batch_keys(self.consumed)

    def keys_at(self, positions: np.ndarray) -> SampleKeys:
        """The keys of the samples at these positions of the endless sequence, ascending."""
        epochs, places = np.divmod(positions, self.count)
        if self._weighted is None:
            return SampleKeys(self.seed, epochs)
        repeats = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():  # in the order of reading: one epoch's order is kept at a time
            inside = epochs == epoch
            repeats[inside] = self._drawn(epoch).repeats[places[inside]]
        return SampleKeys(self.seed, epochs, repeats)

    def advance(self, batches: int = 1) -> None:
        """Go on by whole global batches without making their indices."""
        self.consumed += batches * self.batch_size

    def _slice(self, position: int, length: int) -> np.ndarray:
        """`length` indices of the endless sequence from `position` on."""
        parts = []
        while length:
            epoch, offset = divmod(position, self.count)
            part = self.order(epoch)[offset : offset + length]
            parts.append(part)
            position, length = position + len(part), length - len(part)
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """Position (`consumed`) and what the order depends on; independent of ranks and batch size.

        `weights` is a hash of weights and groups, "" for equal weights.
        """
        order = {"count": self.count, "seed": self.seed, "shuffle": self.shuffle, "weights": self._weights_hash}
        return {"consumed": self.consumed} | order

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises UserError if the order would be another one."""
        if "synthetic" in state:
            raise UserError(
                "the sample order cannot be resumed: the run has been trained with data.synthetic; give the same, or "
                "use a new run folder"
            )
        for name in ("count", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the sample order cannot be resumed: {name} was {state[name]} and is {getattr(self, name)};"
                    " use the same data and seed, or a new run folder"
                )
        if state.get("weights", "") != self._weights_hash:  # states from before there were weights lack the key
            raise UserError(
                "the sample order cannot be resumed: data.sampling changed (or data.class_rates, data.sample_weights,"
                " the labels); use the same sampling, or a new run folder"
            )
        self.consumed = int(state["consumed"])


class _Epoch(NamedTuple):
    order: np.ndarray  # int64 [count]
    repeats: np.ndarray  # int64 [count]: `occurrences` of it; empty for a permutation


def occurrences(order: np.ndarray) -> np.ndarray:
    """How often each entry has come before: [5, 7, 5, 5] -> [0, 0, 1, 2]; int64 [n]."""
    by_value = np.argsort(order, kind="stable")
    ordered = order[by_value]
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    counts = np.empty(len(order), np.int64)
    counts[by_value] = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    return counts


class WeightedEpochs:
    """Epochs of n draws among n samples in which sample i appears n * w_i / sum(w) times, rounded down or up.

    Systematic resampling (Kitagawa 1996, "Monte Carlo filter and smoother for non-Gaussian nonlinear state space
    models"; Carpenter, Clifford and Fearnhead 1999, "Improved particle filter for nonlinear problems"): the samples lie
    side by side on a line in random order, each as long as its expected number of draws, and marks at distance one,
    shifted by one random number, say which are drawn. On average over epochs each gets exactly its expected number.
    With groups the samples of a group lie together (groups in random order, samples in random order inside them), so a
    group's total is within one of its expected number as well. Then the draws are permuted.

    Only the fractions of the expected numbers are laid on the line: the whole draws are certain. Lengths are integers
    (units of 2**-40 of a draw, coarser above four million samples), so that no rounding error can move a mark.
    """

    def __init__(self, weights: np.ndarray, groups: np.ndarray | None) -> None:
        expected = _expected_draws(weights)
        whole = np.floor(expected)
        fractions = expected - whole
        self._whole = whole.astype(np.int64)  # certain draws of each sample
        self._marks = len(weights) - int(self._whole.sum())  # further draws in an epoch
        self._unit = 1 << min(FRACTION_BITS, 62 - len(weights).bit_length())  # the length of one draw
        self._open = np.flatnonzero(fractions)  # the samples that may be drawn once more
        self._lengths = _lengths(fractions[self._open], self._marks, self._unit)
        self._group_count, self._groups = 0, np.empty(0, np.uint8)
        if groups is not None:
            names, places = np.unique(groups[self._open], return_inverse=True)
            self._group_count = len(names)
            self._groups = places.astype(np.min_scalar_type(len(names)))  # small integers are sorted faster
        digest = hashlib.blake2b(digest_size=16)  # of all that `draw` depends on
        sizes = np.array([self._unit, self._group_count])
        for part in (sizes, self._whole, self._open, self._lengths, self._groups):
            digest.update(part.astype("<i8", copy=False).tobytes())
        self.digest = digest.hexdigest()

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """An epoch: int64 [n]."""
        line = generator.permutation(len(self._open))
        if self._group_count:
            places = generator.permutation(self._group_count).astype(self._groups.dtype)
            line = line[np.argsort(places[self._groups[line]], kind="stable")]
        marks = generator.integers(self._unit) + self._unit * np.arange(self._marks, dtype=np.int64)
        ends = np.cumsum(self._lengths[line])
        copies = self._whole.copy()
        copies[self._open[line[np.searchsorted(ends, marks, side="right")]]] += 1  # each at most once
        return generator.permutation(np.repeat(np.arange(len(copies), dtype=np.int64), copies))


def _weighted_epochs(
    count: int, shuffle: bool, weights: np.ndarray | None, groups: np.ndarray | None
) -> WeightedEpochs | None:
    """What draws the epochs, or None where they are permutations."""
    if groups is not None and (groups.shape != (count,) or groups.dtype.kind not in "iu"):
        raise ValueError(f"groups are {groups.dtype} {groups.shape}, expected integers ({count},)")
    if weights is None:
        return None
    weights = np.asarray(weights, np.float64)
    if weights.shape != (count,):
        raise UserError(f"weights have shape {weights.shape}, expected ({count},): one for each image")
    _check_values(weights, "weights", "index")
    if not shuffle:
        raise ValueError("weights need shuffle=True")
    return None if (weights == weights[0]).all() else WeightedEpochs(weights, groups)


def _check_values(weights: np.ndarray, source: str, place: str, first: int = 0) -> None:
    """Raise UserError naming the first weight that is negative or not finite, counted from `first`; or if all are 0."""
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        value = weights[bad[0]]
        raise UserError(f"{source}: {place} {bad[0] + first} is {value}; a weight is a finite number of at least 0")
    if not weights.any():
        raise UserError(f"{source}: all weights are 0 so no image would be drawn; give some a weight above 0")


def _expected_draws(weights: np.ndarray) -> np.ndarray:
    """n * w_i / sum(w), float64 [n]."""
    relative = weights / weights.max()  # a sum of huge weights would overflow
    # The exact sum: NumPy's depends on the machine in its last bits, and the order must not.
    expected = relative * (len(weights) / math.fsum(relative.tolist()))
    nearest = np.rint(expected)
    return np.where(np.abs(expected - nearest) <= ROUNDING * nearest, nearest, expected)


def _lengths(fractions: np.ndarray, marks: int, unit: int) -> np.ndarray:
    """Fractions of a draw in (0, 1) as int64 lengths in 0..unit whose sum is exactly marks * unit."""
    lengths = np.rint(fractions * unit).astype(np.int64)
    missing = marks * unit - int(lengths.sum())  # rounding: about a unit for each sample
    room = unit - lengths if missing > 0 else lengths
    taken = np.clip(abs(missing) - (np.cumsum(room) - room), 0, room)
    return lengths + taken if missing > 0 else lengths - taken


def balanced_weights(labels: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Weights float64 [n] with which every class is drawn equally often; `labels` are int [n] in 0..len(classes)-1.

    Raises UserError for an unlabelled set and for a class without images.
    """
    if not classes:
        raise UserError("data.sampling: the images have no labels to balance; use uniform sampling")
    images = np.bincount(labels, minlength=len(classes))
    if not images.all():
        name = classes[int(np.argmin(images))]
        raise UserError(f"data.sampling: class {name!r} has no images to draw; add some or pack without the class")
    return 1.0 / images[labels]


def class_weights(labels: np.ndarray, class_names: Sequence[str], rates: Mapping[str, float]) -> np.ndarray:
    """Weights float64 [n] with which an image of class c is seen rates[c] times as often as one without a rate.

    `labels` are int [n] in 0..len(class_names)-1; a rate of 0 leaves the class out. Raises UserError for an unknown
    class, a rate that is negative or not finite, and rates that leave nothing to draw.
    """
    by_class = np.ones(max(1, len(class_names)))  # unlabelled images have label 0
    for name, rate in rates.items():
        if name not in class_names:
            raise UserError(f"data.class_rates: there is no class {name!r}{did_you_mean(name, class_names)}")
        if not (math.isfinite(rate) and rate >= 0):
            raise UserError(f"data.class_rates: the rate of {name!r} is {rate}; give a finite number of at least 0")
        by_class[class_names.index(name)] = rate
    weights = by_class[labels]
    _check_values(weights, "data.class_rates", "index")
    return weights


def load_sample_weights(path: str | Path, count: int) -> np.ndarray:
    """A weight for each of `count` images from a file, in the order of the packed set: float64 [count].

    A .npy file holds numbers [count], any other is text, one number a line. Raises UserError naming the file and line.
    """
    path, binary = Path(path), Path(path).suffix == ".npy"
    try:
        weights = _array_weights(path) if binary else _text_weights(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give a file with a weight for each image") from None
    if len(weights) != count:
        raise UserError(f"{path} has {len(weights)} weights, the data set {count} images: give one for each image")
    _check_values(weights, str(path), "index" if binary else "line", first=0 if binary else 1)
    return weights


def _array_weights(path: Path) -> np.ndarray:
    try:
        bounded.check(path, bounded.TABLE)
        array = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and sizes that the file does not have
    except (ValueError, SyntaxError, TokenError) as error:  # its header is Python's notation
        raise UserError(f"{path} is not a NumPy file of numbers ({error}); save it with numpy.save") from None
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise UserError(f"{path} holds {array.dtype} {list(array.shape)}; it must be numbers in one dimension")
    return np.array(array, np.float64)


def _text_weights(path: Path) -> np.ndarray:
    weights = []
    # What is not text is not a number either.
    with io.TextIOWrapper(bounded.open_file(path, bounded.TABLE), encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                weights.append(float(line))
            except ValueError:
                shown = line.rstrip("\n")[:40]
                raise UserError(f"{path}: line {number}: {shown!r} is not a number; give one number a line") from None
    return np.array(weights, np.float64)
