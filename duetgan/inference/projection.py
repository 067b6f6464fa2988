"""Projection: find the w, or the w of every layer (w+), whose image is nearest to a given one, and
write both.

The method of StyleGAN2 (1912.04958), section 5 and appendix D; w+ after Image2StyleGAN
(1904.03189). How different two images look is told by an ImageNet ResNet-50's features before
pooling, compared as LPIPS does.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from duetgan.inference.samples import Sampler, with_styles
from duetgan.inference.settings import SPACES, ProjectionConfig, Space
from duetgan.metrics.features.extractors import (
    HOW_TO_GET,
    find_weights,
    load_resnet50,
    needed_weights,
)
from duetgan.metrics.features.precision import device_of, full_float32
from duetgan.models.backbones.base import normalize
from duetgan.models.gan import StyledGenerator
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.images import save_table
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import generator as keyed_generator

SMALLEST, LARGEST = 64, 256  # px that images are scaled up or down to before the network sees them


class ResNetFeatures:
    """The outputs of a ResNet-50's stem and four stages, each position's channels scaled to unit
    length.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric"
    (1801.03924), section 3. Images below 64 px are scaled to 64, those above 256 px to 256; grey is
    repeated to three channels.
    """

    def __init__(self, network: nn.Module) -> None:
        """Args: `network` a torchvision ResNet in evaluation mode whose parameters want no
        gradient.
        """
        from torchvision.models.feature_extraction import create_feature_extractor  # half a second

        self._dtype = network.get_parameter("conv1.weight").dtype
        self._stages = create_feature_extractor(
            network, ["relu", "layer1", "layer2", "layer3", "layer4"]
        )

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Maps [n, c, h, w], fine to coarse, of images [n, 1 or 3, H, W] in [-1, 1];
        differentiable.
        """
        x = resize(images.to(self._dtype), min(max(min(images.shape[2:]), SMALLEST), LARGEST))
        return [unit_length(maps) for maps in self._stages(normalize((x + 1) / 2)).values()]


def unit_length(maps: Tensor, eps: float = 1e-10) -> Tensor:
    """Scale the channels at each position of [n, c, h, w] to length 1; all zeros stay zeros.

    The root is taken of a number above 0: its derivative at 0 is infinite, and ReLUs do leave
    positions all zero.
    """
    return maps * torch.rsqrt(maps.square().sum(dim=1, keepdim=True) + eps)


