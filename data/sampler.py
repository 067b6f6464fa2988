"""The order of samples in training: derived from (seed, epoch), the same for any number of ranks and workers."""

import numpy as np

from utils.errors import UserError
from utils.seeding import numpy_generator


class GlobalSampler:
    """Indices of an endless concatenation of one permutation per epoch, in global batches.

    Epoch e's order is drawn from the key (seed, "order", e); with `shuffle=False` it is 0..count-1. A global batch is
    the next `batch_size` indices, across an epoch's end where it falls there; rank r of N takes the contiguous slice
    [r*B/N, (r+1)*B/N) of it. The state is `consumed`, the number of samples that all ranks together have taken, so any
    number of ranks continues the same sequence. Raises UserError if N does not divide B.
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
    ) -> None:
        if count < 1:
            raise UserError("the data set is empty: pack some pictures")
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size}: must be at least 1")
        if batch_size % world_size:
            nearest = max(world_size, batch_size // world_size * world_size)
            raise UserError(f"batch_size {batch_size} is not divisible by {world_size} processes: try {nearest}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.consumed = 0  # samples, of all ranks together
        self._order: tuple[int, np.ndarray] | None = None  # the epoch at hand and its permutation

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.consumed // self.count

    def order(self, epoch: int) -> np.ndarray:
        """An epoch's order: int64 [count], each index once."""
        if self._order is None or self._order[0] != epoch:
            generator = numpy_generator(self.seed, "order", epoch)
            indices = generator.permutation(self.count) if self.shuffle else np.arange(self.count)
            self._order = (epoch, indices.astype(np.int64, copy=False))
        return self._order[1]

    def next_batch(self) -> tuple[np.ndarray, int]:
        """This rank's indices, int64 [batch_size // world_size], and the global batch's start.

        The start is the number of samples that were consumed before this global batch.
        """
        start, share = self.consumed, self.batch_size // self.world_size
        indices = self._slice(start + self.rank * share, share)
        self.advance()
        return indices, start

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

    def state_dict(self) -> dict[str, int | bool]:
        """Position and what the order depends on; independent of ranks and batch size."""
        return {"consumed": self.consumed, "count": self.count, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue from `state`. Raises UserError if the order would be another one."""
        for name in ("count", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the sample order cannot be resumed: {name} was {state[name]} and is {getattr(self, name)};"
                    " use the same data and seed, or a new run folder"
                )
        self.consumed = int(state["consumed"])
