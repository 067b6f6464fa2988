"""StyleGAN2's generator and discriminator (1912.04958), conditional by projection (1802.05637),
without custom CUDA.

The formulas are those of the papers; the layers are in `models/layers/stylegan2.py`. Both networks
can run at a smaller stage of progressive growing (1812.04948): then only the blocks up to that
resolution run, and `alpha` fades in the newest.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from duetgan.models.gan import (
    Alpha,
    ImageDiscriminator,
    NoiseMode,
    StyledGenerator,
    TruncationMean,
    floor_to_two,
    run,
    sizes_up_to,
)
from duetgan.models.layers import EqualizedConv2d, EqualizedLinear, normalize_second_moment
from duetgan.models.layers.stylegan2 import (
    DiscriminatorBlock,
    Fp16Plan,
    MappingNetwork,
    StyledLayer,
    SynthesisBlock,
    clamped,
    is_one,
    minibatch_std,
)
from duetgan.utils.config.model import Config, Decay, NonNegativeInt, PositiveFloat, PositiveInt


class SizeConfig(Config):
    """Options of both networks: width, precision and memory."""

    # channels at a resolution: min(channel_base / resolution, channel_max)
    channel_base: PositiveInt = 16384
    channel_max: PositiveInt = 512  # maximum number of channels
    # precision fp16: number of the largest resolutions (8 px and up) that run in fp16; the others
    # run in fp32
    fp16_resolutions: NonNegativeInt = 4
    # precision fp16: convolutions' outputs are clamped to +- this value, times sqrt(0.5) on
    # residual branches; null: no clamp
    conv_clamp: PositiveFloat | None = 256.0
    # apply conv_clamp in every precision, for converted networks that were trained with it
    clamp_always: bool = False
    # recompute activations in the backward pass: less memory, more time
    activation_checkpointing: bool = False


class GeneratorConfig(SizeConfig):
    """Options of StyleGAN2's generator."""

    z_dim: PositiveInt = 512  # dimensions of the latent z
    w_dim: PositiveInt = 512  # dimensions of the style w
    mapping_layers: Annotated[int, Interval(ge=1, le=100)] = 8  # 2 for small datasets
    mapping_lr_multiplier: PositiveFloat = 0.01  # factor of the mapping network's learning rate
    w_avg_beta: Decay = 0.995  # decay of the moving mean of w


class DiscriminatorConfig(SizeConfig):
    """Options of StyleGAN2's discriminator."""

    # plain: no skip connections; cheaper, for small images
    architecture: Literal["residual", "plain"] = "residual"
    # consecutive samples of the global batch per minibatch standard deviation; 1 switches it off
    minibatch_std_group: PositiveInt = 4
    # samples of a group; strided: N / group apart in a forward pass of N, as in NVIDIA's code;
    # micro-batches then change the result
    minibatch_std_order: Literal["consecutive", "strided"] = "consecutive"
    # layers that map the label's embedding before the projection
    mapping_layers: Annotated[int, Interval(ge=0, le=100)] = 0

    @property
    def group(self) -> int:
        """Number of consecutive samples that must stay together in one forward pass."""
        return self.minibatch_std_group