def feature_distance(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """LPIPS without learned weights [n]: the squared difference, summed over channels and layers,
    mean over positions.

    1801.03924, equation 1 with w_l = 1. For L layers it lies between 0 and 4 L (2 L where no
    feature is negative).
    """
    return torch.stack(
        [(x - y).square().sum(dim=1).mean(dim=(1, 2)) for x, y in zip(a, b, strict=True)]
    ).sum(dim=0)


def resize(images: Tensor, side: int) -> Tensor:
    """Scale images [n, C, H, W] to a shorter side of `side` px: bilinearly up; down by averaging
    too, so that nothing aliases.

    As two matrix products, because the backward pass of torch's own scaling adds up in any order on
    GPUs.
    """
    shorter = min(images.shape[2:])
    if shorter == side:
        return images

    def matrix(before: int) -> Tensor:
        eye = torch.eye(before, dtype=images.dtype, device=images.device)[None, None]
        size = (round(before * side / shorter), before)
        return F.interpolate(eye, size=size, mode="bilinear", align_corners=False, antialias=True)[
            0, 0
        ]

    return matrix(images.shape[2]) @ images @ matrix(images.shape[3]).t()


class Distance:
    """How far images are from one target: feature distance (if there are features) + pixel_weight *
    mean square.
    """

    def __init__(
        self, target: Tensor, *, features: ResNetFeatures | None, pixel_weight: float
    ) -> None:
        """Args: `target` [1, C, H, W] in [-1, 1], on the device that all is computed on."""
        self._target, self._features, self._pixel_weight = target, features, pixel_weight
        with torch.no_grad():
            self._wanted = features(target) if features else []

    def __call__(self, images: Tensor) -> Tensor:
        """[n] for images [n, C, H, H] in [-1, 1]; differentiable."""
        pixels, features = self._pixel_weight * self.pixels(images), self.perceptual(images)
        return pixels if features is None else pixels + features

    def pixels(self, images: Tensor) -> Tensor:
        """The mean squared difference of the pixels [n]; 4 between black and white."""
        return (images - self._target).square().mean(dim=(1, 2, 3))

    def perceptual(self, images: Tensor) -> Tensor | None:
        """The distance of the features [n]; None if there are none."""
        return feature_distance(self._features(images), self._wanted) if self._features else None


def build_features(
    name: str | None, weights: str | Path | None, device: torch.device
) -> ResNetFeatures | None:
    """Features by name; None for `pixels`, and without a name where there are no weights, which
    stderr says. Raises UserError if weights are named and missing, or given where none are read.
    """
    if name is None and not weights and find_weights(None) is None:
        text = f"no ResNet-50 weights found: comparing pixels only, which gives blurred images; for more {HOW_TO_GET}"
        print(text, file=sys.stderr)
        return None
    if name == "pixels":
        if weights:
            raise UserError("--weights is for --features resnet50; leave it out")
        return None
    path = needed_weights(
        weights, "project compares features of an ImageNet ResNet-50", ", or use --features pixels"
    )
    return ResNetFeatures(load_resnet50(path).to(device, memory_format=torch.channels_last))  # type: ignore[call-overload]


WARM_UP, COOL_DOWN = 0.05, 0.25  # shares of the steps in which the learning rate rises and falls
NOISE_END = 0.75  # share of the steps after which w is no longer shaken
# px: larger noise maps are also kept uncorrelated at half their size, a quarter ...
SMALLEST_NOISE = 8

Maps = list[Tensor] | Literal["const", "none"]


@dataclass(frozen=True)
class Projection:
    """What was found."""

    ws: Tensor  # [num_ws, w_dim]; all rows are equal in space "w"
    noise: Maps  # [1, 1, h, w] for each layer where they were searched for
    image: Tensor  # uint8 [C, H, W] on the CPU
    loss: float  # of that image, as the search counts it
    perceptual: float | None  # its feature distance; None without features
    rmse: float  # root mean square of the pixels' differences, 0 to 1

    @property
    def distances(self) -> list[str]:
        features = [] if self.perceptual is None else [f"features {self.perceptual:.3f}"]
        return [*features, f"rmse {self.rmse:.3f}"]


class Projector:
    """Searches for one target. The generator's parameters want no gradient and stay as they are."""

    def __init__(
        self, generator: StyledGenerator, distance: Distance, config: ProjectionConfig, *, seed: int
    ) -> None:
        self.generator, self.distance, self.config, self.seed = generator, distance, config, seed
        self.device = device_of(generator)
        # root of the mean squared distance of a class's w from their mean; set by `start`
        self.spread = 0.0
        self.label: int | None = None  # the class that the search starts from; set by `start`
        # what `find` found in each, behind where it started
        self.spaces: dict[str, Projection] = {}

    def start(self, labels: Sequence[int]) -> Projection:
        """Where the search starts: the mean w of the class among `labels` that looks most like the
        target; without labels `w_avg`.
        """
        noise: Maps
        if self.config.noise_mode == "optimise":
            key, shapes = (
                keyed_generator(self.seed, "project", "noise"),
                self.generator.noise_shapes(),
            )
            noise = [torch.randn(1, *shape, generator=key).to(self.device) for shape in shapes]
        else:
            noise = self.config.noise_mode
        means: list[tuple[Projection, Tensor, int | None]] = []
        kinds: Sequence[int | None] = labels or [None]
        for label in kinds:
            with full_float32(self.device):
                kind = (
                    None
                    if label is None
                    else self.generator.conditions(torch.tensor([label])).to(self.device)
                )
                mean, spread = (
                    self.generator.truncation_centre(kind),
                    self.generator.class_styles(kind)[1],
                )
            means.append((self._result(self._rows(mean), noise), spread, label))
        # the first of equals
        self.first, spread, self.label = min(means, key=lambda entry: entry[0].loss)
        self.spread = float(spread)
        return self.first

    def search(
        self,
        space: Space,
        start: Projection,
        *,
        refine: bool = False,
        tick: Callable[[], object] = lambda: None,
    ) -> Projection:
        """The nearest image found from `start` on, never a farther one; calls `tick` after each
        step.

        StyleGAN2's appendix D: Adam, w shaken by noise that dies out, learning rate warmed up and
        cooled down. With `refine` the start is an earlier search's result, from which w is not
        shaken away. Deterministic for a seed.
        """
        rows = 1 if space == "w" else self.generator.num_ws
        w = start.ws[:rows].clone().requires_grad_()
        maps = (
            []
            if isinstance(start.noise, str)
            else [m.clone().requires_grad_() for m in start.noise]
        )
        optimizer = torch.optim.Adam([w, *maps], lr=self.config.lr, betas=(0.9, 0.999))
        for step in range(self.config.steps):
            done = step / self.config.steps
            optimizer.param_groups[0]["lr"] = self.config.lr * rate(step, self.config.steps)
            shake = (
                0.0
                if refine
                else self.config.shake * self.spread * max(0.0, 1 - done / NOISE_END) ** 2
            )
            key = keyed_generator(self.seed, "project", space, step)
            shaken = w + shake * torch.randn(w.shape, generator=key).to(self.device)
            with full_float32(self.device):
                loss = self.distance(
                    self.generator.synthesis(self._rows(shaken), maps or start.noise)
                ).sum()
                if maps:
                    loss = loss + self.config.noise_weight * correlation(maps)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            normalise_(maps)
            tick()
        last = self._result(self._rows(w.detach()), [m.detach() for m in maps] or start.noise)
        return min(start, last, key=lambda result: result.loss)

    def _rows(self, w: Tensor) -> Tensor:
        """[1, num_ws, w_dim] of one row or of all."""
        return w.expand(self.generator.num_ws, -1)[None]

    def _result(self, ws: Tensor, noise: Maps) -> Projection:
        """The image of styles [1, num_ws, w_dim], and its distances as it will be saved, in uint8."""
        with torch.no_grad(), full_float32(self.device):
            image = self.generator.spec.from_float(self.generator.synthesis(ws, noise))
            seen = image.to(ws.dtype) / 127.5 - 1
            features = self.distance.perceptual(seen)
            perceptual = None if features is None else float(features)
            rmse = math.sqrt(float(self.distance.pixels(seen))) / 2  # of differences in [-2, 2]
            return Projection(
                ws[0].clone(), noise, image[0].cpu(), float(self.distance(seen)), perceptual, rmse
            )


def rate(step: int, steps: int) -> float:
    """The learning rate's factor at a step, 0 to 1: linear warm-up, level, cosine to 0."""
    rise = min(1.0, (step + 1) / (steps * WARM_UP))
    fall = min(1.0, (1 - step / steps) / COOL_DOWN)
    return rise * (0.5 - 0.5 * math.cos(math.pi * fall))


def correlation(maps: Sequence[Tensor]) -> Tensor:
    """How far noise maps [1, 1, h, w] are from white: squared mean products with the pixel to the
    left and above.

    StyleGAN2, appendix D: summed over the maps and over what averaging 2 x 2 pixels makes of them,
    times 2 each time so that white noise keeps its variance, down to 8 px.
    """
    total = maps[0].new_zeros([])
    for level in maps:
        while True:
            for dimension in (2, 3):
                total = total + (level * level.roll(1, dimension)).mean().square()
            if min(level.shape[2:]) <= SMALLEST_NOISE:
                break
            level = 2 * F.avg_pool2d(level, 2)
    return total


@torch.no_grad()
def normalise_(maps: Sequence[Tensor]) -> None:
    """Bring noise maps to mean 0 and mean square 1, in place."""
    for level in maps:
        level.sub_(level.mean())
        level.mul_(level.square().mean().rsqrt())


CELL = 192  # px that smaller images are enlarged to


def find(
    sampler: Sampler,
    target: Tensor,  # uint8 [1, C, H, H]
    config: ProjectionConfig,
    *,
    tick: Callable[[], object] = lambda: None,  # called after each step
) -> Projector:
    """A projector that has searched, from one of the sampler's classes on. Raises UserError for a
    generator without w, and for missing weights.
    """
    generator = with_styles(sampler.generator, "project")
    network = build_features(config.features, config.weights, sampler.device)
    generator.spec.need_plain("a projection")
    if network is None and config.pixel_weight == 0:
        raise UserError(
            "--pixel-weight 0 with --features pixels leaves nothing to compare; leave one of them out"
        )
    wanted = target.to(sampler.device, generator.w_avg.dtype) / 127.5 - 1
    with full_float32(sampler.device):
        distance = Distance(wanted, features=network, pixel_weight=config.pixel_weight)
    projector = Projector(generator, distance, config, seed=sampler.seed)
    before = projector.start(sampler.chosen)
    for name in SPACES[config.space]:
        before = projector.spaces[name] = projector.search(
            name, before, refine=bool(projector.spaces), tick=tick
        )
    return projector


def project(
    sampler: Sampler,
    names: Sequence[str],
    target: Tensor,  # uint8 [1, C, H, H]
    out: Path,
    config: ProjectionConfig,
    *,
    save_to: Path | None = None,  # a .safetensors file for what was found
) -> list[str]:
    """`find`, and a PNG of the target and what was found, with its distances; returns lines that
    say the same.
    """
    with Bar(
        total=config.steps * len(SPACES[config.space]), desc="projecting", unit="step", delay=1
    ) as bar:
        result = find(sampler, target, config, tick=bar.update)
    spaces = result.spaces
    label = "" if result.label is None else names[result.label]
    heads = ["target", *("\n".join([name, *nearest.distances]) for name, nearest in spaces.items())]
    row = [target[0], *(nearest.image for nearest in spaces.values())]
    save_table([row], out, row_heads=[""], column_heads=heads, cell=CELL)
    if save_to is not None:
        write_atomic(
            save_to, _latents(spaces, {"class": label, "seed": sampler.seed, "steps": config.steps})
        )
    where = f"start ({label})" if label else "start"
    return [
        f"{name}: {', '.join(nearest.distances)}"
        for name, nearest in {where: result.first, **spaces}.items()
    ]


def _latents(spaces: dict[str, Projection], about: dict[str, Any]) -> bytes:
    """A safetensors file: `w` [w_dim], `w+` [num_ws, w_dim], the searched noise as
    `NAME.noise.LAYER` [1, 1, h, w].

    Its metadata is one JSON text, `projection`: several entries would come in another order every
    time.
    """
    tensors = {name: result.ws[0] if name == "w" else result.ws for name, result in spaces.items()}
    for name, result in spaces.items():
        if not isinstance(result.noise, str):
            tensors |= {f"{name}.noise.{layer}": level for layer, level in enumerate(result.noise)}
    about = {**about, "rmse": {name: result.rmse for name, result in spaces.items()}}
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return save(plain, metadata={"projection": json.dumps(about)})
