"""Layers that the GAN's networks share: equalised learning rate, the scaled activation, FIR
resampling.

Formulas: Karras et al., StyleGAN (1812.04948) and StyleGAN2 (1912.04958).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.models.layers.convolution import Geometry, convolve
from duetgan.models.layers.convolution import compute_dtype as compute_dtype

LEAKY_SLOPE = 0.2
ACTIVATION_GAIN = math.sqrt(2)


def normalize_second_moment(x: Tensor) -> Tensor:
    """Scale each row of `x` [N, F] to unit mean square (StyleGAN2, mapping network's input)."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-8)


class EqualizedLinear(nn.Module):
    """Fully connected layer with equalised learning rate.

    w ~ N(0, 1) / lr_multiplier; at run time w * lr_multiplier / sqrt(fan_in) and b * lr_multiplier.
    Input [N, in_features], output [N, out_features]; with `activation` the output is leaky_relu *
    sqrt(2).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias_init: float = 0.0,
        lr_multiplier: float = 1.0,
        activation: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / lr_multiplier)
        self.bias = nn.Parameter(torch.full([out_features], bias_init / lr_multiplier))
        self.weight_gain = lr_multiplier / math.sqrt(in_features)
        self.bias_gain = lr_multiplier
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        # leaky ReLU is positively homogeneous, so its gain goes into the product
        gain = ACTIVATION_GAIN if self.activation else 1.0
        x = torch.addmm(
            self.bias, x, self.weight.t(), beta=self.bias_gain * gain, alpha=self.weight_gain * gain
        )
        return F.leaky_relu(x, LEAKY_SLOPE, inplace=True) if self.activation else x


class EqualizedConv2d(nn.Module):
    """Convolution with equalised learning rate, bias, and optional FIR downsampling by 2 before it.

    Input [N, in_channels, H, W]; output [N, out_channels, H, W] or [N, out_channels, H/2, W/2].
    `gain` scales the output (sqrt(0.5) on residual branches); it folds into the weights like the
    activation's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        downsample: bool = False,
        bias: bool = True,
        activation: bool = True,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.downsample = downsample
        self.activation = activation
        self.gain = gain * (ACTIVATION_GAIN if activation else 1.0)
        self.weight_gain = 1 / math.sqrt(in_channels * kernel_size**2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * (self.weight_gain * self.gain)
        bias = None if self.bias is None else self.bias * self.gain
        kernel_size = weight.shape[-1]
        if self.downsample and kernel_size == 1:
            x = convolve(downsample_fir(x), weight, bias, Geometry())
        elif self.downsample:
            # blur at full resolution, then the convolution strides; the output is H/2 because of
            # the FIR's padding
            x = convolve(
                blur_fir(x, padding=kernel_size // 2 + 1), weight, bias, Geometry(stride=2)
            )
        else:
            x = convolve(x, weight, bias, Geometry(padding=kernel_size // 2))
        # in place: no derivative of a convolution looks at its output
        return F.leaky_relu(x, LEAKY_SLOPE, inplace=True) if self.activation else x


class _ScaledActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
        y = torch.addcmul(bias, x, scale)
        if noise is not None:
            y.add_(noise)
        y = F.leaky_relu(y, LEAKY_SLOPE, inplace=True)
        ctx.save_for_backward(x, scale, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, y = ctx.saved_tensors
        # y has the sign of what it was made from
        grad = torch.ops.aten.leaky_relu_backward(grad, y, LEAKY_SLOPE, True)
        wanted = ctx.needs_input_grad
        return (
            grad * scale if wanted[0] else None,
            (grad * x).sum(dim=(2, 3), keepdim=True) if wanted[1] else None,
            grad.sum(dim=(0, 2, 3), keepdim=True) if wanted[2] else None,
            grad.sum(dim=1, keepdim=True) if wanted[3] else None,
        )


def scaled_activation(x: Tensor, scale: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    """leaky_relu(x * scale + bias + noise), what follows a modulated convolution, with one
    intermediate in memory.

    x [N, C, H, W], scale [N, C, 1, 1], bias [1, C, 1, 1], noise [N, 1, H, W] or None, of one dtype.
    Differentiable any number of times; autograd's own derivative of addcmul passes over the image
    once more.
    """
    if torch.jit.is_tracing():  # TensorBoard's graph: the tracer cannot look into a node of our own
        x = torch.addcmul(bias, x, scale)
        return F.leaky_relu(x if noise is None else x + noise, LEAKY_SLOPE)
    return _ScaledActivation.apply(x, scale, bias, noise)


def pointwise(x: Tensor, filters: Tensor) -> Tensor:
    """1x1 convolution by each sample's own filters: x [N, I, H, W], filters [N, O, I] -> [N, O, H,
    W] in x's layout.
    """
    # the product in the layout of x, so that its gradient has that layout, too
    if x.is_contiguous(memory_format=torch.channels_last):
        n, _, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).flatten(1, 2)  # [N, H W, I], a view
        return torch.bmm(rows, filters.transpose(1, 2)).view(n, h, w, -1).permute(0, 3, 1, 2)
    return torch.bmm(filters, x.flatten(2)).unflatten(2, x.shape[2:])


# --- FIR resampling  The low-pass is [1, 3, 3, 1] x [1, 3, 3, 1]. It is symmetric, so each of the
# three operations is the transpose of another one: a blur that of a blur, downsampling that of
# upsampling. Their gradients are written as that, and in turn have gradients. Autograd's own
# derivatives of the convolutions below would compute gradients of the constant taps, fall into slow
# kernels (the backward of a strided depthwise convolution, bf16 on the CPU: 16 times slower) and,
# for the second derivative, into a loop over the channels.

TAPS = (1.0, 3.0, 3.0, 1.0)
ODD_TAPS = (1.0, 2.0, 1.0)  # [1, 2, 1] * [1, 1] = [1, 3, 3, 1]
TRANSPOSED = {"blur": "blur", "down": "up", "up": "down"}  # whose matrix is the transposed one

_kept: dict[Any, Tensor] = {}  # kernels: made in each call, they would cost seven launches


def fir_kernel(channels: int, gain: float, like: Tensor, taps: tuple[float, ...] = TAPS) -> Tensor:
    """Depthwise kernel [channels, 1, k, k]: the outer product of k taps, sum `gain`, in `like`'s
    dtype and device.
    """
    make = _make_kernel if torch.compiler.is_dynamo_compiling() else constant_kernel
    return make(gain, taps, like.dtype, like.device).expand(channels, 1, -1, -1)


def _make_kernel(
    gain: float, taps: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[1, 1, k, k], by fills: nothing is copied from the host. Graphs of torch.compile make theirs
    so: what they look for outside has guards, and of constants torch 2.11 takes only one in a
    graph.
    """
    line = torch.cat([torch.full((1,), tap, dtype=dtype, device=device) for tap in taps])
    return (torch.outer(line, line) * (gain / sum(taps) ** 2))[None, None]


def constant_kernel(
    gain: float, taps: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The same, made once."""
    key = (gain, taps, dtype, device)
    if (kernel := _kept.get(key)) is None:
        with torch.inference_mode(False):
            kernel = _make_kernel(gain, taps, dtype, device)
        if type(kernel) is Tensor:  # and not what torch.export puts in its place
            _kept[key] = kernel
    return kernel


def _run(x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
    """The operation itself. Upsampling with gain 4 is bilinear interpolation, but for the outermost
    rows and columns, beyond which the filter sees zeros: a depthwise transposed convolution is 3
    (fp32) to 40 (bf16) times slower on the CPU.
    """
    if kind == "up":
        x = x if gain == 4 else x * (gain / 4)  # at the low resolution, where it costs least
        with torch.autocast(x.device.type, enabled=False):  # CUDA's would return fp32
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
        for edge in (x[:, :, :1], x[:, :, -1:], x[..., :1], x[..., -1:]):
            edge.mul_(0.75)
        return x
    channels, stride = x.shape[1], 2 if kind == "down" else 1
    if not in_two(x):
        return F.conv2d(
            x, fir_kernel(channels, gain, x), stride=stride, padding=padding, groups=channels
        )
    x = F.conv2d(x, fir_kernel(channels, gain, x, ODD_TAPS), padding=padding, groups=channels)
    x = torch.lerp(x[:, :, :-1:stride], x[:, :, 1::stride], 0.5)
    return torch.lerp(x[..., :-1:stride], x[..., 1::stride], 0.5)


def in_two(x: Tensor) -> bool:
    """Whether 3x3 taps and means of neighbours are faster than 4x4 taps, for which cuDNN has no
    kernel of its own: 70 % of StyleGAN2's step on an H200 (docs/measurements/gpu.md). Not on the
    CPU.
    """
    return x.is_cuda


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
    """FIR with zero padding, 0 to 3 pixels; [N, C, H, W] -> [N, C, H + 2 padding - 3, ...]."""
    return _resample(x, "blur", gain, padding)


def downsample_fir(x: Tensor) -> Tensor:
    """Halve even H and W after the FIR low-pass, zero padding; [N, C, H, W] -> [N, C, H/2, W/2]."""
    return _resample(x, "down", 1.0, 1)


def upsample_fir(x: Tensor) -> Tensor:
    """Double H and W: zero insertion, then the FIR with gain 4 (2 per axis); [N, C, H, W] -> [N, C,
    2H, 2W].
    """
    return _resample(x, "up", 4.0, 1)
