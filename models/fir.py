"""FIR resampling with the low-pass [1, 3, 3, 1] x [1, 3, 3, 1] (StyleGAN2, 1912.04958), differentiable any number of
times.

The filter is symmetric, so each of the three operations is the transpose of another one: a blur that of a blur,
downsampling that of upsampling. Their gradients are written as that, and in turn have gradients. Autograd's own
derivatives of the convolutions below would compute gradients of the constant taps, fall into slow kernels (the backward
of a strided depthwise convolution, bf16 on the CPU: 16 times slower) and, for the second derivative, into a loop over
the channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TAPS = (1.0, 3.0, 3.0, 1.0)
TRANSPOSED = {"blur": "blur", "down": "up", "up": "down"}  # whose matrix is the transposed one

_kept: dict[Any, Tensor] = {}  # kernels: made in each call, they would be copied from the host, and waited for


def fir_kernel(channels: int, gain: float, like: Tensor, taps: tuple[float, ...] = TAPS) -> Tensor:
    """Depthwise kernel [channels, 1, k, k]: the outer product of k taps, sum `gain`, in `like`'s dtype and device."""
    key = (gain, taps, like.dtype, like.device)
    kernel = _kept.get(key)
    if kernel is None:
        with torch.inference_mode(False):
            line = torch.tensor(taps, dtype=like.dtype, device=like.device)
            kernel = (torch.outer(line, line) * (gain / sum(taps) ** 2))[None, None]
        if type(kernel) is Tensor:  # and not what torch.export puts in its place
            _kept[key] = kernel
    return kernel.expand(channels, 1, -1, -1)


def _run(x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
    """The operation itself. Upsampling with gain 4 is bilinear interpolation, but for the outermost rows and columns,
    beyond which the filter sees zeros: a depthwise transposed convolution is 3 (fp32) to 40 (bf16) times slower on the
    CPU.
    """
    if kind != "up":
        stride = 2 if kind == "down" else 1
        return F.conv2d(x, fir_kernel(x.shape[1], gain, x), stride=stride, padding=padding, groups=x.shape[1])
    if gain != 4:
        x = x * (gain / 4)  # at the low resolution, where it costs least
    x = F.interpolate(x, scale_factor=2, mode="bilinear")
    for edge in (x[:, :, :1], x[:, :, -1:], x[..., :1], x[..., -1:]):
        edge.mul_(0.75)
    return x


class _Resample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
        ctx.operation = (kind, gain, padding)
        return _run(x, kind, gain, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kind, gain, padding = ctx.operation
        if kind == "blur":
            padding = len(TAPS) - 1 - padding
        return _resample(grad, TRANSPOSED[kind], gain, padding), None, None, None


def _resample(x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
    # without a graph to build, plain operators: what exports and compiles sees nothing of our own
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        return _Resample.apply(x, kind, gain, padding)
    return _run(x, kind, gain, padding)


def blur_fir(x: Tensor, *, padding: int, gain: float = 1.0) -> Tensor:
    """FIR with zero padding, 0 to 3 pixels; [N, C, H, W] -> [N, C, H + 2 padding - 3, ...].

    Raises ValueError for another padding.
    """
    if not 0 <= padding < len(TAPS):
        raise ValueError(f"blur: padding {padding} must be 0 to {len(TAPS) - 1}")
    return _resample(x, "blur", gain, padding)


def downsample_fir(x: Tensor) -> Tensor:
    """Halve even H and W after the FIR low-pass, zero padding; [N, C, H, W] -> [N, C, H/2, W/2].

    Raises ValueError for odd sizes.
    """
    if x.shape[2] % 2 or x.shape[3] % 2:
        raise ValueError(f"downsampling: {x.shape[2]} x {x.shape[3]} pixels are not even")
    return _resample(x, "down", 1.0, 1)


def upsample_fir(x: Tensor) -> Tensor:
    """Double H and W: zero insertion, then the FIR with gain 4 (2 per axis); [N, C, H, W] -> [N, C, 2H, 2W]."""
    return _resample(x, "up", 4.0, 1)
