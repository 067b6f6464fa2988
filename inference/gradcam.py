"""Grad-CAM: which parts of an image are evidence for a class (Selvaraju et al., 1610.02391)."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metrics.extractors import classifier_input
from metrics.precision import device_of, exact_float32
from models.classifier import Classifier
from models.hooks import find_layer, output_gradient
from utils.errors import UserError
from utils.files import check_writable
from utils.image_tables import save_captioned

SIDE = 224  # px that smaller images are enlarged to, so that the heat on them is smooth
STRENGTH = 0.65  # opacity of the hottest part
LONGEST = 180  # bytes of a file's name that are kept


def grad_cam(model: nn.Module, images: Tensor, targets: Tensor, layer: str) -> Tensor:
    """Heat [n, h, w], at least 0, at the resolution of the layer's maps, for images as the model takes them.

    relu(sum_k alpha_k A^k), alpha_k = mean_ij d y_c / d A^k_ij (equations 1 and 2), y_c being the logit of the class
    in `targets` [n]. The model should be in evaluation mode; its parameters need not require gradients. Nothing before
    the layer is differentiated. Raises UserError for an unknown layer and one without maps.
    """

    def asked(logits: Tensor) -> Tensor:
        return logits.gather(1, targets[:, None]).sum()  # of each image its own: they do not touch one another

    maps, gradients = output_gradient(model, layer, (images,), asked)
    if maps.ndim != 4:
        shape = list(maps.shape)
        raise UserError(f"layer {layer!r} gives no maps (its output is {shape}); choose a stage or a convolution")
    channels_last = getattr(getattr(model, "network", model), "output_fmt", "") == "NHWC"  # timm's word: Swin's maps
    if channels_last and not isinstance(find_layer(model, layer), nn.Conv2d):
        maps, gradients = (x.permute(0, 3, 1, 2) for x in (maps, gradients))
    alphas = gradients.mean((2, 3), keepdim=True)
    return (alphas * maps).sum(1).relu()


def image_heat(classifier: Classifier, images: Tensor, targets: Tensor, layer: str | None = None) -> Tensor:
    """Heat float32 [n, h, w] on the CPU for images uint8 [n, C, H, W], each scaled to a largest value of 1. Without a
    layer it is the one that the backbone names.

    An image without evidence for its class has no heat at all: zeros. In full float32. Raises UserError as
    `grad_cam` does.
    """
    device = device_of(classifier)
    classifier.eval()
    with exact_float32(device):
        heat = grad_cam(
            classifier, classifier_input(classifier, images), targets.to(device), layer or classifier.backbone.maps
        )
    heat = heat.float().cpu()
    largest = heat.amax((1, 2), keepdim=True)
    return heat / torch.where(largest > 0, largest, 1.0)


def overlay(image: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """An image uint8 [C, H, W] enlarged to about SIDE px, and the same under its heat [h, w]; both uint8 [3, H', W'].

    The heat is scaled bilinearly, as in the paper; where there is none the image stays as it is.
    """
    from matplotlib import colormaps

    scale = max(1, round(SIDE / image.shape[-1]))
    large = image.expand(3, -1, -1).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    smooth = F.interpolate(heat[None, None], size=large.shape[1:], mode="bilinear", align_corners=False)[0, 0]
    colours = torch.from_numpy(np.asarray(colormaps["turbo"](smooth.numpy()))[..., :3]).permute(2, 0, 1) * 255
    opacity = STRENGTH * smooth.double()
    return large, (large * (1 - opacity) + colours * opacity).round().to(torch.uint8)


def save_overlay(image: Tensor, heat: Tensor, captions: Sequence[str], path: Path) -> None:
    """Write image and overlay side by side to a PNG file, atomically, with a caption of up to two lines each."""
    save_captioned(overlay(image, heat), captions, path, columns=2)


def output_files(folder: Path, files: Sequence[str]) -> list[Path]:
    """A PNG in `folder` for each file: its name without suffix and `-gradcam`; numbered where that would come twice.

    None leaves the folder, no two are the same (also where capital letters do not count), and none is one of `files`.
    Raises UserError for a folder that cannot be written.
    """
    check_writable(folder)
    taken = {_identity(Path(file)) for file in files}
    found = []
    for file in files:
        stem = Path(file).stem.replace("\0", "") or "image"
        while len(os.fsencode(stem)) > LONGEST:
            stem = stem[:-1]
        numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        names = (folder / f"{stem}-gradcam{number}.png" for number in numbers)
        found.append(next(path for path in names if _identity(path) not in taken))
        taken.add(_identity(found[-1]))
    return found


def _identity(path: Path) -> str:
    return os.path.realpath(path).casefold()
