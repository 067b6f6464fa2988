"""ImageNet ResNet-50 as a feature extractor, from a weights file."""

import hashlib
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from models.backbones.base import MEAN, STD
from models.backbones.resnet import RESNET
from models.weights import fitted, read_state_dict
from utils.errors import UserError

FILE_NAME = "resnet50-imagenet.safetensors"
CHECKOUT = Path(__file__).resolve().parents[1]
PLACES = (CHECKOUT / "weights" / FILE_NAME, CHECKOUT.parent / "shared" / "weights" / FILE_NAME)


def find_weights(given: str | Path | None = None) -> Path | None:
    """The weights file: the given one, else $DUET_WEIGHTS, else one in `weights/` or `../shared/weights/`, else None.

    Raises:
        UserError: the given file, or the one that the variable names, is not there.
    """
    for source, name in (("--weights", given), ("$DUET_WEIGHTS", os.environ.get("DUET_WEIGHTS"))):
        if name:
            if not Path(name).is_file():
                raise UserError(f"{source} {name}: no such file; give {FILE_NAME} or another ResNet-50 state dict")
            return Path(name)
    return next((place for place in PLACES if place.is_file()), None)


def needed_weights(given: str | Path | None, why: str, instead: str = "") -> Path:
    """`find_weights`, or UserError that says why they are needed and what to do."""
    path = find_weights(given)
    if path is None:
        raise UserError(f"{why}: put {FILE_NAME} into weights/, or give one with --weights{instead}")
    return path


class ResNet50Features:
    """2048 pooled features of an ImageNet ResNet-50, float32. Calling it: uint8 [n, C, H, W] -> float32 [n, 2048].

    Images up to 64 px are scaled to 64 px, larger ones to 224 px, bilinearly; grey is repeated to three channels.
    """

    name = "resnet50"
    dim = 2048

    def __init__(self, weights: str | Path | None = None, *, device: torch.device | str = "cpu") -> None:
        path = needed_weights(weights, "extractor resnet50 needs a weights file")
        self.device = torch.device(device)
        self.source = f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        self._network = load_resnet50(path).to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __call__(self, images: Tensor) -> Tensor:
        inputs = images.to(self.device, torch.float32) / 255  # [n, C, H, W] in [0, 1]
        side = 64 if max(inputs.shape[-2:]) <= 64 else 224
        if inputs.shape[-2:] != (side, side):
            # antialias matters only when shrinking; without it a large image would lose detail by aliasing
            inputs = F.interpolate(inputs, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
        inputs = normalize(inputs.expand(-1, 3, -1, -1), MEAN, STD)
        with torch.no_grad():
            return self._network(inputs.contiguous(memory_format=torch.channels_last))


def load_resnet50(path: Path) -> nn.Module:
    """A ResNet-50 without its head, float32, in evaluation mode, with the weights of a `.safetensors` or `.pth` file.

    The file has torchvision's parameter names. A safetensors file whose metadata says `stride: conv1 ...` is He's
    original network; every other file is taken for torchvision's, whose stride of 2 sits in `conv2`.

    Raises:
        UserError: the file cannot be read, or a key or a shape is not ResNet-50's.
    """
    state, metadata = read_state_dict(path)
    he_strides = metadata.get("stride", "").startswith("conv1")
    with torch.device("meta"):  # no time is spent on an initialisation that is overwritten
        network = RESNET.build("resnet50", he_strides=he_strides)
    state = fitted(state, network.state_dict(), path, "resnet50")
    network.load_state_dict(state, assign=True)
    network.set_submodule(RESNET.head, nn.Identity())  # the pooled features are the output
    return network.eval().requires_grad_(False)
