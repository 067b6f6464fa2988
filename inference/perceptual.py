"""How different two images look: ImageNet ResNet-50 features before pooling, compared as LPIPS does."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.metrics.features.extractors import HOW_TO_GET, find_weights, load_resnet50, needed_weights
from duetgan.models.backbones.base import normalize
from duetgan.utils.errors import UserError

SMALLEST, LARGEST = 64, 256  # px that images are scaled up or down to before the network sees them


class ResNetFeatures:
    """The outputs of a ResNet-50's stem and four stages, each position's channels scaled to unit length.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (1801.03924), section 3.
    Images below 64 px are scaled to 64, those above 256 px to 256; grey is repeated to three channels.
    """

    def __init__(self, network: nn.Module) -> None:
        """Args: `network` a torchvision ResNet in evaluation mode whose parameters want no gradient."""
        from torchvision.models.feature_extraction import create_feature_extractor  # half a second

        self._dtype = network.get_parameter("conv1.weight").dtype
        self._stages = create_feature_extractor(network, ["relu", "layer1", "layer2", "layer3", "layer4"])

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Maps [n, c, h, w], fine to coarse, of images [n, 1 or 3, H, H] in [-1, 1]; differentiable."""
        x = resize(images.to(self._dtype), min(max(images.shape[-1], SMALLEST), LARGEST))
        return [unit_length(maps) for maps in self._stages(normalize((x + 1) / 2)).values()]


def unit_length(maps: Tensor, eps: float = 1e-10) -> Tensor:
    """Scale the channels at each position of [n, c, h, w] to length 1; all zeros stay zeros.

    The root is taken of a number above 0: its derivative at 0 is infinite, and ReLUs do leave positions all zero.
    """
    return maps * torch.rsqrt(maps.square().sum(dim=1, keepdim=True) + eps)


def feature_distance(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """LPIPS without learned weights [n]: the squared difference, summed over channels and layers, mean over positions.

    1801.03924, equation 1 with w_l = 1. For L layers it lies between 0 and 4 L (2 L where no feature is negative).
    """
    return torch.stack([(x - y).square().sum(dim=1).mean(dim=(1, 2)) for x, y in zip(a, b, strict=True)]).sum(dim=0)


def resize(images: Tensor, side: int) -> Tensor:
    """Scale images [n, C, H, H] to `side` px: bilinearly up; down by averaging too, so that nothing aliases.

    As two matrix products, because the backward pass of torch's own scaling adds up in any order on GPUs.
    """
    before = images.shape[-1]
    if before == side:
        return images
    eye = torch.eye(before, dtype=images.dtype, device=images.device)[None, None]
    matrix = F.interpolate(eye, size=(side, before), mode="bilinear", align_corners=False, antialias=True)[0, 0]
    return matrix @ images @ matrix.t()


class Distance:
    """How far images are from one target: feature distance (if there are features) + pixel_weight * mean square."""

    def __init__(self, target: Tensor, *, features: ResNetFeatures | None, pixel_weight: float) -> None:
        """Args: `target` [1, C, H, H] in [-1, 1], on the device that all is computed on."""
        self._target, self._features, self._pixel_weight = target, features, pixel_weight
        with torch.no_grad():
            self._wanted = features(target) if features else []

    def __call__(self, images: Tensor) -> Tensor:
        """[n] for images [n, C, H, H] in [-1, 1]; differentiable."""
        pixels, features = self._pixel_weight * self.pixels(images), self.perceptual(images)
        return pixels if features is None else pixels + features

    def pixels(self, images: Tensor) -> Tensor:
        """The mean squared difference of the pixels [n]; 4 between black and white."""
        return (images - self._target).square().mean(dim=(1, 2, 3))

    def perceptual(self, images: Tensor) -> Tensor | None:
        """The distance of the features [n]; None if there are none."""
        return feature_distance(self._features(images), self._wanted) if self._features else None


def build_features(name: str | None, weights: str | Path | None, device: torch.device) -> ResNetFeatures | None:
    """Features by name; None for `pixels`. Without a name: those of resnet50, or where its weights are not there pixels
    and a line on stderr that says so.

    Raises UserError if weights are named and missing, or given where none are read.
    """
    if name is None and not weights and find_weights(None) is None:
        text = f"no ResNet-50 weights found: comparing pixels only, which gives blurred images; for more {HOW_TO_GET}"
        print(text, file=sys.stderr)
        return None
    if name == "pixels":
        if weights:
            raise UserError("--weights is for --features resnet50; leave it out")
        return None
    why = "project compares features of an ImageNet ResNet-50"
    path = needed_weights(weights, why, ", or use --features pixels")
    return ResNetFeatures(load_resnet50(path).to(device, memory_format=torch.channels_last))  # type: ignore[call-overload]
