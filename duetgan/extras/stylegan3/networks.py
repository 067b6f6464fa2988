"""StyleGAN3's generator (2106.12423), configurations T (translation) and R (rotation equivariance).

The first style moves and turns Fourier features, which then pass through modulated convolutions.
Each convolution is followed by an upsampling filter, a leaky ReLU and a downsampling filter. No
layer has noise or knows where the edge of the image is.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from duetgan.extras.stylegan3.filters import Resampler, filtered_leaky_relu, lowpass
from duetgan.models.gan import NoiseMode, StyledGenerator, run
from duetgan.models.layers import EqualizedLinear, clamped, compute_dtype
from duetgan.models.layers.convolution import Geometry, convolve, is_penalised
from duetgan.models.layers.fp16 import LayerPrecision
from duetgan.models.layers.stylegan2 import MappingNetwork
from duetgan.models.stylegan2 import GeneratorConfig
from duetgan.utils.config.model import Decay, NonNegativeInt, PositiveInt
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError

FIRST_CUTOFF = 2.0  # f_c of the first layer, in cycles per image
FIRST_STOPBAND = 2**2.1  # f_t of the first layer
LAST_STOPBAND = 2**0.3  # f_t / f_c of the last layers
RESOLUTIONS = [2**k for k in range(3, 13)]  # px
OUTPUT_SCALE = 0.25  # image / last layer's output
FILTER_TAPS = 6  # length of a filter, in samples of the lower rate
OVERSAMPLING = 2  # rate of the activation / the higher rate of the layer's input and output


class GeneratorTConfig(GeneratorConfig):
    """Options of StyleGAN3's generator; the defaults are those of configuration T."""

    # channels of a layer: min(channel_base / (2 cutoff), channel_max)
    channel_base: PositiveInt = 32768
    # apply conv_clamp in every precision, for converted networks that were trained with it
    clamp_always: bool = True
    mapping_layers: Annotated[int, Interval(ge=1, le=100)] = 2  # layers of the mapping network
    w_avg_beta: Decay = 0.998  # decay of the moving mean of w
    layers: Annotated[int, Interval(ge=3, le=100)] = 14  # layers before the last one, ToRGB
    # layers at the end whose cutoff is half the sampling rate
    critical_layers: Annotated[int, Interval(ge=1, le=99)] = 2
    margin: NonNegativeInt = 10  # px by which maps extend beyond each edge of the image
    conv_kernel: Literal[1, 3] = 3  # side of the convolutions' filters
    radial_filters: bool = False  # radially symmetric downsampling, except in critical layers
    magnitude_ema_beta: Decay = 0.999  # decay of the moving means of the layers' squared inputs

    def check(self) -> None:
        super().check()
        if self.critical_layers >= self.layers:
            raise UserError(
                f"generator.critical_layers {self.critical_layers}: give less than the {self.layers} "
                "layers"
            )


class GeneratorRConfig(GeneratorTConfig):
    """Options of StyleGAN3's generator with the defaults of configuration R."""

    # channels of a layer: min(channel_base / (2 cutoff), channel_max)
    channel_base: PositiveInt = 65536
    channel_max: PositiveInt = 1024  # maximum number of channels
    conv_kernel: Literal[1, 3] = 1  # side of the convolutions' filters
    radial_filters: bool = True  # radially symmetric downsampling, except in critical layers


@dataclass(frozen=True)
class Signal:
    """The size of a layer's output, and its spectrum in cycles and samples per image."""

    channels: int
    size: int  # side of the maps, with margins
    rate: int  # sampling rate s
    cutoff: float  # f_c
    half_width: float  # f_h, half of the transition band


def signals(config: GeneratorTConfig, resolution: int | str, channels: int) -> list[Signal]:
    """Describe the output of each layer, the last of which is ToRGB (section 3.2).

    Cutoffs and stopbands grow geometrically up to the critical layers. Raises UserError for a
    resolution that is not a power of two from 8 to 4096.
    """
    if resolution not in RESOLUTIONS or isinstance(resolution, str):
        raise UserError(
            f"StyleGAN3 draws squares of 8, 16, 32, ..., 4096 px, not {resolution}; pack the data with "
            "--size N"
        )
    last_cutoff = resolution / 2
    result: list[Signal] = []
    for layer in range(config.layers + 1):
        exponent = min(layer / (config.layers - config.critical_layers), 1)
        cutoff = FIRST_CUTOFF * (last_cutoff / FIRST_CUTOFF) ** exponent
        stopband = FIRST_STOPBAND * (last_cutoff * LAST_STOPBAND / FIRST_STOPBAND) ** exponent
        rate = 2 ** math.ceil(math.log2(min(2 * stopband, resolution)))
        width = max(1, round(min(config.channel_base / (2 * cutoff), config.channel_max)))
        result.append(
            Signal(
                channels=channels if layer == config.layers else width,
                size=resolution if layer >= config.layers - 1 else rate + 2 * config.margin,
                rate=rate,
                cutoff=cutoff,
                half_width=max(stopband, rate / 2) - cutoff,
            )
        )
    return result


