"""Layers of StyleGAN2's networks (1912.04958): mapping, modulated convolution, blocks, minibatch
standard deviation.

The modulated convolution is the training form: the style scales the activations, one convolution
for all samples follows, and the demodulation coefficient scales its output. Under fp16 autocast
(2006.06676, appendix on mixed precision) styles and weights are first divided by their largest
magnitude, and the outputs of convolutions are clamped to +-`clamp`, as in NVIDIA's networks;
ToRGB's upsampled sum and the discriminator's skip are not.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from duetgan.models.gan import Alpha, one_hot
from duetgan.models.layers import (
    ACTIVATION_GAIN,
    EqualizedConv2d,
    EqualizedLinear,
    blur_fir,
    compute_dtype,
    normalize_second_moment,
    pointwise,
    scaled_activation,
    upsample_fir,
)
from duetgan.models.layers.convolution import Geometry, convolve


def clamped(x: Tensor, limit: float | None) -> Tensor:
    """Return `x` clamped to +-limit; `x` itself if `limit` is None."""
    return x if limit is None else x.clamp(-limit, limit)


def is_one(alpha: Alpha) -> bool:
    """Return True if `alpha` is the number 1; False for any tensor, whose value is not read."""
    return not isinstance(alpha, Tensor) and alpha == 1


class Fp16Plan:
    """Precision of each resolution of a network under fp16 autocast.

    The largest resolutions, from 8 px up, run in fp16, the others in fp32. It has no effect without
    autocast or under bf16; with `clamp_always` outputs are clamped in any precision.
    """

    def __init__(self, config: Any, resolution: int) -> None:  # a SizeConfig of models/stylegan2.py
        self.lowest = max(8, 2 * resolution >> config.fp16_resolutions)
        self.clamp_always = config.clamp_always
        self.conv_clamp = None
        if config.fp16_resolutions or config.clamp_always:
            self.conv_clamp = config.conv_clamp

    def clamp(self, x: Tensor) -> float | None:
        """Return the limit of convolutions' outputs at all resolutions, or None for no clamp.

        fp32 resolutions are clamped, too, because their output enters the first fp16 resolution.
        """
        return self.conv_clamp if self.clamp_always or compute_dtype(x) == torch.float16 else None

    def call(self, size: int, function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
        """Return `function(x, *arguments)`, run in the precision of the layers at `size` px."""
        if compute_dtype(x) == torch.float16 and size < self.lowest:
            with torch.autocast(x.device.type, enabled=False):
                return function(x.float() if x.dtype == torch.float16 else x, *arguments)
        return function(x, *arguments)


class MappingNetwork(nn.Module):
    """Mapping network: z [N, z_dim] and labels [N] (int64) -> w [N, w_dim].

    z and the embedded label are each normalised to unit second moment and concatenated. It runs
    without autocast, in the precision of its parameters.
    """

    def __init__(
        self, z_dim: int, w_dim: int, classes: int, layers: int, lr_multiplier: float
    ) -> None:
        super().__init__()
        self.embed = EqualizedLinear(classes, w_dim) if classes else None
        widths = [z_dim + (w_dim if classes else 0)] + [w_dim] * layers
        self.layers = nn.Sequential(
            *(
                EqualizedLinear(a, b, lr_multiplier=lr_multiplier, activation=True)
                for a, b in pairwise(widths)
            )
        )

    def forward(self, z: Tensor, labels: Tensor | None) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            x = normalize_second_moment(z)
            if self.embed is not None:
                embedded = self.embed(one_hot(labels, self.embed.weight.shape[1], z.dtype))
                x = torch.cat([x, normalize_second_moment(embedded)], dim=1)
            return self.layers(x)


class ModulatedConv2d(nn.Module):
    """Style-modulated convolution in the form for training.

    x [N, I, H, W], w [N, w_dim] -> [N, O, H, W], or [N, O, 2H, 2W] with `upsample`. The affine
    layer (bias 1 at the start) gives the style s; output = conv(x * s) * rsqrt(sum((weight * s)^2)
    + 1e-8). `demodulate=False` (ToRGB) omits the second factor and scales the style by
    1/sqrt(fan_in).
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
        """Return the convolution's unscaled output and its scale [N, O, 1, 1], None for 1.

        The scale is the demodulation coefficient times `gain`, and in fp16 also times the norms
        that style and weight were divided by. Without demodulation `gain` is not used, and fp16's
        scale has the precision of the parameters.
        """
        dtype = compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            style = self.affine(w.to(self.weight.dtype))  # [N, I]
            weight: Tensor = self.weight
            scale: Tensor | None = None
            if self.demodulate:
                # Demodulation cancels the weight's gain, so the gain is not applied.
                energy = style.square() @ weight.square().sum(dim=(2, 3)).t()  # [N, O]
                scale = gain * torch.rsqrt(energy + 1e-8 / self.weight_gain**2)
            if dtype == torch.float16:
                style, weight, scale = self._normalised(style, scale)
            elif not self.demodulate:
                weight = weight * self.weight_gain
            if scale is not None:
                scale = (scale.to(dtype) if self.demodulate else scale)[:, :, None, None]
        if weight.shape[-1] == 1 and not self.upsample:
            # For few output channels it is cheaper to scale the filters of each sample than the
            # maps.
            return pointwise(x.to(dtype), (weight.flatten(1) * style[:, None]).to(dtype)), scale
        x = x.to(dtype) * style.to(dtype)[:, :, None, None]
        if self.upsample:
            x = convolve(x, weight.transpose(0, 1), None, Geometry(stride=2, transposed=True))
            # [N, O, 2H + 1, 2W + 1]
            x = blur_fir(x, padding=1, gain=4.0)
        else:
            x = convolve(x, weight, None, Geometry(padding=weight.shape[-1] // 2))
        return x, scale

    def _normalised(self, style: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Divide each sample's style [N, I] and each filter by its max norm, for fp16.

        With inputs within +-256 no product exceeds fp16's range. The result does not depend on the
        norms, so gradients treat them as constants.

        Returns:
            Style [N, I], weight [O, I, k, k] and the scale [N, O] that restores the norms.
        """
        style_norm = style.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-8)  # [N, 1]
        weight_norm = self.weight.detach().abs().amax(dim=(1, 2, 3)).clamp_min(1e-8)  # [O]
        weight = self.weight * (self.weight_gain / weight_norm)[:, None, None, None]
        norms = style_norm * weight_norm
        if scale is not None:
            # The scale must be finite, since 0 * inf is NaN. It overflows where all large styles of
            # a sample meet small weights.
            norms = (scale * norms / self.weight_gain).clamp(max=torch.finfo(torch.float16).max)
        return style / style_norm, weight, norms


class StyledLayer(nn.Module):
    """Modulated 3x3 convolution, noise of learned strength (0 at the start), bias, scaled leaky
    ReLU, clamp. `size` is the height and width in px, or the side.
    """

    def __init__(
        self, in_channels: int, out_channels: int, w_dim: int, *size: int, upsample: bool = False
    ) -> None:
        super().__init__()
        self.conv = ModulatedConv2d(in_channels, out_channels, 3, w_dim, upsample=upsample)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.noise_strength = nn.Parameter(torch.zeros([]))
        self.noise_const = nn.Buffer(torch.randn(1, 1, size[0], size[-1]))

    def forward(
        self, x: Tensor, w: Tensor, noise: Tensor | None, clamp: float | None = None
    ) -> Tensor:
        x, scale = self.conv(x, w, ACTIVATION_GAIN)
        bias = (self.bias * ACTIVATION_GAIN).to(x.dtype)[None, :, None, None]
        if noise is not None:
            noise = (noise * (self.noise_strength * ACTIVATION_GAIN)).to(x.dtype)
        return clamped(scaled_activation(x, scale, bias, noise), clamp)


class ToRGB(nn.Module):
    """1x1 modulated convolution without demodulation, [N, C, H, W] -> [N, channels, H, W].

    The output has the precision of the parameters.
    """

    def __init__(self, in_channels: int, channels: int, w_dim: int) -> None:
        super().__init__()
        self.conv = ModulatedConv2d(in_channels, channels, 1, w_dim, demodulate=False)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, w: Tensor, clamp: float | None = None) -> Tensor:
        rgb, scale = self.conv(x, w)
        rgb, bias = rgb.to(self.bias.dtype), self.bias[None, :, None, None]
        if scale is None:
            return clamped(rgb + bias, clamp)
        return clamped(torch.addcmul(bias, rgb, scale), clamp)


class SynthesisBlock(nn.Module):
    """One resolution: an upsampling layer (absent in the `first` block), a layer, and ToRGB, whose
    output is added to the upsampled image of the previous resolutions.

    `alpha` scales this resolution's contribution to the image; the first block ignores it.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        w_dim: int,
        size: tuple[int, int],
        channels: int,
        *,
        first: bool,
    ) -> None:
        super().__init__()
        self.first = (
            None if first else StyledLayer(in_channels, out_channels, w_dim, *size, upsample=True)
        )
        self.second = StyledLayer(out_channels, out_channels, w_dim, *size)
        self.to_rgb = ToRGB(out_channels, channels, w_dim)

    @property
    def layers(self) -> list[StyledLayer]:
        """The layers of this resolution, in order."""
        return [layer for layer in (self.first, self.second) if layer is not None]

    def forward(
        self,
        x: Tensor,
        image: Tensor | None,
        ws: Sequence[Tensor],
        noise: Sequence[Tensor | None],
        clamp: float | None = None,
        alpha: Alpha = 1.0,
    ) -> tuple[Tensor, Tensor]:
        for layer, w, layer_noise in zip(self.layers, ws[:-1], noise, strict=True):
            x = layer(x, w, layer_noise, clamp)
        rgb = self.to_rgb(x, ws[-1], clamp)
        if image is None:
            return x, rgb
        return x, upsample_fir(image) + (rgb if is_one(alpha) else rgb * alpha)


class DiscriminatorBlock(nn.Module):
    """Two 3x3 convolutions, the second of which halves H and W, and if `residual` a 1x1 skip.

    With the skip, both branches are multiplied by sqrt(0.5). `clamp` (for the second one
    times this factor) bounds the 3x3 convolutions' outputs, not the skip's, as in NVIDIA's code.
    """

    def __init__(self, in_channels: int, out_channels: int, *, residual: bool) -> None:
        super().__init__()
        self.gain = math.sqrt(0.5) if residual else 1.0
        self.first = EqualizedConv2d(in_channels, in_channels, 3)
        self.second = EqualizedConv2d(in_channels, out_channels, 3, downsample=True, gain=self.gain)
        skip = None
        if residual:
            skip = EqualizedConv2d(
                in_channels,
                out_channels,
                1,
                downsample=True,
                bias=False,
                activation=False,
                gain=self.gain,
            )
        self.skip = skip

    def forward(self, x: Tensor, clamp: float | None = None) -> Tensor:
        y = clamped(
            self.second(clamped(self.first(x), clamp)), None if clamp is None else clamp * self.gain
        )
        return y if self.skip is None else self.skip(x).add_(y)


def minibatch_std(x: Tensor, group: int, *, strided: bool = False) -> Tensor:
    """Append to `x` a map with the standard deviation over groups of samples.

    It is sqrt(var + 1e-8), averaged over channels and pixels: [N, C, H, W] -> [N, C + 1, H, W].

    Args:
        group: Number of consecutive samples of a group.
        strided: Group j has the samples j, j + N / group, j + 2 N / group, ... instead, as in
            NVIDIA's code.

    Raises:
        ValueError: N is no multiple of `group`.
    """
    n, c, h, w = x.shape
    if n % group:
        raise ValueError(
            f"minibatch standard deviation: a batch of {n} does not hold whole groups of {group}"
        )
    if strided:
        order = torch.arange(n, device=x.device).view(group, n // group).t().flatten()
        back = torch.arange(n, device=x.device).view(n // group, group).t().flatten()
        return minibatch_std(x[order], group)[back]
    grouped = x.reshape(n // group, group, c, h, w)
    # On the CPU torch.var over an inner dimension was measured to be 20 times slower.
    variance = (grouped - grouped.mean(dim=1, keepdim=True)).square().mean(dim=1)
    std = (variance + 1e-8).sqrt().mean(dim=(1, 2, 3))
    return torch.cat(
        [x, std.repeat_interleave(group)[:, None, None, None].expand(n, 1, h, w)], dim=1
    )
