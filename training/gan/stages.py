"""Progressive growing: which resolution, how far faded in, and in which batches at each step (Karras et al. 2018,
"Progressive Growing of GANs", section 2 and appendix A.1).

The first stage trains the start's resolution alone. Every later one doubles it: the new layers fade in with alpha from
0 to 1, linearly in the images seen, and then stabilise. The last stage lasts until the run ends. Everything is a
function of the step number, so there is nothing to save; without growth there is one stage that never changes.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from utils.config.model import Config, NonNegativeFloat, PositiveInt
from utils.errors import UserError

SMALLEST = 8  # px; the first stage's at least
KIMG = 1000  # images

Kimg = NonNegativeFloat | dict[int, NonNegativeFloat]  # thousand images of every stage, or of each by its resolution


class ProgressiveConfig(Config):
    """Growth of both networks from low to full resolution. Lengths are in thousand images that a stage sees."""

    # px of the first stage; null: no growth, the full networks from the first step
    start: Annotated[int, Ge(SMALLEST)] | None = None
    fade_kimg: Kimg = 600.0  # fading in; a number, or {px: number} for every stage but the first
    stable_kimg: Kimg = 600.0  # then at alpha 1; a number, or {px: number} for every stage but the last, which goes on
    # {px: global batch}; stages not named: batch_size
    batch_sizes: dict[int, PositiveInt] = {}
    reset_optimizer: bool = True  # Adam's moments start anew in every stage

    def check(self) -> None:
        if self.start is not None and self.start & (self.start - 1):
            raise UserError(f"start {self.start}: must be a power of two, or null for no growth")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a step trains, and where its stage lies in the run."""

    resolution: int  # px of the images, real and generated
    alpha: float  # in [0, 1]: weight of this resolution's new layers; 0: the networks of the stage before
    batch_size: int  # global
    index: int  # 0: the first stage
    first_step: int  # of the stage
    first_image: int  # images seen before the stage
    fade_images: int  # of the stage, over which alpha grows; 0: it is 1 at once

    def share(self, world_size: int) -> int:
        """Samples of the global batch that each process holds; see `Stages.check_batches`."""
        return self.batch_size // world_size

    def micro(self, world_size: int, micro_batch: int | None) -> int:
        """Samples per forward pass; `micro_batch` as in the run's config."""
        share = self.share(world_size)
        return min(micro_batch or share, share)


