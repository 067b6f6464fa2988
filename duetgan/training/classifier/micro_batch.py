"""Micro-batches: parts of a process's batch that go through the network at once."""

from itertools import pairwise
from typing import Any, Literal

from duetgan.training.base.monitors import Fields
from duetgan.utils.errors import TrainingHalted


class MicroBatch(Fields):
    """The largest number of samples per forward pass, `size`, which is also the state.

    With `auto` it starts at all samples of the process and is halved when memory runs out; several
    processes halve it only in tried steps (`retry`).
    """

    STATE = ("size",)
    optional = True  # A run that started with a number has no such state.
    tries = 0  # number of next steps that several processes first try without sending gradients

    def __init__(self, setting: int | Literal["auto"] | None, rank_batch: int) -> None:
        self.auto = setting == "auto"
        self.rank_batch = rank_batch
        self.size = rank_batch
        if isinstance(setting, int):
            self.size = min(setting, rank_batch)

    def slices(self) -> list[slice]:
        """Return as few micro-batches as possible, of nearly equal sizes.

        A much smaller last one would give BatchNorm poor statistics.
        """
        count = -(-self.rank_batch // self.size)
        ends = [self.rank_batch * number // count for number in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def retry(self) -> None:
        """Check the memory in the next two steps, since parameters or image sizes have changed."""
        self.tries = 2 if self.auto else 0

    def halve(self) -> str:
        """Halve the size, and return a message about it.

        Raises TrainingHalted if a single sample needs too much memory.
        """
        if self.size == 1:
            raise TrainingHalted(
                "memory ran out with a single sample per forward pass; take smaller images (--data.resolution), a "
                "smaller model, or model.activation_checkpointing"
            )
        previous = self.size
        self.size = -(-previous // 2)
        return (
            f"micro_batch: memory ran out with {previous} samples per forward pass and process; going on with "
            f"{self.size}. The global batch and its gradient's mean stay, but BatchNorm normalises by, and averages, "
            f"the statistics of {self.size} samples instead of {previous}"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.size = min(self.size, self.rank_batch)
