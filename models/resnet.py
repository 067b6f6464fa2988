"""torchvision's ResNets (1512.03385), ResNeXts (1611.05431) and wide ResNets (1605.07146) with a stem for small
images, any number of input channels and a head that fits.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from utils.cli import did_you_mean
from utils.errors import UserError

Name = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
NAMES: tuple[str, ...] = Name.__args__  # type: ignore[attr-defined]
Stem = Literal["imagenet", "small", "small-stride2"]
STAGES = ("stem", "layer1", "layer2", "layer3", "layer4", "head")  # from the images to the logits
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, per channel, in [0, 1] units


@dataclass(kw_only=True)
class ResNetConfig:
    """Which ResNet."""

    name: Name = "resnet18"
    stem: Stem = "imagenet"  # small: 3x3, no pooling (32 px); small-stride2: the same with stride 2, four times cheaper
    he_strides: bool = False  # stride 2 in a bottleneck's first 1x1, as in He's own ImageNet weights
    classes: int | None = None  # outputs of the head; None: as many as the data has
    head: Literal["linear", "hidden"] = "linear"  # hidden: linear, ReLU, linear
    head_width: int = 128  # of the hidden head's layer
    weights: str | None = None  # to start from: torchvision's IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT, or a file or run
    normalise: Literal["auto", "symmetric", "imagenet"] = "auto"  # auto: imagenet with weights, else [-1, 1] as it is
    input_size: int | None = None  # px that images are scaled to inside the network; None: as they come
    activation_checkpointing: bool = False  # compute each stage again in the backward pass instead of keeping it
    inplace: bool = True  # ReLUs overwrite their input
    # training over all of a process's devices (models/model_parallel.py); auto: memory shared evenly; or where each
    # further device begins: {layer3: 1}
    split: Literal["off", "auto"] | dict[str, int] = "off"

    def __post_init__(self) -> None:
        if self.head_width < 1:
            raise UserError(f"model.head_width {self.head_width}: must be 1 or more")
        if self.input_size is not None and self.input_size < 8:
            raise UserError(
                f"model.input_size {self.input_size}: must be 8 px or more, or null for images as they are"
            )

    @property
    def imagenet_normalised(self) -> bool:
        """Whether images are normalised by ImageNet's mean and deviation; otherwise they stay in [-1, 1]."""
        return self.normalise == "imagenet" or (self.normalise == "auto" and self.weights is not None)


