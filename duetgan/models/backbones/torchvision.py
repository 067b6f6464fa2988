"""Descriptions of the network families that torchvision builds."""

from typing import Any

from duetgan.models.backbones.base import Backbone


def he_strides(network: Any) -> bool:
    """Move the stride of 2 of each stage from the 3x3 to the first 1x1 convolution of a bottleneck.

    torchvision has the stride in the 3x3 convolution (conv2), He's original ResNets have it in the
    1x1 convolution (conv1). Returns True; for a network of basic blocks, changes nothing and
    returns False.
    """
    if not hasattr(network.layer2[0], "conv3"):
        return False
    for stage in (network.layer2, network.layer3, network.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return True


RESNET = Backbone(  # 1512.03385, ResNeXts (1611.05431) and wide ResNets (1605.07146)
    names=(
        *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
        *(
            "resnext50_32x4d",
            "resnext101_32x8d",
            "resnext101_64x4d",
            "wide_resnet50_2",
            "wide_resnet101_2",
        ),
    ),
    stages={"stem": ("conv1", "bn1", "relu", "maxpool")}
    | {f"layer{n}": (f"layer{n}.*",) for n in (1, 2, 3, 4)},
    pool=("avgpool",),
    first="conv1",
    head="fc",
    maps="layer4",
    shrink="maxpool",
    he_strides=he_strides,
)
# 2201.03545; no BatchNorm. Each stage but the first begins with a layer that halves the maps.
CONVNEXT = Backbone(
    names=("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
    stages={"stem": ("features.0",), "stage1": ("features.1.*",)}
    | {f"stage{n}": (f"features.{2 * n - 2}", f"features.{2 * n - 1}.*") for n in (2, 3, 4)},
    pool=("avgpool", "classifier.0"),
    first="features.0.0",
    head="classifier.2",
    maps="features.7",
    smallest=8,
    options={"stochastic_depth_prob": 0.0},
)
# 1905.11946; the last stage ends with a 1x1 convolution, whose maps Grad-CAM uses.
EFFICIENTNET = Backbone(
    names=tuple(f"efficientnet_b{n}" for n in range(8)),
    stages={"stem": ("features.0",)}
    | {f"stage{n}": (f"features.{n}.*",) for n in range(1, 7)}
    | {"stage7": ("features.7.*", "features.8")},
    pool=("avgpool",),
    first="features.0.0",
    head="classifier.1",
    maps="features.8",
    options={"stochastic_depth_prob": 0.0, "dropout": 0.0},
)
