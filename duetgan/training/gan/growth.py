"""Progressive growing: resolution, weight of the new layers and batch size at each step.

Source: Karras et al. 2018, "Progressive Growing of GANs" (section 2 and appendix A.1). The first
stage trains at the resolution `start`, and each later stage at twice the resolution of the one
before. A later stage first fades in its new layers: their weight alpha grows from 0 to 1, linearly
in the images seen. Then it trains with alpha 1. The last stage lasts until the run ends. Without
growth there is one stage. Everything is a function of the step, so there is no state.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from duetgan.models.growing import Alpha, StageGenerator
from duetgan.models.layers import upsample_fir
from duetgan.training.optim.updater import Updater
from duetgan.utils.config.model import Config, NonNegativeFloat, PositiveInt
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_log import say_main

SMALLEST = 8  # smallest resolution of a first stage, in px

# thousand images, the same for every stage or by resolution in px
Kimg = NonNegativeFloat | dict[int, NonNegativeFloat]


class ProgressiveConfig(Config):
    """Growth of both networks from low to full resolution, in stages.

    Lengths are in thousand images that are seen in a stage.
    """

    # resolution of the first stage in px; null: no growth, the full networks from the first step
    start: Annotated[int, Ge(SMALLEST)] | None = None
    # length of fading in new layers; a number, or {px: number} for every stage but the first
    fade_kimg: Kimg = 600.0
    # length of training after fading in; a number, or {px: number} for every stage but the last
    stable_kimg: Kimg = 600.0
    # global batch size by stage: {px: size}; other stages have batch_size
    batch_sizes: dict[int, PositiveInt] = {}
    reset_optimizer: bool = True  # reset Adam's moments at the start of every stage

    def check(self) -> None:
        if self.start is not None and self.start & (self.start - 1):
            raise UserError(f"start {self.start}: must be a power of two, or null for no growth")


class Stage(NamedTuple):
    """A stage of progressive growing, with the value of alpha at a step."""

    resolution: int  # px of the images, real and generated
    batch_size: int  # global batch size
    first_step: int
    first_image: int  # images seen before the stage
    fade_images: int  # images over which alpha grows from 0 to 1; 0: alpha is always 1
    # Weight of the new layers, 0 to 1. With 0 the networks equal those of the previous stage.
    alpha: float = 1.0


class Stages:
    """The stages of progressive growing in a run, as functions of the step.

    Without growth there is a single stage. Raises UserError if doubling `start` never gives
    `resolution`, if the config has lengths or batch sizes of stages that do not exist, if a length
    is missing, or if a stage has no images.
    """

    def __init__(
        self,
        config: ProgressiveConfig,
        resolution: int,  # px of the full networks
        steps: int,  # of the run
        batch_size: int,  # global, of stages that are not in config.batch_sizes
    ) -> None:
        self.config = config
        self.steps = steps
        sides = _resolutions(config.start, resolution)
        self.growing = len(sides) > 1
        sizes = config.batch_sizes if self.growing else {}
        _check_named("batch_sizes", sizes, sides)
        fades = _images("fade_kimg", config.fade_kimg, sides[1:])
        stables = _images("stable_kimg", config.stable_kimg, sides[:-1])
        # All stages, with alpha 1. Each ends with the batch that completes its number of images.
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
        """Return the stage of update number `step` (from 0), with the alpha of this update."""
        stage = self.all[self._number(step)]
        seen = (step - stage.first_step) * stage.batch_size
        if seen < stage.fade_images:
            return stage._replace(alpha=seen / stage.fade_images)
        return stage

    def images_at(self, step: int) -> int:
        """Return the number of training images before update number `step`."""
        stage = self.all[self._number(step)]
        return stage.first_image + (step - stage.first_step) * stage.batch_size

    def steps_of(self, images: int) -> int:
        """Return the number of steps that see about `images` training images, at least 1."""
        number = bisect_right(self.all, images, key=lambda stage: stage.first_image) - 1
        stage = self.all[number]
        return max(1, stage.first_step + round((images - stage.first_image) / stage.batch_size))

    def describe(self) -> list[str]:
        """Return lines for the printed plan, one for each stage; an empty list without growth.

        If the run ends before it reaches full resolution with alpha 1, a warning is added.
        """
        if not self.growing:
            return []
        rows = [self.row(stage) for stage in self.all]
        full, last = self.all[-1], self.at(self.steps - 1)
        # the first step with alpha 1
        complete = full.first_step + -(-full.fade_images // full.batch_size)
        if self.steps <= complete:
            rows.append(
                f"warning: the run ends at {last.resolution} px with alpha {last.alpha:.2f}; {full.resolution} px "
                f"at alpha 1 begin at step {complete:,}: raise steps ({self.steps:,}) above that or shorten the stages"
            )
        return rows

    def row(self, stage: Stage) -> str:
        """Return the line of the printed plan that describes a stage."""
        moments = "start anew" if self.config.reset_optimizer else "go on"
        return (
            f"{stage.resolution} px from step {stage.first_step:,}: batches of {stage.batch_size}, "
            f"fading in over {stage.fade_images:,} images; Adam's moments {moments}"
        )


def _resolutions(start: int | None, full: int) -> list[int]:
    """Return the resolutions of the stages in px: `start`, doubled until it is `full`.

    If `start` is None, only `full` is returned. Raises UserError if doubling never gives `full`.
    """
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
    """Return a dict from resolution to number of images, for the stages of the resolutions `sides`.

    `lengths` is the value of the config key `name`, in thousand images. Raises UserError if it
    lacks one of the stages or names another one.
    """
    if not isinstance(lengths, dict):
        lengths = dict.fromkeys(sides, lengths)
    _check_named(name, lengths, sides)
    if missing := sorted(set(sides) - set(lengths)):
        raise UserError(
            f"progressive.{name}: no value for {missing[0]} px; give one, or one number"
        )
    return {side: round(lengths[side] * 1000) for side in sides}


def _check_named(name: str, names: Iterable[int], sides: list[int]) -> None:
    if unknown := sorted(set(names) - set(sides)):
        raise UserError(
            f"progressive.{name}: no stage of {unknown[0]} px takes a value; give values for {sides} only"
        )


class Growth:
    """The growing networks of a run, and the methods that move them from stage to stage."""

    def __init__(
        self,
        stages: Stages,
        # a GrowingGenerator, its moving average, and a GrowingDiscriminator
        networks: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.networks = networks
        self.average = StageGenerator(networks[1])
        # Python numbers would be frozen in compiled networks and in CUDA graphs.
        self._tensor = torch.ones((), device=device)
        self.alpha: Alpha = 1.0  # of the stage: a number or `_tensor`
        self.stage = stages.at(0)

    @property
    def is_complete(self) -> bool:
        """True if the networks are at their full resolution with alpha 1."""
        return self.stage == self.stages.all[-1]

    def enter(self, stage: Stage) -> None:
        """Change the networks to the resolution and the alpha of `stage`."""
        self.stage = stage
        self.alpha = stage.alpha
        if stage.alpha < 1:
            self.alpha = self._tensor.fill_(stage.alpha)
        for network in self.networks:
            network.enter(stage.resolution, self.alpha)

    def begin(self, step: int, updaters: Iterable[Updater]) -> None:
        """Enter the stage of update number `step`.

        At the first step of a later stage, also print the stage and, if configured, reset the
        optimizers.
        """
        self.enter(self.stages.at(step))
        if step == self.stage.first_step > 0:
            say_main(self.stages.row(self.stage))
            if self.stages.config.reset_optimizer:
                for updater in updaters:
                    updater.reset()

    def fade_in(self, images: Tensor) -> Tensor:
        """Blend real images with their half-resolution version, with the weight alpha of the stage.

        The generator blends its samples in the same way. Source: 1710.10196, appendix A.1.
        """
        assert min(images.shape[2:]) == self.stage.resolution
        if self.stage.alpha == 1:
            return images
        return upsample_fir(F.avg_pool2d(images, 2)).lerp(images, self.alpha)
