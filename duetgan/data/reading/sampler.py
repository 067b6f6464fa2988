"""The order of samples in training: derived from (seed, epoch), the same for any number of ranks
and workers.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from duetgan.data.reading.weighted_sampling import occurrences, weighted_epochs
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.seeding import numpy_generator


class SampleKeys(NamedTuple):
    """The keys of a batch's CPU augmentation, besides the sample indices."""

    seed: int
    epochs: np.ndarray  # int64 [n]
    repeats: np.ndarray  # int64 [n]: how often the sample has come before in its epoch
    synthetic: bool = False  # of images that stand beside the real ones (data/reading/mixture.py)

    def of(self, place: int, index: int) -> tuple[int | str, ...]:
        """The key of the sample at `place`: (seed, "augment", epoch, index), and its repeat if it
        is one; synthetic: (seed, "synthetic", "augment", epoch, ...).
        """
        repeat = int(self.repeats[place])
        kind = ("synthetic", "augment") if self.synthetic else ("augment",)
        key = (self.seed, *kind, int(self.epochs[place]), index)
        return (*key, repeat) if repeat else key


def other_order(why: str) -> UserError:
    """The error of a state whose order cannot be continued: why not, and what to use instead."""
    return UserError(f"the sample order cannot be resumed: {why}, or a new run folder")


class GlobalSampler:
    """Indices of an endless concatenation of epochs of `count` draws, in global batches.

    Epoch e's order is drawn from the key (seed, "order", e), with a `stream` from (seed, stream,
    "order", e), so that two data sets of one run have orders of their own. It is a permutation;
    with `shuffle=False` it is 0..count-1. With `weights` sample i appears count * w_i / sum(w)
    times in every epoch, rounded down or up (see WeightedEpochs); `groups` (the labels) keep each
    class's total within one of its expected number too. Equal weights are no weights: the plain
    permutation, and `groups` without weights change nothing.

    A global batch is the next `batch_size` indices, across an epoch's end where it falls there;
    rank r of N takes the contiguous slice [r*B/N, (r+1)*B/N) of it. The state is `consumed`, the
    number of samples that all ranks together have taken, so any number of ranks continues the same
    sequence. Raises UserError if N does not divide B and for weights that are not `count` finite
    numbers >= 0, or all 0; ValueError for wrong groups, or weights unshuffled.
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
        refuse(
            (count < 1, "the data set is empty: pack some images"),
            (batch_size < 1, f"batch_size {batch_size}: must be at least 1"),
        )
        if batch_size % world_size:
            nearest = max(world_size, batch_size // world_size * world_size)
            raise UserError(
                f"batch_size {batch_size} is not divisible by {world_size} processes: try {nearest}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self._stream = () if stream is None else (stream,)
        self.consumed = 0  # samples, of all ranks together
        self.batches = 0  # global batches; counted by a mixture (data/reading/mixture.py)
        self._weighted = weighted_epochs(count, shuffle, weights, groups)
        self._weights_hash = "" if self._weighted is None else self._weighted.digest
        # Kept of two epochs, and for all shallow copies: a loader's draw an epoch once.
        self._drawn = lru_cache(maxsize=2)(self._draw)

    def order(self, epoch: int) -> np.ndarray:
        """An epoch's order: int64 [count], read-only."""
        return self._drawn(epoch)[0]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's order, and how often each sample has come before in it (of a permutation
        nothing).
        """
        generator = numpy_generator(self.seed, *self._stream, "order", epoch)
        if self._weighted is not None:
            order = self._weighted.draw(generator)
        else:
            order = generator.permutation(self.count) if self.shuffle else np.arange(self.count)
        order = order.astype(np.int64, copy=False)
        order.setflags(write=False)
        return order, order[:0] if self._weighted is None else occurrences(order)

    def next_batch(self) -> tuple[np.ndarray, SampleKeys]:
        """This rank's part of the next global batch: indices, int64 [batch_size // world_size], and
        their keys.
        """
        share = self.batch_size // self.world_size
        batch = self.at(self.consumed + self.rank * share, share)
        self.advance()
        return batch

    def at(self, position: int, length: int) -> tuple[np.ndarray, SampleKeys]:
        """`length` indices of the endless sequence from `position` on, and their keys."""
        indices, epochs, repeats = (np.zeros(length, np.int64) for _ in range(3))
        done = 0
        while done < length:
            epoch, first = divmod(position + done, self.count)
            order, earlier = self._drawn(epoch)
            part = order[first : first + length - done]
            here, done = slice(done, done + len(part)), done + len(part)
            indices[here], epochs[here] = part, epoch
            if self._weighted is not None:
                repeats[here] = earlier[first : first + len(part)]
        return indices, SampleKeys(self.seed, epochs, repeats)

    def advance(self, batches: int = 1) -> None:
        """Go on by whole global batches without making their indices."""
        self.consumed += batches * self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Position (`consumed`) and what the order depends on; independent of ranks and batch size.

        `weights` is a hash of weights and groups, "" for equal weights.
        """
        order = {
            "count": self.count,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "weights": self._weights_hash,
        }
        return {"consumed": self.consumed} | order

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises UserError if the order would be another one."""
        if "synthetic" in state:
            raise other_order("the run has been trained with data.synthetic; use the same")
        for name in ("count", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise other_order(
                    f"{name} was {state[name]} and is {getattr(self, name)}; use the same data and seed"
                )
        # states from before there were weights lack the key
        if state.get("weights", "") != self._weights_hash:
            raise other_order(
                "data.sampling changed (or data.class_rates, data.sample_weights, the labels); use the same sampling"
            )
        self.consumed = int(state["consumed"])
