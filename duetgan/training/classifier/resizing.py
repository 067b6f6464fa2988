"""Progressive resizing: training starts with smaller images, which cost less (fast.ai, 2018).

Training ends at full size. Names and defaults are those of ProgressiveResizing in MosaicML's
Composer. The size is a function of the step alone.
"""

from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise
from math import ceil

from duetgan.models.classifier import Classifier
from duetgan.utils.config.model import Config, PositiveFraction, Probability
from duetgan.utils.errors import UserError

SMALLEST = 8  # smallest image size in px, as for model.input_size
# Sizes below the full one are multiples of this number of px. A training has at most eight sizes,
# because torch.compile compiles a graph for each.
INCREMENT = 4


class ResizingConfig(Config):
    """Progressive resizing: smaller images at first. Evaluation is always at full size."""

    # initial scale of the image sides; 0.5: a quarter of the pixels; 1: no resizing
    initial_scale: PositiveFraction = 1.0
    delay_fraction: Probability = 0.5  # fraction of the steps before the images grow, linearly
    finetune_fraction: PositiveFraction = 0.2  # fraction of the steps at full size, at the end

    def check(self) -> None:
        if Fraction(str(self.delay_fraction)) + Fraction(str(self.finetune_fraction)) > 1:
            raise UserError(
                f"delay_fraction {self.delay_fraction} and finetune_fraction {self.finetune_fraction}: "
                "together they must be at most 1"
            )


class Resizing:
    """The schedule of a model's image size in a training of `steps` steps.

    Evaluation is not affected, because it uses another model, the moving average. Raises UserError
    if the first size is too small for the network.
    """

    def __init__(self, config: ResizingConfig, model: Classifier, steps: int) -> None:
        self.config = config
        self.model = model
        self.steps = steps
        full = model.config.input_size or model.spec.side
        self.spans: list[tuple[int, int]] = []  # first step and px of each size
        step = 0
        while step < steps:
            side = side_at(config, step, steps, full)
            self.spans.append((step, side))
            step = bisect_right(
                range(steps), side, key=lambda step: side_at(config, step, steps, full)
            )
        first, remedy = self.spans[0][1], "raise resizing.initial_scale, or leave it out"
        if self.on:
            if first < SMALLEST:
                raise UserError(
                    f"resizing.initial_scale {config.initial_scale}: images of {full} px would begin at {first} px, "
                    f"too small; {remedy}"
                )
            model.check_side(first, remedy)

    @property
    def on(self) -> bool:
        return len(self.spans) > 1

    def at(self, step: int) -> bool:
        """Set the model's image size for update number `step`; return True if it has changed."""
        if not self.on:
            return False
        previous = self.model.side
        self.model.side = self.side_of(step)
        return self.model.side != previous

    def side_of(self, step: int) -> int:
        """Return the side of the images in px at update number `step`."""
        return self.spans[bisect_right(self.spans, step, key=lambda span: span[0]) - 1][1]

    def typical_steps(self) -> dict[int, float]:
        """Return a dict from step number to fraction, with one entry for each image size.

        Each key is the last step at this size, and each value the fraction of steps at this size.
        The largest fraction comes first.
        """
        ends = [*(first for first, _ in self.spans), self.steps]
        fractions = {end - 1: (end - first) / self.steps for first, end in pairwise(ends)}
        return dict(sorted(fractions.items(), key=lambda item: -item[1]))

    def describe(self) -> dict[str, str]:
        """Return a dict with a row for the printed plan; empty if no resizing is configured."""
        if self.config.initial_scale == 1:
            return {}
        changes = [f", {side} px from step {first:,}" for first, side in self.spans[1:]]
        return {"image size": f"{self.spans[0][1]} px{''.join(changes)}"}


def side_at(config: ResizingConfig, step: int, steps: int, full: int) -> int:
    """Return the side of the images in px at update number `step` of a training of `steps` updates.

    It is at most `full`, the side at the end. A smaller side is a multiple of an increment: an
    eighth of `full`, rounded up to a multiple of 4 px. The arithmetic is exact.
    """
    # The decimal text of a float gives the exact fraction: 0.1 is a tenth.
    initial = Fraction(str(config.initial_scale))
    start = int(Fraction(str(config.delay_fraction)) * steps)
    end = steps - ceil(Fraction(str(config.finetune_fraction)) * steps)
    if step >= end:
        return full
    progress = Fraction(max(0, step - start), max(1, end - start))
    scale = initial * (1 - progress) + progress
    increment = INCREMENT * -(-full // (8 * INCREMENT))
    return full if scale == 1 else min(full, round(full * scale / increment) * increment)
