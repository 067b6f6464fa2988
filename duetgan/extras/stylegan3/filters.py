"""Low-pass filters of StyleGAN3 (2106.12423, appendix C), and the filtered leaky ReLU.

They consist of plain operators, which run on every device. A signal with sampling rate s and cutoff
f_c is upsampled, activated, clamped, and downsampled. The downsampling filter removes the new
frequencies of the activation before they alias. The gradient of a filter is computed by the
transposed filter, which has a gradient, too.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.models.layers import ACTIVATION_GAIN, LEAKY_SLOPE, clamped


def lowpass(
    taps: int, cutoff: float, half_width: float, rate: float, *, radial: bool = False
) -> np.ndarray:
    """Return a Kaiser-windowed low-pass filter of unit gain, float64.

    Args:
        taps: Number of samples along an axis; must be an even number for radial filters.
        cutoff: f_c, in cycles per image.
        half_width: f_h, half of the transition band.
        rate: Sampling rate of the filter, in samples per image.
        radial: If True, return a radially symmetric filter [taps, taps] (a jinc), else a filter
            [taps] (a sinc), which is applied along both axes.
    """
    # Imported here, because scipy is slow to import and every command reads the registry.
    from scipy import signal, special

    positions = (np.arange(taps) - (taps - 1) / 2) / rate
    window = np.kaiser(taps, signal.kaiser_beta(signal.kaiser_atten(taps, 4 * half_width / rate)))
    if radial:
        radii = np.hypot(positions[:, None], positions)
        response = special.j1(2 * math.pi * cutoff * radii) / radii * np.outer(window, window)
    else:
        response = np.sinc(2 * cutoff * positions) * window
    return response / response.sum()


class Resampler(torch.nn.Module):
    """A change of the sampling rate by an integer factor, with a filter.

    The filter is [k], applied along both axes, or [k, k]. The input is [N, C, H, W].

    If `up` is True, the samples of the input are `factor` apart in the output, and the gain of the
    filter is factor^2. The output has height factor (H - 1) + k. If `up` is False, only every
    `factor`-th output is computed. The output has height (H - k) / factor + 1, and `factor` must
    divide H - k. The width changes in the same way.
    """

    def __init__(self, response: np.ndarray, factor: int, *, up: bool) -> None:
        super().__init__()
        self.factor = factor
        self.up = up
        gain = factor**response.ndim if up else 1
        # Designed from the config, so it is not a part of checkpoints.
        self.kernel = torch.nn.Buffer(
            torch.as_tensor(gain * response, dtype=torch.float32), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.to(x.dtype)
        if kernel.ndim == 2:
            return _filter(x, kernel, (self.factor, self.factor), self.up)
        x = _filter(x, kernel[:, None], (self.factor, 1), self.up)
        return _filter(x, kernel[None], (1, self.factor), self.up)


Stride = tuple[int, int]


def _run(x: Tensor, kernel: Tensor, stride: Stride, up: bool) -> Tensor:
    run = F.conv_transpose2d if up else F.conv2d
    channels = x.shape[1]
    return run(x, kernel.expand(channels, 1, -1, -1), stride=stride, groups=channels)


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "Context", x: Tensor, kernel: Tensor, stride: Stride, up: bool) -> Tensor:
        ctx.save_for_backward(kernel)
        ctx.filter = (stride, up)
        return _run(x, kernel, stride, up)

    @staticmethod
    def backward(ctx: "Context", grad: Tensor) -> tuple[Tensor | None, ...]:
        (kernel,) = ctx.saved_tensors
        stride, up = ctx.filter
        return _filter(grad, kernel, stride, not up), None, None, None


class Context(torch.autograd.function.FunctionCtx):
    """The type of `_Filter`'s context, with its attributes."""

    saved_tensors: tuple[Tensor, ...]
    filter: tuple[Stride, bool]


def _filter(x: Tensor, kernel: Tensor, stride: Stride, up: bool) -> Tensor:
    # Without a gradient plain operators run, so that exported graphs have no custom function.
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        return _Filter.apply(x, kernel, stride, up)
    return _run(x, kernel, stride, up)


def filtered_leaky_relu(
    x: Tensor,
    up: Resampler,
    down: Resampler,
    padding: int,
    clamp: float | None,
) -> Tensor:
    """Return leaky_relu(x) * sqrt(2), computed at a higher sampling rate.

    `up` brings the signal to the rate of the activation, `down` brings it to the rate of the
    result.

    Args:
        x: [N, C, H, W].
        up, down: The resamplers before and after the activation.
        padding: Number of zeros to add at each edge after `up`. If it is negative, samples are
            removed.
        clamp: Largest absolute value of the activations; None: no limit.
    """
    x = F.pad(up(x), [padding] * 4)
    return down(clamped(F.leaky_relu(x, LEAKY_SLOPE) * ACTIVATION_GAIN, clamp))
