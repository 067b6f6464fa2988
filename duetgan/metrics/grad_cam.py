"""Grad-CAM: heat maps of the evidence for a class (Selvaraju et al., 1610.02391)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.models.classifier import Classifier
from duetgan.models.hooks import find_layer, output_gradient
from duetgan.utils.errors import UserError

SIDE = 224  # px to which smaller images are enlarged, so that the heat on them is smooth
OPACITY = 0.65  # of the hottest part of an image's heat
MIN_MAP_SIDE = 4  # smallest maps that `default_layer` chooses, in pixels
RESNET_STAGES = ("layer1", "layer2", "layer3", "layer4")


def default_layer(classifier: Classifier) -> str:
    """Return the name of the layer whose feature maps Grad-CAM uses by default.

    For a ResNet, this is the last stage whose maps have at least MIN_MAP_SIDE pixels a side, or
    layer1 if there is none. (For images of 64 px, the maps of layer4 have 2x2 pixels, too few to
    localise anything.) For other networks, the backbone defines the layer.
    """
    last = classifier.backbone.maps
    if last != RESNET_STAGES[-1]:
        return last
    image = next(classifier.parameters()).new_zeros(1, *classifier.spec.shape)
    with evaluating(classifier):
        for name in reversed(RESNET_STAGES):
            maps, _ = output_gradient(classifier, name, (image,), torch.sum)
            if min(maps.shape[-2:]) >= MIN_MAP_SIDE:
                return name
    return RESNET_STAGES[0]


def grad_cam(model: nn.Module, images: Tensor, targets: Tensor, layer: str) -> Tensor:
    """Return the Grad-CAM heat of images: [n, h, w], at least 0, for feature maps of h x w pixels.

    This is relu(sum_k alpha_k A^k) with alpha_k = mean_ij d y_c / d A^k_ij (equations 1 and 2),
    where A^k are the layer's maps and y_c is the logit of the class. Only the part of the model
    after the layer is differentiated.

    Args:
        model: A model in evaluation mode; its parameters need not require gradients.
        images: Images in the model's format.
        targets: Class of each image, int64 [n].

    Raises:
        UserError: If the layer is unknown or has no maps.
    """
    # the maps of an image affect only its own logit, so that the logits can be summed
    maps, gradients = output_gradient(
        model, layer, (images,), lambda logits: logits.gather(1, targets[:, None]).sum()
    )
    if maps.ndim != 4:
        shape = list(maps.shape)
        raise UserError(
            f"layer {layer!r} gives no maps (its output is {shape}); choose a stage or a convolution"
        )
    # timm sets this attribute of networks with NHWC maps, such as Swin
    channels_last = getattr(getattr(model, "network", model), "output_fmt", "") == "NHWC"
    if channels_last and not isinstance(find_layer(model, layer), nn.Conv2d):
        maps, gradients = (x.permute(0, 3, 1, 2) for x in (maps, gradients))
    return (gradients.mean((2, 3), keepdim=True) * maps).sum(1).relu()


def image_heat(
    classifier: Classifier, images: Tensor, targets: Tensor, layer: str | None = None
) -> Tensor:
    """Return the Grad-CAM heat of each image, scaled to a maximum of 1: [n, h, w] on the CPU.

    The heat is computed in full float32 precision. An image without evidence for its class has heat
    0 everywhere.

    Args:
        classifier: The classifier, which is put into evaluation mode.
        images: Unnormalised images, [n, C, H, W].
        targets: Class of each image, int64 [n].
        layer: Name of the layer; None means `default_layer`.
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
    """Return two pictures of an image, uint8 [3, H', W']: one without and one with its heat.

    Both are enlarged to a width of about SIDE px. The heat is scaled bilinearly, as in the paper,
    and is transparent where it is 0.

    Args:
        image: The image, uint8 [C, H, W], grey or RGB.
        heat: The image's heat, 0 to 1, [h, w].
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
    opacity = OPACITY * smooth.double()
    return large, (large * (1 - opacity) + colours * opacity).round().to(torch.uint8)
