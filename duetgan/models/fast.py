"""Make the inference of a trained classifier faster or more accurate.

It is faster with folded BatchNorms and reduced precision, and more accurate if the logits are
averaged over several views of an image.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError
from torch.nn.modules.batchnorm import _BatchNorm

from duetgan.models.classifier import Classifier
from duetgan.utils.machine import native_precision


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """Return a copy of `model` in evaluation mode with BatchNorms folded into convolutions.

    The outputs are the same within rounding. A BatchNorm that does not follow a convolution
    remains. All BatchNorms remain if torch.fx cannot trace the network.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if not any(isinstance(module, _BatchNorm) for module in copied.modules()):
        return copied  # tracing would fail for R3GAN's layers
    try:
        return fuse(copied).eval()
    except TraceError:
        return copied


def faster(
    classifier: Classifier, device: torch.device, *, precision: str, fold: bool, tta: str = "off"
) -> Classifier:
    """Return a copy of a trained classifier with a faster or more accurate `forward`.

    `classifier` does not change, and the copy shares its parameters. If `fold` is True, the
    `forward` of the copy uses other parameters, into which BatchNorms are folded.

    Args:
        classifier: A classifier on `device`.
        precision: fp32, bf16, fp16 or auto. On accelerators, auto is `native_precision`. On CPUs it
            is fp32, because measuring which precision is faster takes longer than classifying a few
            images.
        fold: Fold BatchNorms into convolutions.
        tta: off, flip or shift. flip averages the logits over mirror images, shift also over moved
            images, see `over_views`.
    """
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else native_precision(device)
    fast = copy.copy(classifier)
    network = fold_batchnorm(classifier) if fold else classifier
    if precision != "fp32":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        fast.forward = partial(_reduced, network, device.type, dtype)  # type: ignore[method-assign]
    elif fold:
        fast.forward = network.__call__  # type: ignore[method-assign]
    if tta != "off":
        fast.forward = partial(over_views, fast.forward, tta == "shift")  # type: ignore[method-assign]
    return fast


def over_views(logits: Callable[[Tensor], Tensor], shifted: bool, images: Tensor) -> Tensor:
    """Return logits [n, K], averaged over the images [n, C, H, W] and their mirror images.

    If `shifted`, three such averages are combined: those of the images (weight 1/2), of the images
    moved by one pixel up and left (1/4), and moved by one pixel down and right (1/4), with
    reflected edges (2404.00498, section 3.5). `logits` computes the logits of a batch.
    """
    mean = (logits(images) + logits(images.flip(3))) / 2
    if not shifted:
        return mean
    height, width = images.shape[2:]
    padded = F.pad(images, [1] * 4, mode="reflect")
    moved = [padded[:, :, start : start + height, start : start + width] for start in (0, 2)]
    return mean / 2 + sum(logits(view) + logits(view.flip(3)) for view in moved) / 8


def _reduced(network: nn.Module, device: str, dtype: torch.dtype, images: Tensor) -> Tensor:
    with torch.autocast(device, dtype=dtype):
        return network(images).float()
