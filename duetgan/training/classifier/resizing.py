"""Progressive resizing: training begins with smaller images, which cost less, and ends at full size
(fast.ai, 2018).

Names and defaults are those of MosaicML Composer's ProgressiveResizing. The size is a function of
the step alone.
"""

from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise
from math import ceil

from duetgan.models.classifier import Classifier
from duetgan.utils.config.model import Config, Probability, Share
from duetgan.utils.errors import UserError

SMALLEST = 8  # px, as of model.input_size
# px; sizes are multiples of it, and few: torch.compile compiles for each, eight times at most
INCREMENT = 4


class ResizingConfig(Config):
    """Progressive resizing: smaller images at first. Evaluation is always at full size."""

    # of the images' sides at first; 0.5: a quarter of the pixels; 1: off
    initial_scale: Share = 1.0
    delay_fraction: Probability = 0.5  # share of the steps before the side begins to grow, linearly
    finetune_fraction: Share = 0.2  # share of the steps, the last ones, at full size

    def check(self) -> None:
        if Fraction(str(self.delay_fraction)) + Fraction(str(self.finetune_fraction)) > 1:
            raise UserError(
                f"delay_fraction {self.delay_fraction} and finetune_fraction {self.finetune_fraction}: "
                "together they must be at most 1"
            )


class Resizing:
    """The size of a model's images in a training of `steps` steps. Evaluation is of another model,
    the average.

    Raises UserError for a first size that the network cannot take.
    """

    def __init__(self, config: ResizingConfig, model: Classifier, steps: int) -> None:
        self.config, self.model, self.steps = config, model, steps
        full = model.config.input_size or model.spec.side
        self.spans: list[tuple[int, int]] = []  # (first step, px) of every size
        step = 0
        while step < steps:
            side = side_at(config, step, steps, full)
            self.spans.append((step, side))
            step = bisect_right(
                range(steps), side, key=lambda step: side_at(config, step, steps, full)
            )
        least, remedy = self.spans[0][1], "raise resizing.initial_scale, or leave it out"
        if self.on:
            if least < SMALLEST:
                raise UserError(
                    f"resizing.initial_scale {config.initial_scale}: images of {full} px would begin at {least} px, "
                    f"too small; {remedy}"
                )
            model.check_side(least, remedy)

    @property
    def on(self) -> bool:
        return len(self.spans) > 1

    def at(self, step: int) -> bool:
        """Set the model up for update number `step`; whether its images' size is another than
        before.
        """
        if not self.on:
            return False
        before, self.model.side = self.model.side, self.side_of(step)
        return self.model.side != before

    def side_of(self, step: int) -> int:
        """px of the images of update number `step`."""
        return self.spans[bisect_right(self.spans, step, key=lambda span: span[0]) - 1][1]

    def typical_steps(self) -> dict[int, float]:
        """The last step of every size -> its share of all steps, the largest first."""
        ends = [*(first for first, _ in self.spans), self.steps]
        shares = {end - 1: (end - first) / self.steps for first, end in pairwise(ends)}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def describe(self) -> dict[str, str]:
        """What the plan says, if something was asked for."""
        rest = [f", {side} px from step {first:,}" for first, side in self.spans[1:]]
        return (
            {"image size": f"{self.spans[0][1]} px{''.join(rest)}"}
            if self.config.initial_scale < 1
            else {}
        )


def side_at(config: ResizingConfig, step: int, steps: int, full: int) -> int:
    """Side in px of the images, `full` at most, of update number `step` of `steps`, in exact
    arithmetic.

    It grows in multiples of 4 px, or where `full` is above 32 of an eighth of it, rounded up to
    such a multiple.
    """
    shares = (config.initial_scale, config.delay_fraction, config.finetune_fraction)
    # as they were written: 0.1 is a tenth
    initial, delay, finetune = (Fraction(str(share)) for share in shares)
    start, end = int(delay * steps), steps - ceil(finetune * steps)
    if step >= end:
        return full
    grown = Fraction(max(0, step - start), max(1, end - start))
    scale = initial * (1 - grown) + grown
    increment = INCREMENT * -(-full // (8 * INCREMENT))
    return full if scale == 1 else min(full, round(full * scale / increment) * increment)
