"""Progressive growing: which resolution, how far faded in, and in which batches at each step
(Karras et al. 2018, "Progressive Growing of GANs", section 2 and appendix A.1).

The first stage trains the start's resolution alone. Every later one doubles it: the new layers fade
in with alpha from 0 to 1, linearly in the images seen, and then stabilise. The last stage lasts
until the run ends. Everything is a function of the step number, so there is nothing to save;
without growth there is one stage that never changes.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from annotated_types import Ge

from duetgan.utils.config.model import Config, NonNegativeFloat, PositiveInt
from duetgan.utils.errors import UserError

SMALLEST = 8  # px; the first stage's at least

# thousand images of every stage, or of each by its resolution
Kimg = NonNegativeFloat | dict[int, NonNegativeFloat]


class ProgressiveConfig(Config):
    """Growth of both networks from low to full resolution. Lengths are in thousand images that a
    stage sees.
    """

    # px of the first stage; null: no growth, the full networks from the first step
    start: Annotated[int, Ge(SMALLEST)] | None = None
    fade_kimg: Kimg = 600.0  # fading in; a number, or {px: number} for every stage but the first
    # then at alpha 1; a number, or {px: number} for every stage but the last, which goes on
    stable_kimg: Kimg = 600.0
    # {px: global batch}; stages not named: batch_size
    batch_sizes: dict[int, PositiveInt] = {}
    reset_optimizer: bool = True  # Adam's moments start anew in every stage

    def check(self) -> None:
        if self.start is not None and self.start & (self.start - 1):
            raise UserError(f"start {self.start}: must be a power of two, or null for no growth")


class Stage(NamedTuple):
    """What a step trains, and where its stage lies in the run."""

    resolution: int  # px of the images, real and generated
    batch_size: int  # global
    first_step: int  # of the stage
    first_image: int  # images seen before the stage
    fade_images: int  # of the stage, over which alpha grows; 0: it is 1 at once
    # in [0, 1]: weight of this resolution's new layers; 0: the networks of the stage before
    alpha: float = 1.0


class Stages:
    """The run's stages as functions of the step; without the config's start there is one.

    Raises UserError for a resolution that doubling does not lead to, for lengths and batch sizes of
    stages that do not exist, for a length that is missing, and for a stage without images.
    """

    def __init__(
        self,
        config: ProgressiveConfig,
        resolution: int,  # px of the full networks
        steps: int,  # of the run
        batch_size: int,  # global, of stages without one of their own
    ) -> None:
        self.config, self.steps = config, steps
        sides = _resolutions(config.start, resolution)
        self.growing = len(sides) > 1
        sizes = config.batch_sizes if self.growing else {}
        _check_named("batch_sizes", sizes, sides)
        fades = _images("fade_kimg", config.fade_kimg, sides[1:])
        stables = _images("stable_kimg", config.stable_kimg, sides[:-1])
        # at alpha 1; each ends with the first whole batch that completes its images
        self.all: list[Stage] = []
        step = image = 0
        for side in sides:
            size, fade = sizes.get(side, batch_size), fades.get(side, 0)
            self.all.append(Stage(side, size, step, image, fade))
            length = -(-(fade + stables.get(side, 0)) // size)  # steps
            if not length and side != sides[-1]:
                raise UserError(
                    f"progressive: the stage of {side} px sees no images; give it some with progressive.stable_kimg"
                )
            step, image = step + length, image + length * size

    def _number(self, step: int) -> int:
        return bisect_right(self.all, step, key=lambda stage: stage.first_step) - 1

    def at(self, step: int) -> Stage:
        """What update number `step` (from 0) trains. Alpha counts the stage's images before this
        step.
        """
        stage = self.all[self._number(step)]
        seen = (step - stage.first_step) * stage.batch_size
        return (
            stage if seen >= stage.fade_images else stage._replace(alpha=seen / stage.fade_images)
        )

    def images_at(self, step: int) -> int:
        """Training images seen before update number `step`, exactly; `images_at(steps)`: by the
        whole run.
        """
        stage = self.all[self._number(step)]
        return stage.first_image + (step - stage.first_step) * stage.batch_size

    # --- words

    def describe(self) -> list[str]:
        """What the plan says, a row a stage; nothing without growth."""
        if not self.growing:
            return []
        rows = [self._row(number) for number in range(len(self.all))]
        rows.append(f"{self._moments()} from stage to stage (progressive.reset_optimizer)")
        full, last = self.all[-1], self.at(self.steps - 1)
        # the first step at alpha 1
        complete = full.first_step + -(-full.fade_images // full.batch_size)
        if self.steps <= complete:
            rows.append(
                f"warning: the run ends at {last.resolution} px with alpha {last.alpha:.2f}; {full.resolution} px "
                f"at alpha 1 begin at step {complete:,}: raise steps ({self.steps:,}) above that or shorten the stages"
            )
        return rows

    def announcement(self, step: int) -> str:
        """What the log says where update number `step` begins a stage."""
        number = self._number(step)
        return f"stage {number + 1} of {len(self.all)}: {self._row(number)}; {self._moments()}"

    def _moments(self) -> str:
        return f"Adam's moments {'start anew' if self.config.reset_optimizer else 'go on'}"

    def _row(self, number: int) -> str:
        stage, *after = self.all[number:]
        length = (
            f"{after[0].first_image - stage.first_image:,} images"
            if after
            else "until the run ends"
        )
        fading = f", fading in over {stage.fade_images:,} images" if stage.fade_images else ""
        reached = "" if stage.first_step < self.steps else " (the run ends before)"
        begins = (
            f"{stage.resolution} px from step {stage.first_step:,}: batches of {stage.batch_size}"
        )
        return f"{begins}, {length}{fading}{reached}"


def _resolutions(start: int | None, full: int) -> list[int]:
    """The stages' resolutions, doubling from `start` to `full`."""
    if start is None:
        return [full]
    if full == start:
        raise UserError(
            f"progressive.start {start}: the images are not larger, so nothing grows; lower it, or set it to null"
        )
    sides = [start << doublings for doublings in range(max(1, (full // start).bit_length()))]
    if sides[-1] != full:
        raise UserError(
            f"progressive.start {start}: doubling it never gives the images' {full} px; choose a start that does, "
            "or another data.resolution"
        )
    return sides


def _images(name: str, lengths: Kimg, sides: list[int]) -> dict[int, int]:
    """Images by resolution, for the stages that have such a length."""
    lengths = lengths if isinstance(lengths, dict) else dict.fromkeys(sides, lengths)
    _check_named(name, lengths, sides)
    for side in sides:
        if side not in lengths:
            known = ", ".join(map(str, sides))
            raise UserError(
                f"progressive.{name}: no value for {side} px; give one for each of {known}, or one number"
            )
    return {side: round(lengths[side] * 1000) for side in sides}


def _check_named(name: str, given: Iterable[int], sides: list[int]) -> None:
    for side in sorted(set(given) - set(sides)):
        known = ", ".join(map(str, sides)) or "no stage"
        raise UserError(
            f"progressive.{name}: no stage of {side} px takes a value; give values for {known} only"
        )
