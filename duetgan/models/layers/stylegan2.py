"""Layers of StyleGAN2's networks (1912.04958), except those of the synthesis network.

They are the mapping network, the discriminator's blocks, and the minibatch standard deviation.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from duetgan.models.gan import floor_to_two, one_hot
from duetgan.models.layers import (
    EqualizedConv2d,
    EqualizedLinear,
    normalize_second_moment,
)
from duetgan.models.layers.fp16 import LayerPrecision
from duetgan.models.layers.scaling import group_std


def channels_at(resolution: int, base: int, maximum: int) -> int:
    """Return the number of channels at a resolution: min(base / resolution, maximum), at least 1.

    The resolution is first rounded down to a power of two.
    """
    return max(1, min(base // floor_to_two(resolution), maximum))


class MappingNetwork(nn.Module):
    """StyleGAN2's mapping network, which maps z [N, z_dim] and labels to w [N, w_dim].

    Labels are int64 [N], or class weights [N, classes]. z and the label's embedding are each
    normalised to unit mean square, then concatenated. The network runs without autocast, in the
    precision of its parameters.
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

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            x = normalize_second_moment(z)
            if self.embed is not None:
                embedded = self.embed(one_hot(labels, self.embed.weight.shape[1], z.dtype))
                x = torch.cat([x, normalize_second_moment(embedded)], dim=1)
            return self.layers(x)


class FromRGB(EqualizedConv2d):
    """1x1 convolution of images, [N, channels, H, W] -> [N, width, H, W]."""

    def __init__(self, channels: int, width: int, precision: LayerPrecision) -> None:
        super().__init__(channels, width, 1, precision)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        assert self.precision is not None
        return self.precision.call(super().forward, images)


class DiscriminatorBlock(nn.Module):
    """Two 3x3 convolutions, of which the second halves H and W, and a 1x1 skip if `residual`.

    With a skip, the outputs of both branches are multiplied by sqrt(0.5), and so is the limit of
    the clamp of the second convolution. The output of the skip is not clamped, as in NVIDIA's code.
    """

    def __init__(
        self, in_channels: int, out_channels: int, precision: LayerPrecision, *, residual: bool
    ) -> None:
        super().__init__()
        self.precision = precision
        self.gain = math.sqrt(0.5) if residual else 1.0
        self.first = EqualizedConv2d(in_channels, in_channels, 3, precision)
        self.second = EqualizedConv2d(
            in_channels, out_channels, 3, precision, downsample=True, gain=self.gain
        )
        self.skip = None
        if residual:
            self.skip = EqualizedConv2d(
                in_channels,
                out_channels,
                1,
                precision,
                downsample=True,
                bias=False,
                activation=False,
                gain=self.gain,
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.precision.call(self._forward, x)

    def _forward(self, x: Tensor, clamp: float | None) -> Tensor:
        limit = None if clamp is None else clamp * self.gain
        y = self.second(self.first(x, clamp), limit)
        return y if self.skip is None else self.skip(x).add_(y)


def minibatch_std(x: Tensor, group: int, *, strided: bool = False) -> Tensor:
    """Append to `x` [N, C, H, W] a channel with the standard deviation over a group of samples.

    The value is sqrt(var + 1e-8), averaged over channels and pixels. The result is [N, C + 1, H,
    W].

    Args:
        group: Number of samples in a group. Groups are of consecutive samples.
        strided: If True, group j has the samples j, j + N / group, j + 2 N / group, ... instead, as
            in NVIDIA's code.

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
    std = group_std(x.reshape(n // group, group, c, h, w))
    maps = std[:, None, None, None, None].expand(-1, group, 1, h, w)
    return torch.cat([x, maps.reshape(n, 1, h, w)], dim=1)
