"""How many samples of a process's share go through the network at once."""

from itertools import pairwise
from typing import Any, Literal

from duetgan.training.base.monitors import Fields
from duetgan.utils.errors import TrainingHalted


class MicroBatch(Fields):
    """At most `size` samples a forward pass. With the setting `auto` it starts at the whole share
    and is halved when memory runs out, with several processes in the first steps only; what was
    found is its state.
    """

    STATE = ("size",)
    optional = True  # a run that was started with a number has no such state
    tries = 0  # steps that several processes first try without sending

    def __init__(self, setting: int | Literal["auto"] | None, share: int) -> None:
        self.auto, self.share = setting == "auto", share
        self.size = share if setting is None or setting == "auto" else min(setting, share)

    def parts(self) -> list[slice]:
        """The share in as few and as equal slices as can be: a short last one would give BatchNorm
        poor statistics.
        """
        count = -(-self.share // self.size)
        ends = [self.share * number // count for number in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def look_again(self) -> None:
        """What trains, or the images' size, has changed: two steps tell what memory that takes."""
        self.tries = 2 if self.auto else 0

    def halve(self) -> str:
        """Go on with half of it; returns what to say. Raises TrainingHalted when a single sample is
        too much.
        """
        if self.size == 1:
            raise TrainingHalted(
                "memory ran out with a single sample per forward pass; take smaller images (--data.resolution), a "
                "smaller model, or model.activation_checkpointing"
            )
        before, self.size = self.size, -(-self.size // 2)
        return (
            f"micro_batch: memory ran out with {before} samples per forward pass and process; going on with "
            f"{self.size}. The global batch and its gradient's mean stay, but BatchNorm normalises by, and averages, "
            f"the statistics of {self.size} samples instead of {before}"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.size = min(self.size, self.share)