def channels_at(resolution: int, base: int, maximum: int) -> int:
    """Return the channels at a resolution: min(base / resolution, maximum), but at least 1.

    The resolution is rounded down to a power of two.
    """
    return max(1, min(base // floor_to_two(resolution), maximum))


def _blocks_at(stage: int, resolution: int | str) -> int:
    """Return the number of blocks that run at a stage of `stage` px.

    Raises ValueError if `stage` is none of `sizes_up_to(resolution)`.
    """
    sizes = sizes_up_to(resolution)
    if stage not in sizes:
        raise ValueError(
            f"a network of {resolution} px has no stage of {stage} px; its stages are {sizes}"
        )
    return sizes.index(stage) + 1


class Generator(StyledGenerator):
    """StyleGAN2's skip generator.

    At a stage of progressive growing `resolution` is the shorter side in px (4, 8, ...; None: the
    full size), and `alpha` (a number or a 0-d tensor) scales the newest block's contribution to the
    image: 0 gives the image of the previous stage, upsampled by `upsample_fir`, 1 that of all of
    this stage's blocks.
    """

    can_grow = True

    def __init__(
        self, config: GeneratorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.resolution = resolution
        self.channels = channels
        self.classes = classes
        self.z_dim = config.z_dim
        self.w_dim = config.w_dim
        self.w_avg_beta = config.w_avg_beta
        self.fp16 = Fp16Plan(config, self.spec.side)
        self.mapping = MappingNetwork(
            config.z_dim, config.w_dim, classes, config.mapping_layers, config.mapping_lr_multiplier
        )
        sizes = sizes_up_to(resolution)
        widths = [channels_at(size, config.channel_base, config.channel_max) for size in sizes]
        self.constant = nn.Parameter(torch.randn(1, widths[0], *self.spec.at(sizes[0]).size))
        self.blocks = nn.ModuleList(
            SynthesisBlock(
                in_channels,
                out_channels,
                config.w_dim,
                self.spec.at(size).size,
                channels,
                first=size == sizes[0],
            )
            for in_channels, out_channels, size in zip(
                [widths[0], *widths[:-1]], widths, sizes, strict=True
            )
        )
        self.num_ws = self.num_ws_at()
        self.register_buffer("w_avg", torch.zeros(config.w_dim))

    def _blocks(self, resolution: int | None) -> list[SynthesisBlock]:
        return list(self.blocks[: _blocks_at(resolution or self.spec.side, self.resolution)])  # type: ignore[arg-type]

    def num_ws_at(self, resolution: int | None = None) -> int:
        """Return the number of styles of a stage: one for each layer and one for the last ToRGB."""
        return 2 * len(self._blocks(resolution))

    def styled_layers(self, resolution: int | None = None) -> list[StyledLayer]:
        """Return the layers of a stage that take noise, from the smallest resolution up."""
        return [layer for block in self._blocks(resolution) for layer in block.layers]

    def noise_shapes(self, resolution: int | None = None) -> list[tuple[int, int, int]]:
        """Return (1, H, W) of each noise map of a stage, in the order of `styled_layers`."""
        return [(1, *layer.noise_const.shape[2:]) for layer in self.styled_layers(resolution)]

    def _noise_maps(
        self, noise: Sequence[Tensor] | NoiseMode, resolution: int | None
    ) -> Sequence[Tensor | None]:
        """Return a noise map, or None, for each layer of a stage."""
        layers = self.styled_layers(resolution)
        if noise in ("const", "none"):
            return [layer.noise_const if noise == "const" else None for layer in layers]
        if isinstance(noise, str):
            raise ValueError("pass the noise maps themselves: draws happen outside the model")
        if len(noise) != len(layers):
            raise ValueError(
                f"this stage has {len(layers)} layers that take noise, but {len(noise)} maps were given"
            )
        return noise

    def synthesis(
        self,
        ws: Tensor,
        noise: Sequence[Tensor] | NoiseMode,
        *,
        resolution: int | None = None,
        alpha: Alpha = 1.0,
    ) -> Tensor:
        """Return images [N, channels, H, W] for styles.

        Args:
            ws: [N, num_ws_at(resolution) or more, w_dim]; additional styles are ignored.
            noise: One [N, 1, h, w] map of N(0, 1) per layer (`noise_shapes(resolution)`), "const"
                (stored maps) or "none".
            resolution: Shorter side of the stage in px; None for the full size.
            alpha: Weight of the stage's newest block.
        """
        blocks = self._blocks(resolution)
        maps = self._noise_maps(noise, resolution)
        if ws.shape[1] < 2 * len(blocks):
            raise ValueError(
                f"this stage takes {2 * len(blocks)} styles, but {ws.shape[1]} were given"
            )
        x = self.constant.expand(ws.shape[0], -1, -1, -1)
        image = None
        index = 0
        clamp = self.fp16.clamp(x)
        for number, block in enumerate(blocks):
            stop = index + len(block.layers)
            fade = alpha if number == len(blocks) - 1 else 1.0
            styles = ws[:, index : stop + 1].unbind(1)
            size = self.spec.side >> len(self.blocks) - 1 - number
            arguments = (size, block, x, image, styles, maps[index:stop], clamp, fade)
            x, image = run(
                self.fp16.call, *arguments, recompute=self.config.activation_checkpointing
            )
            index = stop
        assert image is not None
        return self.finished(image)

    def forward(
        self,
        z: Tensor,
        labels: Tensor | None = None,
        *,
        noise: Sequence[Tensor] | NoiseMode = "const",
        truncation_psi: float = 1.0,
        truncation_cutoff: int | None = None,
        truncation_mean: TruncationMean = "class",
        resolution: int | None = None,
        alpha: Alpha = 1.0,
    ) -> Tensor:
        ws = self.mapping(z, labels if self.classes else None)[:, None].expand(
            -1, self.num_ws_at(resolution), -1
        )
        ws = self.truncate(
            ws, truncation_psi, truncation_cutoff, labels=labels, mean=truncation_mean
        )
        return self.synthesis(ws, noise, resolution=resolution, alpha=alpha)


class Discriminator(ImageDiscriminator):
    """StyleGAN2's discriminator; a conditional one gives <features, mapped label> / sqrt(dim).

    The last block (minibatch std, convolution, fully connected) and the output run without
    autocast.

    `progressive` adds a from_rgb for each smaller resolution. Then the shorter side of images may
    be 4, 8, ... px up to the full size; it selects the stage of progressive growing. `alpha` (a
    number or a 0-d tensor) fades in the stage's newest block: 0 applies the previous stage to the
    images' 2x2 means (as in a packed pyramid), 1 all of this stage's blocks to the images. It has
    no effect at 4 px.
    """

    def __init__(
        self,
        config: DiscriminatorConfig,
        *,
        resolution: int | str,
        channels: int,
        classes: int,
        progressive: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.resolution = resolution
        self.channels = channels
        self.classes = classes
        self.fp16 = Fp16Plan(config, self.spec.side)
        sizes = sizes_up_to(resolution)[::-1]
        widths = [channels_at(size, config.channel_base, config.channel_max) for size in sizes]
        self.from_rgb = EqualizedConv2d(channels, widths[0], 1)
        self.blocks = nn.ModuleList(
            DiscriminatorBlock(a, b, residual=config.architecture == "residual")
            for a, b in pairwise(widths)
        )
        last = self.trunk_width = widths[-1]
        self.last_conv = EqualizedConv2d(last + (config.minibatch_std_group > 1), last, 3)
        self.last_linear = EqualizedLinear(
            last * math.prod(self.spec.at(sizes[-1]).size), last, activation=True
        )
        self.output = EqualizedLinear(last, last if classes else 1)
        self.embed = EqualizedLinear(classes, last) if classes else None
        layers = range(config.mapping_layers if classes else 0)
        self.label_mapping = nn.Sequential(
            *(EqualizedLinear(last, last, lr_multiplier=0.01, activation=True) for _ in layers)
        )
        # height and width of the images that it accepts
        self.sizes = {self.spec.at(side).size for side in sizes[: None if progressive else 1]}
        if progressive:
            pairs = zip(sizes[1:], widths[1:], strict=True)
            self.from_rgbs = nn.ModuleDict(
                {str(size): EqualizedConv2d(channels, width, 1) for size, width in pairs}
            )

    def trunk(self) -> dict[str, nn.Module]:
        return {"stem": self.from_rgb} | {
            f"stage{n}": block for n, block in enumerate(self.blocks, 1)
        }

    def _entry(self, images: Tensor, clamp: float | None) -> Tensor:
        side = min(images.shape[2:])
        return clamped(
            (self.from_rgb if side == self.spec.side else self.from_rgbs[str(side)])(images), clamp
        )

    def _segment(self, x: Tensor, index: int, entering: bool, clamp: float | None) -> Tensor:
        """Apply from_rgb if `entering`, then block `index` if there is one."""
        if entering:
            x = self._entry(x, clamp)
        if index < len(self.blocks):
            x = self.blocks[index](x, clamp)
        return x

    def hidden(self, images: Tensor, alpha: Alpha = 1.0) -> Tensor:
        """Return the last hidden activations [N, F] in the parameters' precision.

        F is the number of channels of the smallest maps.
        """
        height, width = map(int, images.shape[2:])  # tensors while a graph is traced
        full, side = self.spec.side, min(height, width)
        if (height, width) not in self.sizes:
            raise ValueError(
                f"images of {width}x{height} for a discriminator of {self.resolution} px; those of "
                "a smaller stage need progressive=True"
            )
        # index of the first block of the images' stage
        start = len(self.blocks) + 1 - _blocks_at(side, self.resolution)
        clamp = self.fp16.clamp(images)
        x = images
        for index in range(start, max(start + 1, len(self.blocks))):
            arguments = (full >> index, self._segment, x, index, index == start, clamp)
            x = run(self.fp16.call, *arguments, recompute=self.config.activation_checkpointing)
            if index == start < len(self.blocks) and not is_one(alpha):
                previous = self.fp16.call(side // 2, self._entry, F.avg_pool2d(images, 2), clamp)
                weight = alpha.to(previous.dtype) if isinstance(alpha, Tensor) else alpha
                x = torch.lerp(previous, x.to(previous.dtype), weight)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.last_conv.weight.dtype)
            group = self.config.minibatch_std_group
            if group > 1:
                is_strided = self.config.minibatch_std_order == "strided"
                x = minibatch_std(x, group, strided=is_strided)
            return self.last_linear(clamped(self.last_conv(x), clamp).flatten(1))

    def embedded(self, labels: Tensor) -> Tensor:
        return self.label_mapping(normalize_second_moment(super().embedded(labels)))

    def project(self, features: Tensor, labels: Tensor | None) -> Tensor:
        # Without classes F is 1.
        return super().project(features, labels) / math.sqrt(features.shape[1])
