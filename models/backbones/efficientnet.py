"""EfficientNets (1905.11946). The last stage ends with a 1x1 convolution, whose maps Grad-CAM looks at."""

from models.backbones.base import Backbone

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
