"""torchvision's ResNets (1512.03385) with a stem for small pictures, any number of input channels and a head that
fits.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from utils.errors import UserError

NAMES = ("resnet18", "resnet34", "resnet50", "resnet101")
Stem = Literal["imagenet", "small", "small-stride2"]


@dataclass(kw_only=True)
class ResNetConfig:
    """Which ResNet."""

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101"] = "resnet18"
    stem: Stem = "imagenet"  # small: 3x3, no pooling (32 px); small-stride2: the same with stride 2, four times cheaper
    he_strides: bool = False  # stride 2 in a bottleneck's first 1x1, as in He's own ImageNet weights
    classes: int | None = None  # outputs of the head; None: as many as the data has


def build_torchvision(name: str, *, he_strides: bool = False) -> torchvision.models.ResNet:
    """torchvision's ResNet without weights; `he_strides` moves each stage's stride of 2 from conv2 to conv1.

    He's original bottlenecks stride in the first 1x1 convolution, torchvision's in the 3x3. Raises UserError for an
    unknown name.
    """
    if name not in NAMES:
        raise UserError(f"model {name!r} is unknown; choose one of {', '.join(NAMES)}")
    network = getattr(torchvision.models, name)(weights=None)
    if he_strides:
        if not hasattr(network.layer2[0], "conv3"):
            raise UserError(f"model.he_strides is for bottlenecks (resnet50, resnet101); {name} has none")
        for stage in (network.layer2, network.layer3, network.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return network


class Classifier(nn.Module):
    """`forward(images [N, channels, H, W] in [-1, 1])` -> logits [N, classes]; `features` -> pooled features [N, F].

    Parameters carry torchvision's names below `network.`; the head is `network.fc`.
    """

    def __init__(self, config: ResNetConfig, *, channels: int, classes: int, resolution: int) -> None:
        super().__init__()
        if classes < 2:
            raise UserError(f"a classifier needs two classes or more, the data has {classes}")
        self.config = config
        self.channels, self.classes, self.resolution = channels, classes, resolution
        network = build_torchvision(config.name, he_strides=config.he_strides)
        width = network.conv1.out_channels
        if config.stem == "imagenet":
            network.conv1 = _he_conv(channels, width, 7, stride=2) if channels != 3 else network.conv1
        else:
            network.conv1 = _he_conv(channels, width, 3, stride=2 if config.stem == "small-stride2" else 1)
            network.maxpool = nn.Identity()
        self.feature_dim = network.fc.in_features
        network.fc = nn.Linear(self.feature_dim, classes)
        self.network = network

    def features(self, x: Tensor) -> Tensor:
        """Pooled features [N, F] before the head."""
        net = self.network
        x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        x = net.layer4(net.layer3(net.layer2(net.layer1(x))))
        return net.avgpool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.network.fc(self.features(x))


def fit_pictures(pictures: Tensor, side: int, channels: int) -> Tensor:
    """Pictures [N, C, H, W] in [-1, 1] as a classifier of `side` px and `channels` takes them; differentiable.

    Another size is scaled bilinearly; grey is repeated to RGB, RGB is weighed to grey (ITU-R 601: .299, .587, .114).
    """
    if pictures.shape[-2:] != (side, side):
        pictures = F.interpolate(pictures, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
    if channels == 1 and pictures.shape[1] == 3:
        pictures = (pictures * pictures.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return pictures.expand(-1, channels, -1, -1)


def _he_conv(channels: int, width: int, kernel: int, *, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