class FourierFeatures(nn.Module):
    """The input of the layers: sines of random frequencies in a disc, which w shifts and turns.

    The buffer `transform`, [3, 3] or [N, 3, 3], shifts and turns the image further. For each point
    of the image, it gives the point of the unmoved image that is shown there. Coordinates are
    homogeneous; their unit is the image's side and their origin is its centre. Runs without
    autocast. Source: appendix F.
    """

    def __init__(self, w_dim: int, signal: Signal) -> None:
        super().__init__()
        self.signal = signal
        angles = 2 * math.pi * torch.rand(signal.channels)
        radii = signal.cutoff * torch.rand(signal.channels).sqrt()
        self.freqs = nn.Buffer(torch.stack([angles.cos() * radii, angles.sin() * radii], dim=1))
        self.phases = nn.Buffer(torch.rand(signal.channels) - 0.5)
        self.transform = nn.Buffer(torch.eye(3))
        self.weight = nn.Parameter(torch.randn(signal.channels, signal.channels))
        self.affine = EqualizedLinear(w_dim, 4)  # cosine, sine, x, y of the motion
        nn.init.zeros_(self.affine.weight)
        with torch.no_grad():
            self.affine.bias[0] = 1

    def forward(self, w: Tensor) -> Tensor:
        """Return the signal [N, channels, size, size] for styles [N, w_dim]."""
        signal = self.signal
        with torch.autocast(w.device.type, enabled=False):
            motion = self.affine(w.to(self.weight.dtype))
            cosine, sine, *shift = (motion / motion[:, :2].norm(dim=1, keepdim=True)).unbind(1)
            rotation = torch.stack([cosine, -sine, sine, cosine], dim=1).unflatten(1, (2, 2))
            transform = self.transform.to(w.device, self.weight.dtype)
            offset = transform[..., :2, 2:] - torch.stack(shift, dim=1)[:, :, None]
            phases = self.phases + (self.freqs @ (rotation @ offset)).squeeze(2)  # [N, C]
            freqs = self.freqs @ (rotation @ transform[..., :2, :2])  # [N, C, 2]
            # A transform that shrinks the image raises frequencies; they fade out above the cutoff.
            excess = freqs.norm(dim=2) - signal.cutoff
            amplitudes = (1 - excess / (signal.rate / 2 - signal.cutoff)).clamp(0, 1)
            points = torch.arange(signal.size, device=w.device, dtype=w.dtype)
            points = (points + 0.5 - signal.size / 2) / signal.rate
            along_x = freqs[:, :, :1] * points  # [N, C, size]
            along_y = freqs[:, :, 1:] * points + phases[:, :, None]
            turns = along_y[:, :, :, None] + along_x[:, :, None]
            waves = torch.sin(2 * math.pi * turns) * amplitudes[:, :, None, None]
            return F.conv2d(waves, (self.weight / math.sqrt(signal.channels))[:, :, None, None])


Filter = tuple[int, np.ndarray]  # factor of the sampling rate, and the filter


def design_filters(source: Signal, target: Signal, *, radial: bool) -> tuple[Filter, Filter]:
    """Return the upsampling filter before an activation and the downsampling filter after it.

    Each is a pair: the factor of the sampling rate, and the filter. The activation is in the layer
    from the signal `source` to the signal `target`. If `radial` is True, the downsampling filter is
    radially symmetric.
    """
    rate = OVERSAMPLING * max(source.rate, target.rate)
    up = rate // source.rate
    down = rate // target.rate
    up_filter = lowpass(FILTER_TAPS * up, source.cutoff, source.half_width, rate)
    down_filter = lowpass(FILTER_TAPS * down, target.cutoff, target.half_width, rate, radial=radial)
    return (up, up_filter), (down, down_filter)


