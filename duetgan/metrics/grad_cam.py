"""Grad-CAM: which parts of an image are evidence for a class (Selvaraju et al., 1610.02391)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.models.classifier import Classifier
from duetgan.models.hooks import find_layer, output_gradient
from duetgan.utils.errors import UserError

SIDE = 224  # px that smaller images are enlarged to, so that the heat on them is smooth
STRENGTH = 0.65  # opacity of the hottest part
MAPS_SIDE = 4  # places a side of the coarsest maps that Grad-CAM looks at unasked
RESNET = ("layer1", "layer2", "layer3", "layer4")  # its stages


def default_layer(classifier: Classifier) -> str:
    """Whose maps Grad-CAM looks at unless told: those that the backbone names; of a ResNet the last
    stage whose maps have MAPS_SIDE places a side or more (images of 64 px have 2x2 in layer4, one
    smear), without one layer1.
    """
    last = classifier.backbone.maps
    if last != RESNET[-1]:
        return last
    image = next(classifier.parameters()).new_zeros(1, *classifier.spec.shape)
    with evaluating(classifier):
        for name in reversed(RESNET):
            maps, _ = output_gradient(classifier, name, (image,), torch.sum)
            if min(maps.shape[-2:]) >= MAPS_SIDE:
                return name
    return RESNET[0]


def grad_cam(model: nn.Module, images: Tensor, targets: Tensor, layer: str) -> Tensor:
    """Heat [n, h, w], at least 0, at the resolution of the layer's maps, for images as the model
    takes them.

    relu(sum_k alpha_k A^k), alpha_k = mean_ij d y_c / d A^k_ij (equations 1 and 2), y_c being the
    logit of the class in `targets` [n]. The model should be in evaluation mode; its parameters need
    not require gradients. Nothing before the layer is differentiated. Raises UserError for an
    unknown layer and one without maps.
    """
    # of each image its own logit: they do not touch one another
    maps, gradients = output_gradient(
        model, layer, (images,), lambda logits: logits.gather(1, targets[:, None]).sum()
    )
    if maps.ndim != 4:
        shape = list(maps.shape)
        raise UserError(
            f"layer {layer!r} gives no maps (its output is {shape}); choose a stage or a convolution"
        )
    # timm's word: Swin's maps
    channels_last = getattr(getattr(model, "network", model), "output_fmt", "") == "NHWC"
    if channels_last and not isinstance(find_layer(model, layer), nn.Conv2d):
        maps, gradients = (x.permute(0, 3, 1, 2) for x in (maps, gradients))
    return (gradients.mean((2, 3), keepdim=True) * maps).sum(1).relu()


def image_heat(
    classifier: Classifier, images: Tensor, targets: Tensor, layer: str | None = None
) -> Tensor:
    """Heat float32 [n, h, w] on the CPU for images uint8 [n, C, H, W], each scaled to a largest
    value of 1. Without a layer it is `default_layer`.

    An image without evidence for its class has no heat at all: zeros. In full float32. Raises
    UserError as `grad_cam` does.
    """
    device = device_of(classifier)
    classifier.eval()
    with full_float32(device):
        heat = grad_cam(
            classifier,
            classifier_input(classifier, images),
            targets.to(device),
            layer or default_layer(classifier),
        )
    heat = heat.float().cpu()
    largest = heat.amax((1, 2), keepdim=True)
    return heat / torch.where(largest > 0, largest, 1.0)


def overlay(image: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """An image uint8 [C, H, W] enlarged to about SIDE px, and the same under its heat [h, w]; both
    uint8 [3, H', W'].

    The heat is scaled bilinearly, as in the paper; where there is none the image stays as it is.
    """
    from matplotlib import colormaps

    scale = max(1, round(SIDE / image.shape[-1]))
    large = image.expand(3, -1, -1).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    smooth = F.interpolate(
        heat[None, None], size=large.shape[1:], mode="bilinear", align_corners=False
    )[0, 0]
    colours = (
        torch.from_numpy(np.asarray(colormaps["turbo"](smooth.numpy()))[..., :3]).permute(2, 0, 1)
        * 255
    )
    opacity = STRENGTH * smooth.double()
    return large, (large * (1 - opacity) + colours * opacity).round().to(torch.uint8)
