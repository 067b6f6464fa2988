"""Micro-batches: parts of a process's batch that go through the network at once."""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch

from duetgan.training.base.monitors import Fields, State
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import TrainingHalted
from duetgan.utils.machine import ran_out
from duetgan.utils.runlog.run_log import say_main


class MicroBatchSize(Fields):
    """The largest number of samples per forward pass, `size`, which is also the state.

    With `auto` it starts at all `count` samples of the process, and `find` halves it.
    """

    STATE = ("size",)
    optional = True  # A run that started with a number has no such state.

    def __init__(self, setting: int | Literal["auto"] | None, count: int) -> None:
        self.auto = setting == "auto"
        self.count = count
        self.size = count
        if isinstance(setting, int):
            self.size = min(setting, count)
        # True if parameters or image sizes have changed since `find`
        self.is_stale = True

    def slices(self) -> list[slice]:
        """Return as few micro-batches as possible, of nearly equal sizes.

        A much smaller last one would give BatchNorm poor statistics.
        """
        parts = -(-self.count // self.size)
        ends = [self.count * number // parts for number in range(parts + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def find(self, attempt: Callable[[], object]) -> None:
        """Halve the size until all ranks have the memory for `attempt`, the work of a step.

        Does nothing without `auto`, or if `is_stale` is False. Raises TrainingHalted if a single
        sample needs too much memory.
        """
        if not (self.auto and self.is_stale):
            return
        while collectives.all_reduce_max(int(not fits(attempt))):
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            self._halve()
        self.is_stale = False

    def _halve(self) -> None:
        if self.size == 1:
            raise TrainingHalted(
                "memory ran out with a single sample per forward pass; take smaller images "
                "(--data.resolution), a smaller model, or model.activation_checkpointing"
            )
        previous = self.size
        self.size = -(-previous // 2)
        say_main(
            f"micro_batch: memory ran out with {previous} samples per forward pass and process; "
            f"going on with {self.size}. The global batch and its gradient's mean stay, but "
            f"BatchNorm normalises by, and averages, the statistics of {self.size} samples instead "
            f"of {previous}"
        )

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.size = min(self.size, self.count)


def fits(attempt: Callable[[], object]) -> bool:
    """Return False if memory runs out in `attempt`, whose tensors are then released."""
    try:
        attempt()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return False
    return True
