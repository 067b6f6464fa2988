"""Projection: find the w, or the w of every layer (w+), whose image is nearest to a target image.

The method is that of StyleGAN2 (1912.04958), section 5 and appendix D; w+ follows Image2StyleGAN
(1904.03189). The perceptual distance is computed as in LPIPS, but from the features of an ImageNet
ResNet-50.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.inference.latents import Latents, Maps, write_latents
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
from duetgan.utils.images import save_table
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import generator as keyed_generator

EPSILON = 1e-10  # in the root of a squared length
SMALLEST, LARGEST = 64, 256  # px; images with a shorter side outside this range are scaled


class ResNetFeatures:
    """Function that computes feature maps of images: the outputs of a ResNet-50's stem and stages.

    The channels at each position of a map are scaled to unit length (Zhang et al., "The
    Unreasonable Effectiveness of Deep Features as a Perceptual Metric", 1801.03924, section 3).
    Images with a shorter side below 64 px are scaled to 64 px, those above 256 px to 256 px. Grey
    is repeated to three channels.
    """

    def __init__(self, network: nn.Module) -> None:
        """Wrap a torchvision ResNet in evaluation mode whose parameters require no gradients."""
        # Imported here, because the import takes half a second.
        from torchvision.models.feature_extraction import create_feature_extractor

        self._dtype = network.get_parameter("conv1.weight").dtype
        self._stages = create_feature_extractor(
            network, ["relu", "layer1", "layer2", "layer3", "layer4"]
        )

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Return the feature maps [n, c, h, w], fine to coarse, of images [n, 1 or 3, H, W].

        The images are in [-1, 1]. The computation is differentiable.
        """
        x = resize(images.to(self._dtype), min(max(min(images.shape[2:]), SMALLEST), LARGEST))
        return [unit_length(maps) for maps in self._stages(normalize((x + 1) / 2)).values()]


def unit_length(maps: Tensor) -> Tensor:
    """Scale the vector of channels at each position of [n, c, h, w] to length 1.

    Vectors of zeros stay zero. EPSILON avoids the root's infinite derivative at these positions.
    """
    return maps * torch.rsqrt(maps.square().sum(dim=1, keepdim=True) + EPSILON)


def feature_distance(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return the LPIPS distance [n] of two lists of feature maps, without learned weights.

    It is the squared difference, summed over channels and layers and averaged over positions
    (1801.03924, equation 1 with w_l = 1). For L layers with channels of unit length it is between 0
    and 4 L (2 L if no feature is negative).
    """
    layers = [(x - y).square().sum(dim=1).mean(dim=(1, 2)) for x, y in zip(a, b, strict=True)]
    return torch.stack(layers).sum(dim=0)


def resize(images: Tensor, side: int) -> Tensor:
    """Scale images [n, C, H, W] to a shorter side of `side` px, bilinearly with antialiasing.

    The scaling is two matrix products, because the backward pass of torch's interpolation is not
    deterministic on GPUs.
    """
    shorter = min(images.shape[2:])
    if shorter == side:
        return images

    def matrix(length: int) -> Tensor:
        eye = torch.eye(length, dtype=images.dtype, device=images.device)[None, None]
        size = (round(length * side / shorter), length)
        scaled = F.interpolate(eye, size=size, mode="bilinear", align_corners=False, antialias=True)
        return scaled[0, 0]

    return matrix(images.shape[2]) @ images @ matrix(images.shape[3]).t()


class Distance:
    """Function that computes the distance of images from a target image.

    The distance is `pixel_weight` times the mean squared difference of the pixels, plus the feature
    distance if there are `features`.
    """

    def __init__(
        self, target: Tensor, *, features: ResNetFeatures | None, pixel_weight: float
    ) -> None:
        """Set the target [1, C, H, W] in [-1, 1], on the device of the computation."""
        self._target = target
        self._features = features
        self._pixel_weight = pixel_weight
        with torch.no_grad():
            self._target_features = features(target) if features else []

    def __call__(self, images: Tensor) -> Tensor:
        """Return the distance [n] of images [n, C, H, W] in [-1, 1]; differentiable."""
        pixels, features = self._pixel_weight * self.pixels(images), self.perceptual(images)
        return pixels if features is None else pixels + features

    def pixels(self, images: Tensor) -> Tensor:
        """Return the mean squared difference of the pixels [n]; 4 between black and white."""
        return (images - self._target).square().mean(dim=(1, 2, 3))

    def perceptual(self, images: Tensor) -> Tensor | None:
        """Return the feature distance [n] of images to the target; None without features."""
        if self._features is None:
            return None
        return feature_distance(self._features(images), self._target_features)


def build_features(
    name: str | None, weights: str | Path | None, device: torch.device
) -> ResNetFeatures | None:
    """Return the feature extractor that `name` selects, or None to compare only pixels.

    `name` is "resnet50", "pixels" or None. None selects ResNet-50 if its weights are found; if they
    are not, a message on stderr says that only pixels are compared. Raises UserError if requested
    weights are missing, and if `weights` are given for "pixels".
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


WARM_UP, COOL_DOWN = 0.05, 0.25  # fractions of the steps in which the learning rate rises and falls
NOISE_END = 0.75  # fraction of the steps after which no noise is added to w
# px; the penalty on noise maps counts correlations also at 1/2, 1/4, ... size, down to this
SMALLEST_NOISE = 8


@dataclass(frozen=True, kw_only=True)
class Projection(Latents):
    """The latents that a search found, their image, and its distances from the target.

    All rows of `ws` are equal in space "w".
    """

    image: Tensor  # uint8 [C, H, W] on the CPU
    loss: float  # the `Distance` of that image
    perceptual: float | None  # feature distance of that image; None if only pixels are compared
    rmse: float  # root mean square of the pixels' differences, 0 to 1

    @property
    def distances(self) -> list[str]:
        """The distances as text, e.g. `features 0.123` and `rmse 0.045`."""
        features = [] if self.perceptual is None else [f"features {self.perceptual:.3f}"]
        return [*features, f"rmse {self.rmse:.3f}"]


class Projector:
    """Object that runs the searches for one target image and holds their results.

    The generator's parameters must not require gradients.
    """

    def __init__(
        self, generator: StyledGenerator, distance: Distance, config: ProjectionConfig, *, seed: int
    ) -> None:
        self.generator = generator
        self.distance = distance
        self.config = config
        self.seed = seed
        self.device = device_of(generator)
        # root of the mean squared distance of a class's w from their mean; set by `start`
        self.spread = 0.0
        self.label: int | None = None  # the class that the search starts from; set by `start`
        # space -> the result of its search, set by `find`; `self.first` is the start
        self.spaces: dict[str, Projection] = {}

    def start(self, labels: Sequence[int]) -> Projection:
        """Choose and return the start of the search; also set `first`, `spread` and `label`.

        The candidates are the mean w of each class in `labels`. The start is the candidate whose
        image is nearest to the target. If `labels` is empty, the start is `w_avg`.
        """
        noise: Maps
        if self.config.noise_mode == "optimise":
            key = keyed_generator(self.seed, "project", "noise")
            shapes = self.generator.noise_shapes()
            noise = [torch.randn(1, *shape, generator=key).to(self.device) for shape in shapes]
        else:
            noise = self.config.noise_mode
        means: list[tuple[Projection, Tensor]] = []
        candidates: Sequence[int | None] = labels or [None]
        for label in candidates:
            condition = None
            with full_float32(self.device):
                if label is not None:
                    condition = self.generator.conditions(torch.tensor([label])).to(self.device)
                mean = self.generator.truncation_centre(condition, "class")
                spread = self.generator.class_styles(condition)[1]
            result = replace(self._result(self._rows(mean), noise), label=label)
            means.append((result, spread))
        self.first, spread = min(means, key=lambda entry: entry[0].loss)
        self.label = self.first.label
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
        """Optimise w in `space` from `start`; return the result, or `start` if its image is nearer.

        The method is that of StyleGAN2's appendix D: Adam, with a learning rate that warms up and
        cools down, and with noise on w that decays. If `refine` is True, `start` is the result of
        an earlier search, and no noise is added to w. The search is deterministic for a seed.
        `tick` is called after each step.
        """
        rows = 1 if space == "w" else self.generator.num_ws
        w = start.ws[:rows].clone().requires_grad_()
        maps: list[Tensor] = []
        if not isinstance(start.noise, str):
            maps = [noise_map.clone().requires_grad_() for noise_map in start.noise]
        optimizer = torch.optim.Adam([w, *maps], lr=self.config.lr, betas=(0.9, 0.999))
        amplitude = 0.0 if refine else self.config.shake * self.spread
        for step in range(self.config.steps):
            optimizer.param_groups[0]["lr"] = self.config.lr * rate(step, self.config.steps)
            fraction = step / self.config.steps
            shake = amplitude * max(0.0, 1 - fraction / NOISE_END) ** 2
            key = keyed_generator(self.seed, "project", space, step)
            shaken = w + shake * torch.randn(w.shape, generator=key).to(self.device)
            with full_float32(self.device):
                images = self.generator.synthesis(self._rows(shaken), maps or start.noise)
                loss = self.distance(images).sum()
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
        """Expand w [1 or num_ws, w_dim] to styles for all layers, [1, num_ws, w_dim]."""
        return w.expand(self.generator.num_ws, -1)[None]

    def _result(self, ws: Tensor, noise: Maps) -> Projection:
        """Generate the image of styles [1, num_ws, w_dim], and return it with its distances.

        The image is rounded to uint8 before its distances from the target are computed.
        """
        with torch.no_grad(), full_float32(self.device):
            image = self.generator.spec.from_float(self.generator.synthesis(ws, noise))
            rounded = image.to(ws.dtype) / 127.5 - 1
            features = self.distance.perceptual(rounded)
            return Projection(
                ws=ws[0].clone(),
                noise=noise,
                label=self.label,
                image=image[0].cpu(),
                loss=float(self.distance(rounded)),
                perceptual=None if features is None else float(features),
                # half, because the differences lie in [-2, 2]
                rmse=math.sqrt(float(self.distance.pixels(rounded))) / 2,
            )


def rate(step: int, steps: int) -> float:
    """Return the factor, 0 to 1, by which the learning rate is multiplied at a step.

    Over the `steps`, it rises linearly, stays at 1, and falls towards 0 along a cosine.
    """
    rise = min(1.0, (step + 1) / (steps * WARM_UP))
    fall = min(1.0, (1 - step / steps) / COOL_DOWN)
    return rise * (0.5 - 0.5 * math.cos(math.pi * fall))


def correlation(maps: Sequence[Tensor]) -> Tensor:
    """Return a penalty on the correlation of neighbouring pixels in noise maps [1, 1, h, w].

    For each map, there are two terms: the squared mean product of each pixel with its left
    neighbour, and the squared mean product with the neighbour above. The penalty is the sum of the
    terms over the maps and their downscaled copies, down to 8 px (StyleGAN2, appendix D). A
    downscaled copy is twice the mean of 2 x 2 pixels, so that white noise keeps its variance.
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
    """Scale noise maps in place to mean 0 and mean square 1."""
    for level in maps:
        level.sub_(level.mean())
        level.mul_(level.square().mean().rsqrt())


CELL = 192  # px; smaller images are enlarged to about this size


def find(
    sampler: Sampler,
    target: Tensor,  # uint8 [1, C, H, W]
    config: ProjectionConfig,
    *,
    tick: Callable[[], object] = lambda: None,  # called after each step
) -> Projector:
    """Search the spaces of `config` for latents whose image is near to the target.

    The search starts from the mean w of one of the sampler's classes. Returns the projector, which
    holds the results. Raises UserError for a generator without w, for one whose images are not
    8-bit grey or RGB, and for missing weights.
    """
    generator = with_styles(sampler.generator, "project")
    network = build_features(config.features, config.weights, sampler.device)
    generator.spec.need_plain("a projection")
    pixels = target.to(sampler.device, generator.w_avg.dtype) / 127.5 - 1
    with full_float32(sampler.device):
        distance = Distance(pixels, features=network, pixel_weight=config.pixel_weight)
    projector = Projector(generator, distance, config, seed=sampler.seed)
    nearest = projector.start(sampler.chosen)
    for space in SPACES[config.space]:
        refine = bool(projector.spaces)
        nearest = projector.search(space, nearest, refine=refine, tick=tick)
        projector.spaces[space] = nearest
    return projector


def project(
    sampler: Sampler,
    names: Sequence[str],
    target: Tensor,  # uint8 [1, C, H, W]
    out: Path,
    config: ProjectionConfig,
    *,
    save_to: Path | None = None,  # .safetensors file to which w and noise are saved
) -> list[str]:
    """Find the latents of an image, and write a PNG with the image and the results.

    Returns lines of text about the distances from the image: one line for the start of the search,
    and one for the result in each space, w or w+. `names[i]` is the class name of label i. `out` is
    the PNG file.
    """
    steps = config.steps * len(SPACES[config.space])
    with Bar(total=steps, desc="projecting", unit="step", delay=1) as bar:
        projector = find(sampler, target, config, tick=bar.update)
    label = "" if projector.label is None else names[projector.label]
    start = f"start ({label})" if label else "start"
    lines = [f"{start}: {', '.join(projector.first.distances)}"]
    heads, row = ["target"], [target[0]]
    for space, result in projector.spaces.items():
        lines.append(f"{space}: {', '.join(result.distances)}")
        heads.append("\n".join([space, *result.distances]))
        row.append(result.image)
    save_table([row], out, row_heads=[""], column_heads=heads, cell=CELL)
    if save_to is not None:
        metadata: dict[str, object] = {
            "class": label,
            "noise": config.noise_mode,
            "seed": sampler.seed,
            "steps": config.steps,
            "rmse": {space: result.rmse for space, result in projector.spaces.items()},
        }
        write_latents(save_to, projector.spaces, projector.generator, metadata)
    return lines
