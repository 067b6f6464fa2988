"""Strided convolutions of maps that are narrower than their stride, in bf16 on CPUs.

oneDNN (torch 2.15, AVX-512) leaves parts of such a convolution's weight gradient as the memory was: of 3x3 with
stride 2 those taps that see nothing but padding. Zeros beside the map are padding like any other, so the output stays
as it is. Covered are odd kernels padded by half of them with zeros, as in torchvision's networks; even ones are not.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def widen_narrow_maps(model: nn.Module) -> None:
    """From now on the model's strided convolutions pad, in bf16 on CPUs, maps narrower than the stride up to it."""
    for module in model.modules():
        if not (isinstance(module, nn.Conv2d) and isinstance(module.padding, tuple)) or module.padding_mode != "zeros":
            continue
        stays_narrow = module.kernel_size[1] == 2 * module.padding[1] + 1  # the output has 1 px either way
        if module.stride[1] > 1 and stays_narrow:
            module.register_forward_pre_hook(_widened)


def _widened(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    (x,), stride = inputs, module.stride[1]  # type: ignore[index]
    if x.shape[-1] >= stride or not torch.is_autocast_enabled("cpu"):
        return None
    return (F.pad(x, (0, stride - x.shape[-1])),)
