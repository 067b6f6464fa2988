"""R3GAN's generator and discriminator (Huang et al., 2501.05441).

They are residual networks without styles, noise or normalisation. Each resolution has residual
blocks of grouped convolutions. Up to `full_width_up_to` px, width and cardinality are those of the
configuration; above it, both halve with every doubling of the resolution.
"""

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from duetgan.models.gan import ImageDiscriminator, PlainGenerator, floor_to_two, run, sizes_up_to
from duetgan.models.layers import (
    LEAKY_SLOPE,
    activated_convolution,
    compute_dtype,
    downsample_fir,
    upsample_fir,
)
from duetgan.models.layers.convolution import Geometry, convolve
from duetgan.utils.config.model import Config, PositiveInt
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec

LEAKY_GAIN = math.sqrt(2 / (1 + LEAKY_SLOPE**2))  # keeps the variance through a leaky ReLU


class R3Config(Config):
    """Options of both networks; raises UserError for sizes that do not fit together."""

    section: ClassVar[str]

    width: PositiveInt = 768  # channels up to full_width_up_to px
    cardinality: PositiveInt = 96  # groups of the 3x3 convolutions up to full_width_up_to px
    # px; above it width and cardinality halve with every doubling (the paper's ImageNet-64: 64)
    full_width_up_to: PositiveInt = 32
    blocks: Annotated[int, Interval(ge=1, le=100)] = 2  # residual blocks per resolution
    expansion: PositiveInt = 2  # channels inside a block / channels outside
    # recompute activations in the backward pass: less memory, more time
    activation_checkpointing: bool = False

    def check(self) -> None:
        inside = self.width * self.expansion
        if inside % self.cardinality:
            raise UserError(
                f"cardinality {self.cardinality} does not divide the {inside} channels inside a block "
                f"(width x expansion); make it a divisor of {inside}"
            )

    def sizes(self, resolution: int | str) -> list[tuple[int, int, int]]:
        """Return (shorter side in px, width, cardinality) of each stage, the smallest first.

        Raises UserError for a resolution that `sizes_up_to` refuses, and for a width or cardinality
        that cannot be halved often enough.
        """
        full = self.full_width_up_to
        divisors = {size: max(1, floor_to_two(size) // full) for size in sizes_up_to(resolution)}
        largest = max(divisors.values())
        for name in ("width", "cardinality"):
            if getattr(self, name) % largest:
                raise UserError(
                    f"{self.section}.{name} {getattr(self, name)} is halved with every doubling "
                    f"above {full} px; make it a multiple of {largest} for {resolution} px"
                )
        return [
            (size, self.width // divisor, self.cardinality // divisor)
            for size, divisor in divisors.items()
        ]


class R3GeneratorConfig(R3Config):
    """Options of R3GAN's generator."""

    section = "generator"

    z_dim: PositiveInt = 64  # dimensions of the latent z
    # dimensions of the label's embedding, which a conditional generator appends to z
    embed_dim: PositiveInt = 64


class R3DiscriminatorConfig(R3Config):
    """Options of R3GAN's discriminator."""

    section = "discriminator"
    group: ClassVar[int] = 1  # no layer uses statistics of the batch

    # dimensions of the label's embedding in a conditional discriminator; null: width
    embed_dim: PositiveInt | None = None


_ADAM = {
    "lr": 2e-4,
    "betas": [0.0, 0.9],
    "beta2_final": 0.99,
    "schedule": "cosine",
    "final_lr": 0.25,
}
RECIPE = {  # defaults of the training config
    "loss": {"objective": "relativistic", "r2_gamma": 1.0, "r1_interval": 1, "style_mixing": 0.0},
    "generator_optimizer": _ADAM,
    "discriminator_optimizer": _ADAM,
}


def _initialised(*shape: int, fan_in: int, gain: float) -> nn.Parameter:
    """Return a parameter drawn from N(0, gain^2 / fan_in); zeros for gain 0."""
    return nn.Parameter(
        torch.randn(shape) * (gain / math.sqrt(fan_in)) if gain else torch.zeros(shape)
    )


class Convolution(nn.Module):
    """Convolution in autocast's precision, [N, in_channels, H, W] -> [N, out_channels, H, W].

    If `activation` is True, a bias and a leaky ReLU follow; otherwise there is neither. The weight
    starts as N(0, gain^2 / fan_in).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        groups: int = 1,
        gain: float = 1.0,
        activation: bool = False,
    ) -> None:
        super().__init__()
        fan_in = in_channels // groups * size**2
        self.weight = _initialised(
            out_channels, in_channels // groups, size, size, fan_in=fan_in, gain=gain
        )
        self.bias = nn.Parameter(torch.zeros(out_channels)) if activation else None
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        geometry = Geometry(padding=self.weight.shape[-1] // 2, groups=self.groups)
        x = x.to(dtype)
        weight = self.weight.to(dtype)
        if bias is None:
            return convolve(x, weight, None, geometry)
        return activated_convolution(x, weight, bias, geometry)


class Linear(nn.Module):
    """Fully connected layer without bias, [N, in_features] -> [N, out_features].

    The weight starts as N(0, gain^2 / fan_in).
    """

    def __init__(self, in_features: int, out_features: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = _initialised(out_features, in_features, fan_in=in_features, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(nn.Module):
    """Residual block of three convolutions: x + 1x1(grouped 3x3(1x1(x))).

    A bias and a leaky ReLU follow the first two convolutions. The weight of the last one starts as
    0, so the block starts as the identity.
    """

    def __init__(self, width: int, inside: int, cardinality: int, *, gain: float) -> None:
        super().__init__()
        self.expand = Convolution(width, inside, 1, gain=gain, activation=True)
        self.group = Convolution(inside, inside, 3, groups=cardinality, gain=gain, activation=True)
        self.reduce = Convolution(inside, width, 1, gain=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.reduce(self.group(self.expand(x)))


class Stage(nn.Module):
    """The resampling from the previous resolution, and the residual blocks of one resolution.

    `resample` is "up", "down", or None for the first stage. If the width changes, a 1x1 convolution
    changes it before the upsampling or after the downsampling.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        blocks: Iterable[nn.Module],
        resample: Literal["up", "down"] | None,
    ) -> None:
        super().__init__()
        self.resample = resample
        self.change = Convolution(in_channels, width, 1) if in_channels != width else None
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        if self.resample == "down":
            x = downsample_fir(x)
        if self.change is not None:
            x = self.change(x)
        if self.resample == "up":
            x = upsample_fir(x)
        return self.blocks(x)


class _Stages(nn.ModuleList):
    """The stages of a network, in the order in which they are called.

    The `direction` is "up" from the smallest resolution or "down" from the largest.

    In a network of L blocks, the first two convolutions of each block start with the gain
    sqrt(2/1.04) L^(-1/4) (section 3.4 of the paper, after Fixup, 1901.09321: L^(-1 / (2m - 2)) for
    branches of m = 3 layers).
    """

    def __init__(
        self, config: R3Config, resolution: int | str, direction: Literal["up", "down"]
    ) -> None:
        sizes = config.sizes(resolution)[:: 1 if direction == "up" else -1]
        gain = LEAKY_GAIN * (len(sizes) * config.blocks) ** -0.25
        stages: list[Stage] = []
        previous = sizes[0][1]  # width of the previous stage
        for _, width, cardinality in sizes:
            blocks = [
                Block(width, width * config.expansion, cardinality, gain=gain)
                for _ in range(config.blocks)
            ]
            stages.append(Stage(previous, width, blocks, direction if stages else None))
            previous = width
        super().__init__(stages)
        self.recompute = config.activation_checkpointing
        self.first, self.last = sizes[0][1], sizes[-1][1]  # widths
        # height and width of the smallest maps
        self.smallest = ImageSpec.of(1, resolution).at(min(sizes)[0]).size

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        for stage in self:
            x = run(stage, x, recompute=self.recompute)
        return x


class R3Generator(PlainGenerator):
    """R3GAN's generator: learned maps (the basis), then the stages from the smallest resolution up.

    A linear function of z, or of z and the label's embedding, scales each channel of the basis. The
    first and the last layer run without autocast.
    """

    title = "R3GAN"

    def __init__(
        self, config: R3GeneratorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.set_shape(resolution, channels, classes)
        self.z_dim = config.z_dim
        stages = _Stages(config, resolution, "up")
        self.embed = Linear(classes, config.embed_dim) if classes else None
        self.linear = Linear(config.z_dim + (config.embed_dim if classes else 0), stages.first)
        self.basis = _initialised(1, stages.first, *stages.smallest, fan_in=1, gain=1.0)
        self.stages = stages
        self.to_rgb = Convolution(stages.last, channels, 1)

    def images(self, x: Tensor) -> Tensor:
        x = self.stages(x[:, :, None, None] * self.basis)
        with torch.autocast(x.device.type, enabled=False):
            return self.to_rgb(x.to(self.to_rgb.weight.dtype))


class R3Discriminator(ImageDiscriminator):
    """R3GAN's discriminator: the stages from the largest resolution down, then two more layers.

    These are a depthwise convolution over the whole last maps and the linear layer `output`. Both
    run without autocast.
    """

    def __init__(
        self, config: R3DiscriminatorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.set_shape(resolution, channels, classes)
        stages = _Stages(config, resolution, "down")
        dim = self.embed_dim = config.embed_dim or stages.last
        self.from_rgb = Convolution(channels, stages.first, 1)
        self.stages = stages
        self.trunk_width = stages.last
        self.basis = _initialised(
            1, stages.last, *stages.smallest, fan_in=math.prod(stages.smallest), gain=1.0
        )
        self.output = Linear(stages.last, dim if classes else 1)
        self.embed = Linear(classes, dim, gain=1 / math.sqrt(dim)) if classes else None

    def trunk(self) -> dict[str, nn.Module]:
        return {"stem": self.from_rgb} | {
            f"stage{n}": stage for n, stage in enumerate(self.stages, 1)
        }

    def embedded(self, labels: Tensor) -> Tensor:
        """Return the embeddings [N, F] of labels [N, classes].

        A row of zeros (no label) gets a constant embedding, because the linear layer would give
        zeros, and the logit of every image would be 0.
        """
        return torch.where(
            (labels == 0).all(1, keepdim=True),
            1 / math.sqrt(self.embed_dim),
            super().embedded(labels),
        )

    def hidden(self, images: Tensor) -> Tensor:
        """Return the last hidden activations [N, width] in the parameters' precision."""
        self.check_shape(images)
        x = self.stages(self.from_rgb(images))
        with torch.autocast(x.device.type, enabled=False):
            return (x.to(self.basis.dtype) * self.basis).sum(dim=(2, 3))