def build_torchvision(name: str, *, he_strides: bool = False) -> torchvision.models.ResNet:
    """torchvision's ResNet without weights; `he_strides` moves each stage's stride of 2 from conv2 to conv1.

    He's original bottlenecks stride in the first 1x1 convolution, torchvision's in the 3x3. Raises UserError for an
    unknown name.
    """
    if name not in NAMES:
        raise UserError(f"model {name!r} is unknown{did_you_mean(name, NAMES)}; choose one of {', '.join(NAMES)}")
    network = getattr(torchvision.models, name)(weights=None)
    if he_strides:
        if not hasattr(network.layer2[0], "conv3"):
            raise UserError(f"model.he_strides is for bottlenecks (resnet50 and larger); {name} has none: leave it out")
        for stage in (network.layer2, network.layer3, network.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return network


class Classifier(nn.Module):
    """`forward(images [N, channels, H, W] in [-1, 1])` -> logits [N, classes]; `features` -> pooled features [N, F].

    Scaling to `input_size` and ImageNet's normalisation happen in here, so that whoever uses the network gives it the
    same images. Parameters carry torchvision's names below `network.`; the head is `network.fc`. Weights that the
    config names are not read here but by `models.weights.load_pretrained`.
    """

    input_scale: Tensor | None
    input_shift: Tensor | None

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
        network.fc = _head(config, self.feature_dim, classes)
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = config.inplace
        self.network = network
        scale, shift = normalisation(channels) if config.imagenet_normalised else (None, None)
        self.register_buffer("input_scale", scale, persistent=False)  # the config tells them: no part of the weights
        self.register_buffer("input_shift", shift, persistent=False)

    def prepare(self, x: Tensor) -> Tensor:
        """Images [N, channels, H, W] in [-1, 1] as the first convolution takes them."""
        size = self.config.input_size
        if size is not None and x.shape[-2:] != (size, size):
            x = scaled(x, size)
        if self.input_scale is None or self.input_shift is None:
            return x
        return x * self.input_scale + self.input_shift

    def features(self, x: Tensor) -> Tensor:
        """Pooled features [N, F] before the head."""
        net = self.network
        x = self._stage(self._stem, self.prepare(x), net.bn1)
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            x = self._stage(stage, x, stage)
        return net.avgpool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.network.fc(self.features(x))

    def _stem(self, x: Tensor) -> Tensor:
        net = self.network
        return net.maxpool(net.relu(net.bn1(net.conv1(x))))

    def _stage(self, function: Callable[[Tensor], Tensor], x: Tensor, norms: nn.Module) -> Tensor:
        """`function(x)`; under activation checkpointing only `x` is kept for the backward pass."""
        if not (self.config.activation_checkpointing and self.training and torch.is_grad_enabled()):
            return function(x)
        contexts = partial(_contexts, norms)
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def stage_of(name: str) -> str:
    """The stage (one of STAGES) of a parameter, by its name in torchvision's network or below `network.`."""
    part = name.removeprefix("network.").partition(".")[0]
    return {"conv1": "stem", "bn1": "stem", "fc": "head"}.get(part, part)


def normalisation(channels: int) -> tuple[Tensor, Tensor]:
    """(scale, shift), each [1, channels, 1, 1]: scale x + shift of x in [-1, 1] is ((x + 1) / 2 - mean) / std.

    Grey takes the mean over the channels of ImageNet's mean and deviation; more than three channels repeat them.
    """
    mean, std = torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64)
    if channels == 1:
        mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
    index = torch.arange(channels, device=mean.device) % len(mean)
    scale, shift = 0.5 / std[index], (0.5 - mean[index]) / std[index]
    dtype = torch.get_default_dtype()
    return scale.to(dtype).view(1, -1, 1, 1), shift.to(dtype).view(1, -1, 1, 1)


def scaled(images: Tensor, side: int) -> Tensor:
    """Images [N, C, H, W] as [N, C, side, side], bilinearly and antialiased, in float32 at least: torch does not do
    it in bf16 on CPUs.
    """
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    found = F.interpolate(wide, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
    return found.to(images.dtype)


def fit_images(images: Tensor, side: int, channels: int) -> Tensor:
    """Images [N, C, H, W] in [-1, 1] as a classifier of `side` px and `channels` takes them; differentiable.

    Another size is scaled bilinearly; grey is repeated to RGB, RGB is weighed to grey (ITU-R 601: .299, .587, .114).
    """
    if images.shape[-2:] != (side, side):
        images = scaled(images, side)
    if channels == 1 and images.shape[1] == 3:
        images = (images * images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return images.expand(-1, channels, -1, -1)


def _he_conv(channels: int, width: int, kernel: int, *, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _head(config: ResNetConfig, features: int, classes: int) -> nn.Module:
    if config.head == "linear":
        return nn.Linear(features, classes)
    return nn.Sequential(nn.Linear(features, config.head_width), nn.ReLU(), nn.Linear(config.head_width, classes))


def _contexts(
    norms: nn.Module,
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """For the first forward pass and for the one in the backward pass."""
    return contextlib.nullcontext(), statistics_kept(norms)


@contextlib.contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside the block, training BatchNorms normalise by their batch as ever but leave their running statistics alone:
    a batch that is computed twice must not count twice.
    """
    norms = [
        m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.num_batches_tracked is not None
    ]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # 1 x running + 0 x batch; without running statistics autograd would keep other tensors than the first time
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()  # type: ignore[union-attr]
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
