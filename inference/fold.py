"""Faster copies of a trained network: BatchNorm folded into the convolutions before it, bfloat16 throughout."""

import copy

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of `model` in evaluation mode whose convolutions do their BatchNorm's work; same outputs within rounding.

    A BatchNorm that follows no convolution stays, and so do all of a network that torch.fx cannot trace.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    try:
        return fuse(copied).eval()
    except TraceError:
        return copied


class InBfloat16(nn.Module):
    """A copy of a network that computes in bfloat16: takes and gives float32, as the network itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(torch.bfloat16)).float()
