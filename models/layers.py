"""Layers that the GAN's networks share: equalised learning rate, FIR resampling, the scaled activation.

Formulas: Karras et al., StyleGAN (1812.04948) and StyleGAN2 (1912.04958).
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAKY_SLOPE = 0.2
ACTIVATION_GAIN = math.sqrt(2)


def normalize_second_moment(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Scale each row of `x` [N, F] to unit mean square (StyleGAN2, mapping network's input)."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that convolutions of `x` run in: autocast's where it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class EqualizedLinear(nn.Module):
    """Fully connected layer with equalised learning rate.

    w ~ N(0, 1) / lr_multiplier; at run time w * lr_multiplier / sqrt(fan_in) and b * lr_multiplier. Input [N,
    in_features], output [N, out_features]; with `activation` the output is leaky_relu * sqrt(2).
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
        # leaky ReLU is positively homogeneous, so its gain goes into the small weights instead of the output
        gain = ACTIVATION_GAIN if self.activation else 1.0
        x = F.linear(x, self.weight * (self.weight_gain * gain), self.bias * (self.bias_gain * gain))
        return F.leaky_relu(x, LEAKY_SLOPE) if self.activation else x


class EqualizedConv2d(nn.Module):
    """Convolution with equalised learning rate, bias, and optional FIR downsampling by 2 before it.

    Input [N, in_channels, H, W]; output [N, out_channels, H, W] or [N, out_channels, H/2, W/2]. `gain` scales the
    output (sqrt(0.5) on residual branches); it folds into the weights like the activation's.
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
            x = F.conv2d(downsample_fir(x), weight, bias)
        elif self.downsample:
            # blur at full resolution, then the convolution strides; the output is H/2 because of the FIR's padding
            x = F.conv2d(blur_fir(x, padding=kernel_size // 2 + 1), weight, bias, stride=2)
        else:
            x = F.conv2d(x, weight, bias, padding=kernel_size // 2)
        return F.leaky_relu(x, LEAKY_SLOPE) if self.activation else x


@functools.lru_cache(maxsize=64)
def _fir_taps(gain: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, 4, 4], kept: making it anew in each call would copy from the host, and wait for the device, every step."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=dtype, device=device)
    return (torch.outer(taps, taps) * (gain / 64))[None, None]


def fir_kernel(channels: int, gain: float, like: Tensor) -> Tensor:
    """Depthwise kernel [channels, 1, 4, 4]: the outer product of [1, 3, 3, 1], sum `gain`, in `like`'s dtype and
    device.
    """
    with torch.inference_mode(False):
        return _fir_taps(gain, like.dtype, like.device).expand(channels, 1, 4, 4)


def blur_fir(x: Tensor, *, padding: int, gain: float = 1.0) -> Tensor:
    """FIR [1, 3, 3, 1] x [1, 3, 3, 1] with zero padding; [N, C, H, W] -> [N, C, H + 2 padding - 3, ...].

    A stride-1 depthwise convolution: strided ones in bf16 were measured 16 times slower on the CPU.
    """
    return F.conv2d(x, fir_kernel(x.shape[1], gain, x), padding=padding, groups=x.shape[1])


def downsample_fir(x: Tensor) -> Tensor:
    """Halve H and W after the FIR low-pass, zero padding; [N, C, H, W] -> [N, C, H/2, W/2]."""
    return blur_fir(x, padding=1)[:, :, ::2, ::2]


def upsample_fir(x: Tensor) -> Tensor:
    """Double H and W: zero insertion, then the FIR with gain 4 (2 per axis); [N, C, H, W] -> [N, C, 2H, 2W]."""
    kernel = fir_kernel(x.shape[1], 4.0, x)
    return F.conv_transpose2d(x, kernel, stride=2, padding=1, groups=x.shape[1])