class Layer(nn.Module):
    """A modulated convolution, a bias and a filtered leaky ReLU, from signal `source` to `target`.

    If `is_rgb` is True, the convolution is 1x1, without demodulation and activation. If
    `is_critical` is True, the filters are not radially symmetric. Inputs are divided by the root of
    `magnitude_ema`, the moving mean of their squares.
    """

    def __init__(
        self,
        config: GeneratorTConfig,
        source: Signal,
        target: Signal,
        precision: LayerPrecision,
        *,
        is_critical: bool,
        is_rgb: bool,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.is_rgb = is_rgb
        side = 1 if is_rgb else config.conv_kernel
        self.affine = EqualizedLinear(config.w_dim, source.channels, bias_init=1.0)
        self.weight = nn.Parameter(torch.randn(target.channels, source.channels, side, side))
        self.bias = nn.Parameter(torch.zeros(target.channels))
        self.magnitude_ema = nn.Buffer(torch.ones([]))
        if is_rgb:
            return
        radial = config.radial_filters and not is_critical
        (up, up_filter), (down, down_filter) = design_filters(source, target, radial=radial)
        self.up = Resampler(up_filter, up, up=True)
        self.down = Resampler(down_filter, down, up=False)
        # Both ends of the upsampled maps change equally, so that the image stays in the centre.
        upsampled = up * (source.size + side - 2) + len(up_filter)
        self.padding = (down * (target.size - 1) + len(down_filter) - upsampled) // 2

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.precision.call(self._forward, x, w)

    def _forward(self, x: Tensor, w: Tensor, clamp: float | None) -> Tensor:
        dtype = compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            style = self.affine(w.to(self.weight.dtype))
            weight: Tensor = self.weight
            if self.is_rgb:
                style = style / math.sqrt(weight.shape[1])
            else:
                # Unit filters and styles of unit mean square stay in fp16's range; the
                # demodulation cancels both norms.
                energy = weight.square().sum(dim=(1, 2, 3), keepdim=True)
                weight = weight * (energy + 1e-8).rsqrt()
                style = style * (style.square().mean(dim=1, keepdim=True) + 1e-8).rsqrt()
                energy = style.square() @ weight.square().sum(dim=(2, 3)).t()
                scale = (energy + 1e-8).rsqrt().to(dtype)[:, :, None, None]
            style = (style * self.magnitude_ema.rsqrt()).to(dtype)[:, :, None, None]
            bias = self.bias.to(dtype)[:, None, None]
        x = convolve(x.to(dtype) * style, weight, None, Geometry(padding=weight.shape[-1] - 1))
        if self.is_rgb:
            return clamped(x + bias, clamp)
        return filtered_leaky_relu(x * scale + bias, self.up, self.down, self.padding, clamp)


class Stylegan3Generator(StyledGenerator):
    """StyleGAN3's generator: a mapping network, Fourier features and layers."""

    def __init__(
        self, config: GeneratorTConfig, *, resolution: int | str, channels: int, classes: int
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
        outputs = signals(config, resolution, channels)
        self.input = FourierFeatures(config.w_dim, outputs[0])
        self.layers = nn.ModuleList(
            Layer(
                config,
                outputs[max(0, number - 1)],
                output,
                LayerPrecision(config, output.rate, self.spec.side),
                is_critical=number >= config.layers - config.critical_layers,
                is_rgb=number == config.layers,
            )
            for number, output in enumerate(outputs)
        )
        self.num_ws = config.layers + 2
        self.w_avg = nn.Buffer(torch.zeros(config.w_dim))
        # Sums of the layers' mean squared inputs over the samples since the last update, then the
        # number of these samples.
        self.squares = nn.Buffer(torch.zeros(config.layers + 2), persistent=False)

    def synthesis(self, ws: Tensor, noise: list[Tensor] | NoiseMode) -> Tensor:
        """Return images [N, channels, H, W] for styles [N, num_ws, w_dim]; `noise` is not used."""
        # Only passes for the generator's losses count, so that the means of the squares are the
        # same for any micro-batch size.
        is_observed = self.training and torch.is_grad_enabled() and not is_penalised()
        squares: list[Tensor] = []
        x = self.input(ws[:, 0])
        for layer, w in zip(self.layers, ws[:, 1:].unbind(1), strict=True):
            if is_observed:
                squares.append(x.detach().to(self.squares.dtype).square().mean())
            x = run(layer, x, w, recompute=self.config.activation_checkpointing)
        if is_observed:
            self.squares.add_(torch.stack([*squares, torch.ones_like(squares[0])]), alpha=len(ws))
        return self.finished(x.to(self.w_avg.dtype) * OUTPUT_SCALE)

    @torch.no_grad()
    def update_w_avg(self, w_mean: Tensor) -> None:
        """Update `w_avg` and each layer's `magnitude_ema`.

        `magnitude_ema` is updated with the layer's inputs in the passes since the last call.
        """
        super().update_w_avg(w_mean)
        *sums, count = collectives.all_reduce_sum_(self.squares).unbind()
        weight = (1 - self.config.magnitude_ema_beta) * (count > 0)
        for layer, total in zip(self.layers, sums, strict=True):
            magnitude: Tensor = layer.magnitude_ema  # type: ignore[assignment]
            mean = total / count.clamp_min(1)
            # The update of a step with an overflow is masked, too.
            magnitude.lerp_(torch.where(mean.isfinite(), mean, magnitude), weight)
        self.squares.zero_()

    def styled_layers(self) -> list[nn.Module]:
        """Return an empty list, because no layer takes noise."""
        return []
