"""ConvNeXts (2201.03545). No BatchNorm; each stage after the first begins with a layer that halves the maps."""

from models.backbones.base import Backbone

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
