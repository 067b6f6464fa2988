"""StyleGAN2's generator and discriminator (1912.04958), conditional by projection (1802.05637).

The formulas are those of the papers. The modulated convolution has the form for training: the style
scales the input, one convolution for all samples follows, and the demodulation coefficient scales
the output. `models/layers/fp16.py` chooses each block's precision under fp16 autocast.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor, nn

from duetgan.models import layers
from duetgan.models.gan import (
    ImageDiscriminator,
    NoiseMode,
    StyledGenerator,
    run,
    sizes_up_to,
)
from duetgan.models.layers import convolution, fp16, scaling
from duetgan.models.layers.stylegan2 import (
    DiscriminatorBlock,
    FromRGB,
    MappingNetwork,
    channels_at,
    minibatch_std,
)
from duetgan.utils.config.model import Decay, PositiveFloat, PositiveInt
from duetgan.utils.distributed import collectives

NoiseMaps = Sequence[Tensor | None]
Clamp = float | None  # limit of convolutions' outputs


class SizeConfig(fp16.Fp16Config):
    """Options of both networks: width, precision and memory."""

    # channels at a resolution: min(channel_base / resolution, channel_max)
    channel_base: PositiveInt = 16384
    channel_max: PositiveInt = 512  # maximum number of channels
    # recompute activations in the backward pass: less memory, more time
    activation_checkpointing: bool = False

    def widths(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of channels at resolutions in px."""
        return [channels_at(size, self.channel_base, self.channel_max) for size in sizes]


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


# --- the generator


class Modulation(NamedTuple):
    """The style and the filters of a modulated convolution, for N samples."""

    style: Tensor  # [N, I]
    weight: Tensor  # [O, I, k, k]
    scale: Tensor | None  # [N, O, 1, 1]: factor of the convolution's output; None for 1


