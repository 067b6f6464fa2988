"""StyleGAN2's generator and discriminator (1912.04958), conditional by projection (1802.05637), without custom CUDA.

Formulas as in the papers; the modulated convolution is the training form: activations are scaled by the style, one
shared convolution follows, and the demodulation coefficient scales its output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import (
    ACTIVATION_GAIN,
    LEAKY_SLOPE,
    EqualizedConv2d,
    EqualizedLinear,
    blur_fir,
    compute_dtype,
    normalize_second_moment,
    upsample_fir,
)
from utils.errors import UserError

NoiseMode = Literal["random", "const", "none"]


def check_resolution(resolution: int) -> None:
    """Raise UserError unless `resolution` is a power of two from 8."""
    if resolution < 8 or resolution & (resolution - 1):
        raise UserError(
            f"resolution {resolution} is not a power of two from 8 up; pack the data with --size 8, 16, 32, ..."
        )


@dataclass(kw_only=True)
class GeneratorConfig:
    """Size of the generator."""

    z_dim: int = 512  # latent dimensions
    w_dim: int = 512  # intermediate latent dimensions
    mapping_layers: int = 8  # 2 for small sets
    mapping_lr_multiplier: float = 0.01
    channel_base: int = 16384  # channels at a resolution: min(channel_base / resolution, channel_max)
    channel_max: int = 512
    w_avg_beta: float = 0.995  # decay of the moving mean of w

    def __post_init__(self) -> None:
        if min(self.z_dim, self.w_dim, self.channel_base, self.channel_max) < 1 or self.mapping_layers < 1:
            raise UserError("generator: z_dim, w_dim, channel_base, channel_max and mapping_layers must be 1 or more")
        if not 0 <= self.w_avg_beta < 1:
            raise UserError(f"generator.w_avg_beta {self.w_avg_beta} must lie in [0, 1)")


@dataclass(kw_only=True)
class DiscriminatorConfig:
    """Size and form of the discriminator."""

    architecture: Literal["residual", "plain"] = "residual"
    channel_base: int = 16384
    channel_max: int = 512
    minibatch_std_group: int = 4  # consecutive samples of the global batch; 1 switches the layer off
    mapping_layers: int = 0  # layers that map the label's embedding before the projection

    def __post_init__(self) -> None:
        if min(self.channel_base, self.channel_max, self.minibatch_std_group) < 1 or self.mapping_layers < 0:
            raise UserError(
                "discriminator: channel_base, channel_max, minibatch_std_group must be 1 or more, mapping_layers 0 "
                "or more"
            )


def channels_at(resolution: int, base: int, maximum: int) -> int:
    """min(base / resolution, maximum), at least 1."""
    return max(1, min(base // resolution, maximum))


class MappingNetwork(nn.Module):
    """z [N, z_dim] and labels [N] (int64) to w [N, w_dim].

    z and the embedded label are each normalised to unit second moment and concatenated. Runs in the parameters' own
    precision whatever autocast says.
    """

    def __init__(self, z_dim: int, w_dim: int, classes: int, layers: int, lr_multiplier: float) -> None:
        super().__init__()
        self.embed = EqualizedLinear(classes, w_dim) if classes else None
        widths = [z_dim + (w_dim if classes else 0)] + [w_dim] * layers
        self.layers = nn.Sequential(
            *(EqualizedLinear(a, b, lr_multiplier=lr_multiplier, activation=True) for a, b in pairwise(widths))
        )

    def forward(self, z: Tensor, labels: Tensor | None) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            x = normalize_second_moment(z)
            if self.embed is not None:
                one_hot = F.one_hot(_required(labels), self.embed.weight.shape[1]).to(z.dtype)
                x = torch.cat([x, normalize_second_moment(self.embed(one_hot))], dim=1)
            return self.layers(x)


def _required(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise ValueError("a conditional network needs labels")
    return labels


class ModulatedConv2d(nn.Module):
    """Style-modulated convolution, training form.

    x [N, I, H, W], w [N, w_dim] -> [N, O, H, W], or [N, O, 2H, 2W] with `upsample`. The affine layer (bias 1 at the
    start) gives the style s; output = conv(x * s) * rsqrt(sum((weight * s)^2) + 1e-8). `demodulate=False` is ToRGB's
    form, whose style is scaled by 1/sqrt(fan_in).
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
        self.affine = EqualizedLinear(w_dim, in_channels, bias_init=1.0)
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.weight_gain = 1 / math.sqrt(in_channels * kernel_size**2)
        self.demodulate = demodulate
        self.upsample = upsample

    def forward(self, x: Tensor, w: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """The convolution's output before demodulation, and the demodulation coefficients times `gain` [N, O, 1, 1]."""
        dtype = compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            style = self.affine(w.to(self.weight.dtype))  # [N, I]
            weight = self.weight * self.weight_gain if not self.demodulate else self.weight
            scale = None
            if self.demodulate:
                # the weight's gain cancels against the demodulation, so neither is applied
                energy = style.square() @ weight.square().sum(dim=(2, 3)).t()  # [N, O]
                scale = (gain * torch.rsqrt(energy + 1e-8 / self.weight_gain**2)).to(dtype)[:, :, None, None]
        x = x.to(dtype) * style.to(dtype)[:, :, None, None]
        if self.upsample:
            x = F.conv_transpose2d(x, weight.transpose(0, 1), stride=2)  # [N, O, 2H + 1, 2W + 1]
            x = blur_fir(x, padding=1, gain=4.0)
        else:
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
        return x, scale


class StyledLayer(nn.Module):
    """Modulated 3x3 convolution, noise of learned strength (0 at the start), bias, scaled leaky ReLU."""

    noise_const: Tensor

    def __init__(
        self, in_channels: int, out_channels: int, w_dim: int, resolution: int, *, upsample: bool = False
    ) -> None:
        super().__init__()
        self.conv = ModulatedConv2d(in_channels, out_channels, 3, w_dim, upsample=upsample)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.noise_strength = nn.Parameter(torch.zeros([]))
        self.register_buffer("noise_const", torch.randn(1, 1, resolution, resolution))

    def forward(self, x: Tensor, w: Tensor, noise: Tensor | None) -> Tensor:
        x, scale = self.conv(x, w, ACTIVATION_GAIN)
        bias = (self.bias * ACTIVATION_GAIN).to(x.dtype)[None, :, None, None]
        x = torch.addcmul(bias, x, scale)
        if noise is not None:
            x = x + (noise * (self.noise_strength * ACTIVATION_GAIN)).to(x.dtype)
        return F.leaky_relu(x, LEAKY_SLOPE)


class ToRGB(nn.Module):
    """1x1 modulated convolution to the image's channels, without demodulation; [N, C, H, W] -> [N, channels, H, W]."""

    def __init__(self, in_channels: int, channels: int, w_dim: int) -> None:
        super().__init__()
        self.conv = ModulatedConv2d(in_channels, channels, 1, w_dim, demodulate=False)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        rgb, _ = self.conv(x, w)
        return rgb.to(self.bias.dtype) + self.bias[None, :, None, None]


class SynthesisBlock(nn.Module):
    """One resolution: an upsampling layer (absent at 4 px), a layer, ToRGB added to the upsampled image so far."""

    def __init__(self, in_channels: int, out_channels: int, w_dim: int, resolution: int, channels: int) -> None:
        super().__init__()
        self.first = (
            StyledLayer(in_channels, out_channels, w_dim, resolution, upsample=True) if resolution > 4 else None
        )
        self.second = StyledLayer(out_channels, out_channels, w_dim, resolution)
        self.to_rgb = ToRGB(out_channels, channels, w_dim)

    @property
    def layers(self) -> list[StyledLayer]:
        """The layers of this resolution, in the order they are applied."""
        return [layer for layer in (self.first, self.second) if layer is not None]

    def forward(
        self, x: Tensor, image: Tensor | None, ws: Sequence[Tensor], noise: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        for layer, w, layer_noise in zip(self.layers, ws, noise, strict=False):
            x = layer(x, w, layer_noise)
        rgb = self.to_rgb(x, ws[len(self.layers)])
        return x, rgb if image is None else upsample_fir(image) + rgb


class Generator(nn.Module):
    """StyleGAN2's skip generator.

    `forward(z [N, z_dim], labels [N] or None)` -> images [N, channels, resolution, resolution], about [-1, 1].
    `classes` 0 means unconditional. `w_avg` [w_dim] is the moving mean of w, a buffer without a graph.
    """

    w_avg: Tensor

    def __init__(self, config: GeneratorConfig, *, resolution: int, channels: int, classes: int) -> None:
        super().__init__()
        check_resolution(resolution)
        self.config = config
        self.resolution, self.channels, self.classes = resolution, channels, classes
        self.z_dim, self.w_dim = config.z_dim, config.w_dim
        self.mapping = MappingNetwork(
            config.z_dim, config.w_dim, classes, config.mapping_layers, config.mapping_lr_multiplier
        )
        sizes = [2**k for k in range(2, int(math.log2(resolution)) + 1)]
        widths = [channels_at(size, config.channel_base, config.channel_max) for size in sizes]
        self.constant = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.blocks = nn.ModuleList(
            SynthesisBlock(before, width, config.w_dim, size, channels)
            for before, width, size in zip([widths[0], *widths[:-1]], widths, sizes, strict=True)
        )
        self.num_ws = 2 * len(sizes)
        self.register_buffer("w_avg", torch.zeros(config.w_dim))

    def styled_layers(self) -> list[StyledLayer]:
        """The layers that take noise, from 4 px up."""
        return [layer for block in self.blocks for layer in block.layers]  # type: ignore[union-attr]

    def noise_shapes(self) -> list[tuple[int, int, int]]:
        """(1, H, W) of each layer's noise map, in the order `synthesis` takes them."""
        return [(1, *layer.noise_const.shape[2:]) for layer in self.styled_layers()]

    @torch.no_grad()
    def update_w_avg(self, w_mean: Tensor) -> None:
        """Move `w_avg` towards the mean w [w_dim] of a (global) batch: w_avg = beta w_avg + (1 - beta) w_mean."""
        self.w_avg.lerp_(w_mean.to(self.w_avg.dtype), 1 - self.config.w_avg_beta)

    def truncate(self, ws: Tensor, psi: float, cutoff: int | None = None) -> Tensor:
        """w_avg + psi (w - w_avg) for the first `cutoff` layers (all when None); ws [N, num_ws, w_dim]."""
        if psi == 1:
            return ws
        cutoff = self.num_ws if cutoff is None else cutoff
        return torch.cat([self.w_avg.lerp(ws[:, :cutoff], psi), ws[:, cutoff:]], dim=1)

    def synthesis(self, ws: Tensor, noise: Sequence[Tensor] | NoiseMode) -> Tensor:
        """Images [N, channels, H, W] from ws [N, num_ws, w_dim].

        `noise`: one [N, 1, h, w] map of N(0, 1) per layer (`noise_shapes`), "const" for the stored maps, "none" for
        none.
        """
        layers = self.styled_layers()
        if noise == "const":
            maps: Sequence[Tensor | None] = [layer.noise_const for layer in layers]
        elif noise == "none":
            maps = [None] * len(layers)
        elif isinstance(noise, str):
            raise ValueError("pass the noise maps themselves: draws happen outside the model")
        else:
            maps = noise
        x = self.constant.expand(len(ws), -1, -1, -1)
        image, index = None, 0
        for block in self.blocks:
            count = len(block.layers)  # type: ignore[arg-type]
            x, image = block(x, image, ws[:, index : index + count + 1].unbind(1), maps[index : index + count])
            index += count
        return image  # type: ignore[return-value]

    def forward(
        self,
        z: Tensor,
        labels: Tensor | None = None,
        *,
        noise: Sequence[Tensor] | NoiseMode = "const",
        truncation_psi: float = 1.0,
        truncation_cutoff: int | None = None,
    ) -> Tensor:
        w = self.mapping(z, labels if self.classes else None)
        ws = w[:, None].expand(-1, self.num_ws, -1)
        return self.synthesis(self.truncate(ws, truncation_psi, truncation_cutoff), noise)


class DiscriminatorBlock(nn.Module):
    """Two 3x3 convolutions, the second halving H and W; residual: plus a 1x1 skip, both times sqrt(0.5)."""

    def __init__(self, in_channels: int, out_channels: int, *, residual: bool) -> None:
        super().__init__()
        gain = math.sqrt(0.5) if residual else 1.0
        self.first = EqualizedConv2d(in_channels, in_channels, 3)
        self.second = EqualizedConv2d(in_channels, out_channels, 3, downsample=True, gain=gain)
        self.skip = (
            EqualizedConv2d(in_channels, out_channels, 1, downsample=True, bias=False, activation=False, gain=gain)
            if residual
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y if self.skip is None else y + self.skip(x)


def minibatch_std(x: Tensor, group: int) -> Tensor:
    """Append one feature map: the standard deviation over groups of `group` consecutive samples; [N, C, H, W] -> [N,
    C + 1, H, W].

    sqrt(var + 1e-8), averaged over channels and pixels. Raises ValueError unless N is a multiple of `group`.
    """
    n, c, h, w = x.shape
    if n % group:
        raise ValueError(f"minibatch standard deviation: a batch of {n} does not hold whole groups of {group}")
    grouped = x.reshape(n // group, group, c, h, w)
    # torch.var over an inner dimension was measured 20 times slower than this on the CPU
    variance = (grouped - grouped.mean(dim=1, keepdim=True)).square().mean(dim=1)
    std = (variance + 1e-8).sqrt().mean(dim=(1, 2, 3))
    return torch.cat([x, std.repeat_interleave(group)[:, None, None, None].expand(n, 1, h, w)], dim=1)


class Discriminator(nn.Module):
    """`forward(images [N, channels, R, R], labels [N] or None)` -> logits [N] in the parameters' precision.

    Conditional: <features, mapped label> / sqrt(dim). Last block (minibatch std, convolution, fully connected) and
    the output run without autocast.
    """

    def __init__(self, config: DiscriminatorConfig, *, resolution: int, channels: int, classes: int) -> None:
        super().__init__()
        check_resolution(resolution)
        self.config, self.classes = config, classes
        sizes = [2**k for k in range(int(math.log2(resolution)), 1, -1)]
        widths = [channels_at(size, config.channel_base, config.channel_max) for size in sizes]
        self.from_rgb = EqualizedConv2d(channels, widths[0], 1)
        self.blocks = nn.ModuleList(
            DiscriminatorBlock(a, b, residual=config.architecture == "residual") for a, b in pairwise(widths)
        )
        last = widths[-1]
        extra = int(config.minibatch_std_group > 1)
        self.last_conv = EqualizedConv2d(last + extra, last, 3)
        self.last_linear = EqualizedLinear(last * 16, last, activation=True)
        self.output = EqualizedLinear(last, last if classes else 1)
        self.embed = EqualizedLinear(classes, last) if classes else None
        self.label_mapping = nn.Sequential(
            *(
                EqualizedLinear(last, last, lr_multiplier=0.01, activation=True)
                for _ in range(config.mapping_layers * bool(classes))
            )
        )

    def features(self, images: Tensor) -> Tensor:
        """What the output is made from, [N, F]: the label is not looked at yet (F = 1 without classes)."""
        x = self.from_rgb(images)
        for block in self.blocks:
            x = block(x)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.output.weight.dtype)
            if self.config.minibatch_std_group > 1:
                x = minibatch_std(x, self.config.minibatch_std_group)
            return self.output(self.last_linear(self.last_conv(x).flatten(1)))

    def project(self, features: Tensor, labels: Tensor | None) -> Tensor:
        """Logits [N] from features [N, F]: <features, mapped label> / sqrt(F), the features themselves without
        classes.
        """
        if self.embed is None:
            return features.squeeze(1)
        with torch.autocast(features.device.type, enabled=False):
            one_hot = F.one_hot(_required(labels), self.classes).to(features.dtype)
            mapped = self.label_mapping(normalize_second_moment(self.embed(one_hot)))
            return (features * mapped).sum(dim=1) / math.sqrt(features.shape[1])

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.project(self.features(images), labels)