class Stages:
    """The run's stages as functions of the step; without the config's start there is one.

    Raises UserError for a resolution that doubling does not lead to, for lengths and batch sizes of stages that do not
    exist, for a length that is missing, and for a stage without images.
    """

    def __init__(
        self,
        config: ProgressiveConfig,
        resolution: int,  # px of the full networks
        steps: int,  # of the run
        batch_size: int,  # global, of stages without one of their own
    ) -> None:
        self.config, self.steps = config, steps
        sides = self.resolutions = _resolutions(config.start, resolution)
        sizes = config.batch_sizes if self.growing else {}
        _check_named("batch_sizes", sizes, sides)
        fades = _images("fade_kimg", config.fade_kimg, sides[1:])
        stables = _images("stable_kimg", config.stable_kimg, sides[:-1])
        self._stages: list[Stage] = []  # each ends with the first whole batch that completes its images
        step = image = 0
        for index, side in enumerate(sides):
            size, fade = sizes.get(side, batch_size), fades.get(side, 0)
            places = {"index": index, "first_step": step, "first_image": image, "fade_images": fade}
            self._stages.append(Stage(resolution=side, alpha=1.0, batch_size=size, **places))
            length = -(-(fade + stables.get(side, 0)) // size)  # steps
            if not length and side != sides[-1]:
                raise UserError(
                    f"progressive: the stage of {side} px sees no images; give it some with progressive.stable_kimg"
                )
            step, image = step + length, image + length * size

    @property
    def growing(self) -> bool:
        """Whether there is more than one stage."""
        return len(self.resolutions) > 1

    def _stage(self, step: int) -> Stage:
        """The stage of a step, at alpha 1."""
        if step < 0:
            raise ValueError(f"step {step}")
        return self._stages[bisect_right(self._stages, step, key=lambda stage: stage.first_step) - 1]

    # --- functions of the step

    def at(self, step: int) -> Stage:
        """What update number `step` (from 0) trains. Alpha counts the stage's images before this step."""
        stage = self._stage(step)
        seen = (step - stage.first_step) * stage.batch_size
        return stage if seen >= stage.fade_images else dataclasses.replace(stage, alpha=seen / stage.fade_images)

    def images_at(self, step: int) -> int:
        """Training images seen before update number `step`, exactly; `images_at(steps)`: by the whole run."""
        stage = self._stage(step)
        return stage.first_image + (step - stage.first_step) * stage.batch_size

    def starts_at(self, step: int) -> bool:
        """Whether update number `step` is the first with layers that were not trained before; False at step 0."""
        return step == self._stage(step).first_step > 0

    def spans(self) -> list[tuple[int, int, int]]:
        """(first step, resolution, global batch size) of every stage, reached or not: what the loader follows."""
        return [(stage.first_step, stage.resolution, stage.batch_size) for stage in self._stages]

    @property
    def total_steps(self) -> int:
        """The first step at the full resolution with alpha 1: a run needs more steps than this number."""
        last = self._stages[-1]
        return last.first_step + -(-last.fade_images // last.batch_size)

    # --- checks and words

    def check_batches(
        self,
        world_size: int,
        *,
        micro_batch: int | None,
        per_pass: Mapping[str, int],  # key of the config -> of what a forward pass holds a multiple
        per_process: Mapping[str, int],  # key of the config -> of what a process holds a multiple
    ) -> None:
        """Raise UserError, naming the stage, unless every stage's batch can be shared out, split and grouped."""
        for stage in self._stages:
            name, share, micro = self._batch_text(stage), stage.share(world_size), stage.micro(world_size, micro_batch)
            shared = f"{name} cannot be shared by {world_size} processes; make it a multiple of {world_size}"
            split = f"micro_batch {micro} does not divide the {share} samples a process holds ({name})"
            checks = [(stage.batch_size, world_size, shared), (share, micro, f"{split}; make it a divisor of {share}")]
            for key, multiple in per_process.items():
                held = f"{key}: a process must hold a multiple of {multiple} samples, but holds {share} ({name})"
                checks.append((share, multiple, f"{held}; make it a multiple of {multiple * world_size}"))
            for key, multiple in per_pass.items():
                grouped = f"{key} {multiple} does not divide the {micro} samples of a forward pass ({name})"
                remedy = f"make the batch size / processes or micro_batch a multiple of {multiple}"
                checks.append((micro, multiple, f"{grouped}; {remedy}"))
            for size, divisor, message in checks:
                if size % divisor:
                    raise UserError(message)

    def _batch_text(self, stage: Stage) -> str:
        """A stage's batch size with the key that sets it."""
        if not self.growing:
            return f"batch_size {stage.batch_size}"
        if stage.resolution in self.config.batch_sizes:
            return f"progressive.batch_sizes {stage.resolution}: {stage.batch_size}"
        return f"batch_size {stage.batch_size} of the stage of {stage.resolution} px"

    def describe(self) -> list[str]:
        """What the plan says, a row a stage; nothing without growth."""
        if not self.growing:
            return []
        rows = [*map(self._row, self._stages), f"{self._moments()} from stage to stage (progressive.reset_optimizer)"]
        if self.steps <= self.total_steps:
            last = self.at(self.steps - 1)
            rows.append(
                f"warning: the run ends at {last.resolution} px with alpha {last.alpha:.2f}; {self.resolutions[-1]} px "
                f"at alpha 1 begin at step {self.total_steps:,}: raise steps ({self.steps:,}) above that or shorten "
                "the stages"
            )
        return rows

    def announcement(self, step: int) -> str:
        """What the log says where update number `step` begins a stage."""
        stage = self._stage(step)
        return f"stage {stage.index + 1} of {len(self._stages)}: {self._row(stage)}; {self._moments()}"

    def _moments(self) -> str:
        return f"Adam's moments {'start anew' if self.config.reset_optimizer else 'go on'}"

    def _row(self, stage: Stage) -> str:
        after = self._stages[stage.index + 1 :]
        length = f"{after[0].first_image - stage.first_image:,} images" if after else "until the run ends"
        fading = f", fading in over {stage.fade_images:,} images" if stage.fade_images else ""
        reached = "" if stage.first_step < self.steps else " (the run ends before)"
        begins = f"{stage.resolution} px from step {stage.first_step:,}: batches of {stage.batch_size}"
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
    for side in sorted(set(sides) - set(lengths)):
        known = ", ".join(map(str, sides))
        raise UserError(f"progressive.{name}: no value for {side} px; give one for each of {known}, or one number")
    return {side: round(lengths[side] * KIMG) for side in sides}


def _check_named(name: str, given: Iterable[int], sides: list[int]) -> None:
    """Raise UserError for a resolution that is none of `sides`."""
    for side in sorted(set(given) - set(sides)):
        known = ", ".join(map(str, sides)) or "no stage"
        raise UserError(f"progressive.{name}: no stage of {side} px takes a value; give values for {known} only")
