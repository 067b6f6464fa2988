"""Determine the order of samples in training.

The order is derived from the seed and the epoch, and is the same for any number of ranks and
workers.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from duetgan.data.reading.weighted_sampling import weighted_epochs
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator


class Position(NamedTuple):
    """A place in the order of samples, given by the numbers of samples and batches before it."""

    consumed: int = 0  # samples of all ranks; of a mixture (data/reading/mixture.py) the real ones
    synthetic: int = 0  # synthetic samples of a mixture
    batches: int = 0  # global batches of the training so far


class SampleKeys(NamedTuple):
    """The values from which `of` makes the random key of each sample in a batch.

    Augmentation on the CPU, such as a random crop, uses the keys.
    """

    seed: int
    epochs: np.ndarray  # int64 [n]
    repeats: np.ndarray  # int64 [n]: earlier draws of the sample in its epoch
    synthetic: bool = False  # True for images of `data.synthetic` (data/reading/mixture.py)

    def of(self, position: int, index: int) -> tuple[int | str, ...]:
        """Return the key of the sample at `position` of the batch.

        The key is (seed, "augment", epoch, index), or (seed, "synthetic", "augment", epoch, index)
        for a synthetic image. If the sample has been drawn earlier in the epoch, the number of its
        earlier draws is appended.
        """
        kind = ("synthetic", "augment") if self.synthetic else ("augment",)
        key = (self.seed, *kind, int(self.epochs[position]), index)
        repeat = int(self.repeats[position])
        return (*key, repeat) if repeat else key


def order_error(reason: str) -> UserError:
    """Return the error for a checkpoint whose order of samples cannot be continued.

    `reason` says what differs, and then the remedy.
    """
    return UserError(f"the sample order cannot be resumed: {reason}, or a new run folder")


class GlobalSampler:
    """A sampler that divides an endless sequence of epochs into global batches of sample indices.

    An epoch is a permutation of 0..count-1, drawn from the key (seed, "order", epoch). With
    `shuffle=False` it is 0..count-1 in order. With `stream` the key is (seed, stream, "order",
    epoch), so that two data sets of one run have different orders.

    With `weights`, sample i appears count * w_i / sum(w) times in every epoch, rounded down or up
    (see WeightedEpochs). If `groups` are given too, for example the labels, the number of draws
    from each group differs from its expected number by at most one. Equal weights give a
    permutation. Without weights, `groups` have no effect.

    A global batch is the next `batch_size` indices of the sequence. It may span two epochs. Rank r
    of N takes the slice [r*B/N, (r+1)*B/N) of a batch of size B. A batch depends only on its
    position, the number of samples before it, so a run can be resumed on any number of ranks.

    Raises:
        UserError: if `count` is 0, if the number of ranks does not divide the batch size, or if
            `weights` are not `count` finite numbers of at least 0 with a sum above 0.
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
        if batch_size < 1 or batch_size % world_size:
            nearest = max(world_size, batch_size // world_size * world_size)
            raise UserError(
                f"batch_size {batch_size} is not divisible by {world_size} processes: try {nearest}"
            )
        self.count = count
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._stream = () if stream is None else (stream,)
        self._weighted = weighted_epochs(count, weights, groups)
        self._weights_hash = "" if self._weighted is None else self._weighted.digest
        # A batch may span two epochs.
        self._cached_draw = lru_cache(maxsize=2)(self._draw)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch: int64 [count], read-only."""
        return self._cached_draw(epoch)[0]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's order, and the number of earlier draws of each entry in it.

        The second array is empty for a permutation.
        """
        generator = numpy_generator(self.seed, *self._stream, "order", epoch)
        repeats = np.empty(0, np.int64)
        if self._weighted is not None:
            order, repeats = self._weighted.draw(generator)
        elif self.shuffle:
            order = generator.permutation(self.count)
        else:
            order = np.arange(self.count)
        order = order.astype(np.int64, copy=False)
        order.setflags(write=False)
        return order, repeats

    @property
    def rank_rows(self) -> slice:
        """This rank's rows of a global batch."""
        rank_batch = self.batch_size // self.world_size
        return slice(self.rank * rank_batch, (self.rank + 1) * rank_batch)

    def batch(self, position: Position) -> tuple[np.ndarray, SampleKeys]:
        """Return this rank's part of the global batch at `position`, and its random keys.

        The part is an array of sample indices, int64 [batch_size // world_size].
        """
        rows = self.rank_rows
        return self.at(position.consumed + rows.start, rows.stop - rows.start)

    def next_position(self, position: Position) -> Position:
        """Return the position after the global batch at `position`."""
        return Position(
            position.consumed + self.batch_size, position.synthetic, position.batches + 1
        )

    def at(self, position: int, length: int) -> tuple[np.ndarray, SampleKeys]:
        """Return `length` indices of the sequence from `position` on, and their random keys.

        `position` counts from the start of the endless sequence.
        """
        indices = np.zeros(length, np.int64)
        epochs = np.zeros(length, np.int64)
        repeats = np.zeros(length, np.int64)
        done = 0
        while done < length:
            epoch, first = divmod(position + done, self.count)
            order, order_repeats = self._cached_draw(epoch)
            end = min(self.count, first + length - done)
            rows = slice(done, done + end - first)
            indices[rows] = order[first:end]
            epochs[rows] = epoch
            if self._weighted is not None:
                repeats[rows] = order_repeats[first:end]
            done = rows.stop
        return indices, SampleKeys(self.seed, epochs, repeats)

    def state_at(self, position: Position) -> dict[str, object]:
        """Return a position as a state to save: `consumed`, and what the order depends on.

        The state does not depend on the number of ranks or the batch size. `weights` is a hash of
        weights and groups, "" for equal weights.
        """
        return {
            "consumed": position.consumed,
            "count": self.count,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "weights": self._weights_hash,
        }

    def position_of(self, state: Mapping[str, Any]) -> Position:
        """Return the position in a saved state.

        Raises UserError if the state is of another order of samples.
        """
        if "synthetic" in state:
            raise order_error("the run has been trained with data.synthetic; use the same")
        for name in ("count", "seed", "shuffle"):
            value = getattr(self, name)
            if state[name] != value:
                raise order_error(
                    f"{name} was {state[name]} and is {value}; use the same data and seed"
                )
        # States of earlier versions, without weights, have no hash of them.
        if state.get("weights", "") != self._weights_hash:
            raise order_error(
                "data.sampling, data.class_rates or the labels have changed; use the same"
            )
        return Position(int(state["consumed"]))
