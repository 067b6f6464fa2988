"""A trained network used otherwise than it was trained: BatchNorm folded, a reduced precision,
several views.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError
from torch.nn.modules.batchnorm import _BatchNorm

from duetgan.models.classifier import Classifier

Fixed = Literal["fp32", "bf16", "fp16"]


def native(device: torch.device) -> Fixed:
    """The reduced precision in which an accelerator is fast."""
    # CUDA's, ROCm's and XPU's; not MPS's
    says = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return "bf16" if says is None or says(including_emulation=False) else "fp16"


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of `model` in evaluation mode whose convolutions do their BatchNorm's work; same
    outputs within rounding.

    A BatchNorm that follows no convolution stays, and so do all of a network that torch.fx cannot
    trace.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if not any(isinstance(module, _BatchNorm) for module in copied.modules()):
        return copied  # nothing to fold, and R3GAN's layers cannot be traced
    try:
        return fuse(copied).eval()
    except TraceError:
        return copied


def faster(
    classifier: Classifier, device: torch.device, *, precision: str, fold: bool, tta: str = "off"
) -> Classifier:
    """A trained classifier on `device` whose logits, and nothing else of it, come with BatchNorm
    folded or in a `precision`, whoever calls it. auto: what an accelerator is fast in; on a CPU
    fp32, since a few images do not pay for the measurement that would tell. `tta`: flip or shift,
    they are the mean of several views' (`over_views`). The one that is given stays as it was; they
    share their weights.
    """
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else native(device)
    fast, network = copy.copy(classifier), fold_batchnorm(classifier) if fold else classifier
    if precision != "fp32":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        fast.forward = partial(_reduced, network, device.type, dtype)  # type: ignore[method-assign]
    elif fold:
        fast.forward = network.__call__  # type: ignore[method-assign]
    if tta != "off":
        fast.forward = partial(over_views, fast.forward, tta == "shift")  # type: ignore[method-assign]
    return fast


def over_views(logits: Callable[[Tensor], Tensor], shifted: bool, images: Tensor) -> Tensor:
    """The mean logits [n, K] of images [n, C, H, W] and their mirror images; `shifted`: these weigh
    a half, and those moved by a pixel up left and down right, edges reflected, a quarter each
    (2404.00498, section 3.5).
    """
    mean = (logits(images) + logits(images.flip(3))) / 2
    if not shifted:
        return mean
    height, width = images.shape[2:]
    padded = F.pad(images, [1] * 4, mode="reflect")
    moved = [padded[:, :, place : place + height, place : place + width] for place in (0, 2)]
    return mean / 2 + sum(logits(view) + logits(view.flip(3)) for view in moved) / 8


def _reduced(network: Any, device: str, dtype: torch.dtype, images: Tensor) -> Tensor:
    with torch.autocast(device, dtype=dtype):
        return network(images).float()
