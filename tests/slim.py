"""Backbones of few channels and blocks: the application's own classifiers, at a cost that tests can pay often. Curves
of a report, which take as long as a tiny training, are left out.
"""

from collections.abc import Callable
from typing import Any

import torchvision
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, _efficientnet_conf
from torchvision.models.resnet import BasicBlock

from duetgan.models.backbones import base

SHRINK = 8


class SlimResNet(torchvision.models.ResNet):
    """torchvision's, of one block a stage with 8 to 64 channels; the stem keeps its 64. The names are the same."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.fc = nn.Linear(512 // SHRINK, 1000)

    def _make_layer(self, block: Any, planes: int, *arguments: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // SHRINK, *arguments, **options)


def slim_convnext() -> ConvNeXt:
    return ConvNeXt([CNBlockConfig(*sizes) for sizes in ((8, 16, 1), (16, 32, 1), (32, 64, 2), (64, None, 1))])


def slim_efficientnet() -> EfficientNet:
    blocks, _ = _efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=0.5)
    return EfficientNet(blocks, dropout=0.0, stochastic_depth_prob=0.0, last_channel=64)


SLIM: dict[str, Callable[[], nn.Module]] = {
    "resnet18": SlimResNet,
    "convnext_tiny": slim_convnext,
    "efficientnet_b0": slim_efficientnet,
}


def make(name: str, **options: Any) -> nn.Module:
    """What stands in for models.backbones.base.make."""
    return SLIM.get(name, SlimResNet)()


def no_curves(curves: Any, *, log: bool) -> str:
    """What stands in for reporting.pictures._svg."""
    return "<svg></svg>"


def slim_down() -> None:
    """From now on every classifier of this process is slim, whatever its name, and its reports have no curves. For
    processes of a test's own.
    """
    from duetgan.reporting import pictures  # here: the fault suite patches modules while they are imported, by this one

    base.make = make
    pictures._svg = no_curves
