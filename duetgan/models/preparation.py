"""Prepare images for classifiers: change their size and channels, and normalise them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.utils.image_spec import ImageSpec


def normalisation(
    channels: int, means: Sequence[float], stds: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return scale and shift, each [1, channels, 1, 1], that normalise images x in [-1, 1].

    scale * x + shift = ((x + 1) / 2 - mean) / std. Grey images, with or without alpha, use the
    averages of `means` and `stds`. A fourth channel uses the first values again.
    """
    mean = torch.tensor(means, dtype=torch.float64)
    std = torch.tensor(stds, dtype=torch.float64)
    if channels < 3:
        mean = mean.mean(0, keepdim=True)
        std = std.mean(0, keepdim=True)
    index = torch.arange(channels) % len(mean)
    scale = 0.5 / std[index]
    shift = (0.5 - mean[index]) / std[index]
    dtype = torch.get_default_dtype()
    return scale.to(dtype).view(1, -1, 1, 1), shift.to(dtype).view(1, -1, 1, 1)


def scaled(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Scale images [N, C, H, W] to `size` px, bilinearly with antialiasing.

    `size` is (height, width), or the shorter side if the aspect ratio must be preserved. The
    computation is in float32 at least, because torch has no bf16 kernel for CPUs.
    """
    height, width = map(int, images.shape[-2:])  # tensors while a graph is traced
    if not isinstance(size, tuple):
        shorter = min(height, width)
        size = (round(height * size / shorter), round(width * size / shorter))
    if (height, width) == size:
        return images
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    return F.interpolate(wide, size=size, mode="bilinear", align_corners=False, antialias=True).to(
        images.dtype
    )


def fit_images(images: Tensor, resolution: int | str, channels: int) -> Tensor:
    """Convert images [N, C, H, W] in [-1, 1] to a classifier's `resolution` and `channels`.

    The conversion is differentiable. Images are scaled bilinearly, without preserving the aspect
    ratio. Grey is repeated to `channels`; RGB becomes grey by the weights .299, .587, .114 (ITU-R
    601).
    """
    images = scaled(images, ImageSpec.of(channels, resolution).size)
    if channels == 1 and images.shape[1] == 3:
        images = (images * images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(
            1, keepdim=True
        )
    return images.expand(-1, channels, -1, -1)
