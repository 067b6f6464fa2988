"""Faster copies of a trained ResNet: BatchNorm folded into the convolutions before it, bfloat16 throughout."""

import copy
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of `model` in evaluation mode whose convolutions do their BatchNorm's work; same outputs within rounding.

    With the running mean m and variance v: conv' has the weight k w and the bias k (b - m) + beta, where k = gamma /
    sqrt(v + eps). Folded where torchvision's ResNets say what follows what: `conv1`, `bn1` and so on of the network and
    of its blocks, and neighbours in a Sequential. Any other BatchNorm stays as it is.
    """
    folded = copy.deepcopy(model).eval().requires_grad_(False)
    for parent in list(folded.modules()):
        for first, second in list(_pairs(parent)):
            convolution, norm = getattr(parent, first), getattr(parent, second)
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                setattr(parent, first, fuse_conv_bn_eval(convolution, norm))  # in the layout that the weight has
                setattr(parent, second, nn.Identity().eval())
    return folded


def _pairs(parent: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of children of which the second is applied to what the first gives, and nothing else is."""
    if isinstance(parent, (ResNet, BasicBlock, Bottleneck)):
        yield from ((f"conv{i}", f"bn{i}") for i in (1, 2, 3) if hasattr(parent, f"conv{i}"))
    elif isinstance(parent, nn.Sequential):
        yield from pairwise(name for name, _ in parent.named_children())


class InBfloat16(nn.Module):
    """A copy of a network that computes in bfloat16: takes and gives float32, as the network itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(torch.bfloat16)).float()
