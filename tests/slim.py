"""A ResNet with an eighth of the channels: the application's own classifier, at a cost that tests can pay often."""

from typing import Any

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock

from models.backbones import base

SHRINK = 8


class SlimResNet(torchvision.models.ResNet):
    """torchvision's, of one block a stage with 8 to 64 channels; the stem keeps its 64. The names are the same."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.fc = nn.Linear(512 // SHRINK, 1000)

    def _make_layer(self, block: Any, planes: int, *arguments: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // SHRINK, *arguments, **options)


def slim_down() -> None:
    """From now on every classifier of this process is slim, whatever its name. For processes of a test's own."""
    base.make = lambda name, **options: SlimResNet()