class ModulatedConv2d(nn.Module):
    """Convolution whose input channels are scaled by a style, in the form for training.

    Maps x [N, I, H, W] to [N, O, H, W], or to [N, O, 2H, 2W] if `upsample`. The layer `affine`
    (bias 1 at the start) maps w [N, w_dim] to the style s [N, I]. The result is the product of
    conv(x * s), which `forward` returns, and the demodulation coefficient rsqrt(sum((weight * s)^2)
    + 1e-8), by which the caller multiplies it. If `demodulate` is False (ToRGB), the coefficient is
    left out, and the style is scaled by 1/sqrt(fan_in). `modulate` computes the style and the
    coefficient.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        w_dim: int,
        *,
        demodulate: bool = True,
        upsample: bool = False,
    ) -> None:
        super().__init__()
        self.weight_gain = 1 / math.sqrt(in_channels * kernel_size**2)
        gain = 1.0 if demodulate else self.weight_gain
        self.affine = layers.EqualizedLinear(w_dim, in_channels, bias_init=1.0, gain=gain)
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.demodulate = demodulate
        self.upsample = upsample

    def forward(self, x: Tensor, modulation: Modulation) -> Tensor:
        """Return the convolution's output, not yet multiplied by the scale of the modulation."""
        dtype = layers.compute_dtype(x)
        style, weight, _ = modulation
        if weight.shape[-1] == 1 and not self.upsample:
            # For few output channels it is cheaper to scale the filters of each sample than the
            # maps.
            return layers.pointwise(x.to(dtype), (weight.flatten(1) * style[:, None]).to(dtype))
        x = x.to(dtype) * style.to(dtype)[:, :, None, None]
        if not self.upsample:
            return convolution.convolve(
                x, weight, None, convolution.Geometry(padding=weight.shape[-1] // 2)
            )
        x = convolution.convolve(
            x, weight.transpose(0, 1), None, convolution.Geometry(stride=2, transposed=True)
        )
        # [N, O, 2H + 1, 2W + 1]
        return layers.blur_fir(x, padding=1, gain=4.0)


def modulate(
    convolutions: Sequence[ModulatedConv2d],
    ws: Sequence[Tensor],  # [N, w_dim] for each
    dtypes: Sequence[torch.dtype],  # of each convolution
    gain: float,
) -> list[Modulation]:
    """Compute the modulations of several convolutions together, with few operators.

    The scale of a modulation is the demodulation coefficient times `gain`. In fp16, style and
    weight are divided by norms, and the scale is also multiplied by these norms. A convolution
    without demodulation has a scale in fp16 only, and all its tensors have the precision of the
    parameters.
    """
    with torch.autocast(ws[0].device.type, enabled=False):
        precision = convolutions[0].weight.dtype
        affine = [conv.affine.scaled_parameters(precision) for conv in convolutions]
        weights = scaling.stacked([parameters["weight"] for parameters in affine])
        biases = scaling.stacked([parameters["bias"][:, None] for parameters in affine])
        # [L, inputs, N], so that gradients of weights have the memory order of the weights
        stack = torch.baddbmm(biases, weights, torch.stack(list(ws)).to(precision).mT)
        stack = stack.mT.contiguous()  # [L, N, inputs]
        energy_filters, filters = scaling.twice([conv.weight for conv in convolutions])
        # Demodulation cancels the weight's gain, so the gain is not applied.
        epsilons = [1e-8 / conv.weight_gain**2 for conv in convolutions]
        scales = scaling.demodulated(stack, energy_filters, gain, epsilons)
        styles = scaling.corners(
            stack, [(ws[0].shape[0], conv.weight.shape[1]) for conv in convolutions]
        )
        for n, conv in enumerate(convolutions):
            if dtypes[n] == torch.float16:
                styles[n], filters[n], scales[n] = fp16.normalised_for_fp16(
                    styles[n],
                    filters[n],
                    scales[n] if conv.demodulate else None,
                    conv.weight_gain if conv.demodulate else 1.0,
                )
        targets = [
            dtype if conv.demodulate else precision
            for conv, dtype in zip(convolutions, dtypes, strict=True)
        ]
        # Filters are cast separately, so that path lengths compute no gradients of filters.
        filters = scaling.cast(filters, targets)
        factors = scaling.cast([*styles, *scales], targets * 2)
        styles, scales = factors[: len(convolutions)], factors[len(convolutions) :]
        modulations = []
        for conv, dtype, style, weight, scale in zip(
            convolutions, dtypes, styles, filters, scales, strict=True
        ):
            has_scale = conv.demodulate or dtype == torch.float16
            modulations.append(
                Modulation(style, weight, scale[:, :, None, None] if has_scale else None)
            )
        return modulations


class StyledLayer(layers.Equalized):
    """Layer of the synthesis network: modulated 3x3 convolution, noise, bias, activation, clamp.

    The strength of the noise is learned and starts as 0. The activation is a leaky ReLU times
    sqrt(2). `size` is the height and width of the output in px, or its side.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        w_dim: int,
        *size: int,
        precision: fp16.LayerPrecision | None = None,
        upsample: bool = False,
    ) -> None:
        super().__init__()
        self.gains = {"bias": layers.ACTIVATION_GAIN}
        self.precision = precision
        self.conv = ModulatedConv2d(in_channels, out_channels, 3, w_dim, upsample=upsample)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.noise_strength = nn.Parameter(torch.zeros([]))
        self.noise_const = nn.Buffer(torch.randn(1, 1, size[0], size[-1]))

    def forward(
        self, x: Tensor, modulation: Modulation, noise: Tensor | None, clamp: Clamp = None
    ) -> Tensor:
        """Return the output; `noise` [N, 1, H, W] is already multiplied by strength and gain."""
        x = self.conv(x, modulation)
        assert modulation.scale is not None
        bias = self.scaled_parameters(x.dtype)["bias"]
        if noise is not None:
            noise = noise.to(x.dtype)
        return layers.scaled_activation(x, modulation.scale, bias, noise, clamp)


class ToRGB(nn.Module):
    """1x1 modulated convolution without demodulation, [N, C, H, W] -> [N, channels, H, W].

    The output has the precision of the parameters.
    """

    def __init__(self, in_channels: int, channels: int, w_dim: int) -> None:
        super().__init__()
        self.conv = ModulatedConv2d(in_channels, channels, 1, w_dim, demodulate=False)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, modulation: Modulation, clamp: float | None = None) -> Tensor:
        rgb = self.conv(x, modulation).to(self.bias.dtype)
        bias = self.bias[None, :, None, None]
        if modulation.scale is None:
            return layers.clamped(rgb + bias, clamp)
        return layers.clamped(torch.addcmul(bias, rgb, modulation.scale), clamp)


class SynthesisBlock(nn.Module):
    """The layers of one resolution: an upsampling layer, a second layer, and ToRGB.

    The output of ToRGB is added to the upsampled image of the previous resolutions. The first block
    (`is_first`) has no upsampling layer.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        w_dim: int,
        size: tuple[int, int],
        channels: int,
        precision: fp16.LayerPrecision,
        *,
        is_first: bool,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.first = None
        if not is_first:
            self.first = StyledLayer(
                in_channels, out_channels, w_dim, *size, precision=precision, upsample=True
            )
        self.second = StyledLayer(out_channels, out_channels, w_dim, *size, precision=precision)
        self.to_rgb = ToRGB(out_channels, channels, w_dim)

    @property
    def layers(self) -> list[StyledLayer]:
        """The layers of this resolution, in order."""
        return [layer for layer in (self.first, self.second) if layer is not None]

    def forward(
        self,
        x: Tensor,  # [N, in_channels, H / 2, W / 2], or the constant [N, C, H, W]
        image: Tensor | None,  # [N, channels, H / 2, W / 2], None in the first block
        modulations: Sequence[Modulation],  # for each layer and for ToRGB
        noise: NoiseMaps,  # [N, 1, H, W] for each layer, times its strength
    ) -> tuple[Tensor, Tensor]:
        return self.precision.call(self._forward, x, image, modulations, noise)

    def _forward(
        self,
        x: Tensor,
        image: Tensor | None,
        modulations: Sequence[Modulation],
        noise: NoiseMaps,
        clamp: Clamp,
    ) -> tuple[Tensor, Tensor]:
        *styled, rgb = modulations
        for layer, modulation, layer_noise in zip(self.layers, styled, noise, strict=True):
            x = layer(x, modulation, layer_noise, clamp)
        return x, self.add_rgb(image, self.to_rgb(x, rgb, clamp))

    def add_rgb(self, image: Tensor | None, rgb: Tensor) -> Tensor:
        """Upsample `image`, which the previous resolutions made, and add this resolution's `rgb`.

        `image` is None in the first block.
        """
        return rgb if image is None else layers.upsample_fir(image) + rgb


class Generator(StyledGenerator):
    """StyleGAN2's generator with skip connections: each resolution adds its RGB to the image."""

    block_class: ClassVar[type[SynthesisBlock]] = SynthesisBlock

    def __init__(
        self, config: GeneratorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.set_shape(resolution, channels, classes)
        self.z_dim = config.z_dim
        self.w_dim = config.w_dim
        self.w_avg_beta = config.w_avg_beta
        self.mapping = MappingNetwork(
            config.z_dim, config.w_dim, classes, config.mapping_layers, config.mapping_lr_multiplier
        )
        sizes = sizes_up_to(resolution)
        widths = config.widths(sizes)
        self.constant = nn.Parameter(torch.randn(1, widths[0], *self.spec.at(sizes[0]).size))
        self.blocks = nn.ModuleList(
            self.block_class(
                previous,
                width,
                config.w_dim,
                self.spec.at(size).size,
                channels,
                fp16.LayerPrecision(config, size, self.spec.side),
                is_first=size == sizes[0],
            )
            for previous, width, size in zip([0, *widths[:-1]], widths, sizes, strict=True)
        )
        self.num_ws = 2 * len(sizes)  # one for each layer and one for the last ToRGB
        self.register_buffer("w_avg", torch.zeros(config.w_dim))

    def used_blocks(self) -> Sequence[SynthesisBlock]:
        """Return the blocks that `synthesis` runs, the smallest resolution first."""
        return list(self.blocks)  # type: ignore[arg-type]

    def styled_layers(self) -> list[StyledLayer]:
        """Return the layers that take noise, from the smallest resolution up."""
        return [layer for block in self.used_blocks() for layer in block.layers]

    def stored_noise(self) -> list[Tensor]:
        return [layer.noise_const for layer in self.styled_layers()]

    def synthesis(self, ws: Tensor, noise: Sequence[Tensor] | NoiseMode) -> Tensor:
        """Return images [N, channels, H, W] for styles.

        Args:
            ws: [N, num_ws or more, w_dim]; additional styles are ignored.
            noise: One [N, 1, h, w] map of N(0, 1) per layer (`noise_shapes`), "const" (stored maps)
                or "none".
        """
        maps = iter(self._noise_maps(noise))
        x = self.constant.expand(ws.shape[0], -1, -1, -1)
        image: Tensor | None = None
        recompute = self.config.activation_checkpointing
        blocks = self.used_blocks()
        # With several processes gradients are sent while the backward pass goes on, so that those
        # of a block must not wait for other blocks.
        groups = [blocks] if collectives.world_size() == 1 else [[block] for block in blocks]
        styles = ws.unbind(1)
        for group in groups:
            counts = [len(block.layers) + 1 for block in group]  # The last one is ToRGB's.
            modulations = iter(self._modulations(group, styles))
            styles = styles[sum(counts) - len(group) :]
            for block, count in zip(group, counts, strict=True):
                parts = [next(modulations) for _ in range(count)]
                noise_maps = [next(maps) for _ in block.layers]
                x, image = run(block, x, image, parts, noise_maps, recompute=recompute)
        assert image is not None
        return self.finished(image)

    def _modulations(
        self, blocks: Sequence[SynthesisBlock], styles: Sequence[Tensor]
    ) -> list[Modulation]:
        """Return the modulations of all layers of `blocks`, in order.

        `styles[0]` is the style of the first of these layers.
        """
        convolutions: list[ModulatedConv2d] = []
        ws: list[Tensor] = []
        dtypes: list[torch.dtype] = []
        first = 0
        for block in blocks:
            stop = first + len(block.layers)
            convolutions += [*(layer.conv for layer in block.layers), block.to_rgb.conv]
            ws += styles[first : stop + 1]  # A ToRGB has the style of the layer that follows it.
            dtypes += [block.precision.dtype(self.constant)] * (stop + 1 - first)
            first = stop
        return modulate(convolutions, ws, dtypes, layers.ACTIVATION_GAIN)

    def _noise_maps(self, noise: Sequence[Tensor] | NoiseMode) -> NoiseMaps:
        """Return each layer's noise map, times the layer's strength and ACTIVATION_GAIN.

        If `noise` is "none", each item is None. Raises ValueError for "random": the caller must
        draw random maps and pass them.
        """
        styled = self.styled_layers()
        if noise == "none":
            return [None] * len(styled)
        if noise == "const":
            noise = self.stored_noise()
        if noise == "random" or len(noise) != len(styled):
            raise ValueError(f"noise: const, none or {len(styled)} maps are needed")
        strengths = [layer.noise_strength for layer in styled]
        gains = [layers.ACTIVATION_GAIN] * len(styled)
        maps = scaling.scaled_noise(noise, scaling.scaled(strengths, gains, strengths[0].dtype))
        blocks = self.used_blocks()
        dtypes = [block.precision.dtype(self.constant) for block in blocks for _ in block.layers]
        return scaling.cast(maps, dtypes)


# --- the discriminator


class Discriminator(ImageDiscriminator):
    """StyleGAN2's discriminator.

    If it is conditional, a logit is the inner product of the features [N, F] and the mapped
    embedding of the label, divided by sqrt(F). The last layers (minibatch standard deviation,
    convolution, fully connected) and `output` run without autocast.
    """

    def __init__(
        self, config: DiscriminatorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.set_shape(resolution, channels, classes)
        sizes = sizes_up_to(resolution)[::-1]
        widths = config.widths(sizes)
        precisions = [fp16.LayerPrecision(config, size, self.spec.side) for size in sizes[:-1]]
        self.from_rgb = FromRGB(channels, widths[0], precisions[0])
        self.blocks = nn.ModuleList(
            DiscriminatorBlock(a, b, precision, residual=config.architecture == "residual")
            for (a, b), precision in zip(pairwise(widths), precisions, strict=True)
        )
        self.has_local_groups = config.minibatch_std_order == "consecutive"
        last = self.trunk_width = widths[-1]
        self.last_conv = layers.EqualizedConv2d(last + (config.minibatch_std_group > 1), last, 3)
        self.last_linear = layers.EqualizedLinear(
            last * math.prod(self.spec.at(sizes[-1]).size), last, activation=True
        )
        self.output = layers.EqualizedLinear(last, last if classes else 1)
        self.embed = layers.EqualizedLinear(classes, last) if classes else None
        self.label_mapping = nn.Sequential()
        for _ in range(config.mapping_layers if classes else 0):
            self.label_mapping.append(
                layers.EqualizedLinear(last, last, lr_multiplier=0.01, activation=True)
            )

    def trunk(self) -> dict[str, nn.Module]:
        return {"stem": self.from_rgb} | {
            f"stage{n}": block for n, block in enumerate(self.blocks, 1)
        }

    def hidden(self, images: Tensor) -> Tensor:
        """Return the last hidden activations [N, F] in the parameters' precision.

        F is the number of channels of the smallest maps.
        """
        self.check_shape(images)
        recompute = self.config.activation_checkpointing
        first, *blocks = self.blocks
        # Recomputed together, so that the largest maps are not kept.
        x = run(lambda images: first(self.from_rgb(images)), images, recompute=recompute)
        for block in blocks:
            x = run(block, x, recompute=recompute)
        return self.last_layers(x)

    def last_layers(self, x: Tensor) -> Tensor:
        """Return the last hidden activations [N, F] for the smallest maps [N, F, h, w]."""
        assert self.from_rgb.precision is not None
        clamp = self.from_rgb.precision.clamp(x)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.last_conv.weight.dtype)
            group = self.config.minibatch_std_group
            if group > 1:
                is_strided = self.config.minibatch_std_order == "strided"
                x = minibatch_std(x, group, strided=is_strided)
            return self.last_linear(self.last_conv(x, clamp).flatten(1))

    def embedded(self, labels: Tensor) -> Tensor:
        return self.label_mapping(layers.normalize_second_moment(super().embedded(labels)))

    def project(self, features: Tensor, labels: Tensor | None) -> Tensor:
        logits = super().project(features, labels)
        return logits if self.embed is None else logits / math.sqrt(features.shape[1])
