"""A trained network made faster, where its last bits do not count: BatchNorm folded, a reduced precision."""

import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError
from torch.nn.modules.batchnorm import _BatchNorm

from models.classifier import Classifier

Fixed = Literal["fp32", "bf16", "fp16"]


def native(device: torch.device) -> Fixed:
    """The reduced precision in which an accelerator is fast."""
    slow = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp16" if slow else "bf16"


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of `model` in evaluation mode whose convolutions do their BatchNorm's work; same outputs within rounding.

    A BatchNorm that follows no convolution stays, and so do all of a network that torch.fx cannot trace.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if not any(isinstance(module, _BatchNorm) for module in copied.modules()):
        return copied  # nothing to fold, and R3GAN's layers cannot be traced
    try:
        return fuse(copied).eval()
    except TraceError:
        return copied


def hasten(classifier: Classifier, device: torch.device, *, precision: str, fold: bool) -> Classifier:
    """A trained classifier on `device` whose logits, and nothing else of it, come with BatchNorm folded or in a
    `precision`, whoever calls it. auto: what an accelerator is fast in; on a CPU fp32, since a few images do not pay
    for the measurement that would tell. The one that is given stays as it was; they share their weights.
    """
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else native(device)
    fast, network = copy.copy(classifier), fold_batchnorm(classifier) if fold else classifier
    if precision != "fp32":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        fast.forward = partial(_reduced, network, device.type, dtype)  # type: ignore[method-assign]
    elif fold:
        fast.forward = network.__call__  # type: ignore[method-assign]
    return fast


def _reduced(network: Any, device: str, dtype: torch.dtype, images: Tensor) -> Tensor:
    with torch.autocast(device, dtype=dtype):
        return network(images).float()
