"""Train GANs and classifiers: losses, penalties, optimizers, averages, tasks and the loop."""

from typing import TYPE_CHECKING

from duetgan.lazy import lazily

if TYPE_CHECKING:
    from duetgan.training.classifier.loss import CLASSIFIER_LOSSES, ClassifierLoss
    from duetgan.training.gan.ada import Ada, AdaConfig
    from duetgan.training.gan.losses import (
        OBJECTIVES,
        Objective,
        gradient_penalty,
        path_length_penalty,
        path_lengths,
        squared_gradient_norm,
    )
    from duetgan.training.optim.ema import EMA, half_life_beta

__all__ = [
    "CLASSIFIER_LOSSES",
    "EMA",
    "OBJECTIVES",
    "Ada",
    "AdaConfig",
    "ClassifierLoss",
    "Objective",
    "gradient_penalty",
    "half_life_beta",
    "path_length_penalty",
    "path_lengths",
    "squared_gradient_norm",
]
__getattr__ = lazily(
    "duetgan.training",
    {
        "gan.losses": __all__,
        "classifier.loss": ["CLASSIFIER_LOSSES", "ClassifierLoss"],
        "gan.ada": ["Ada", "AdaConfig"],
        "optim.ema": ["EMA", "half_life_beta"],
    },
)
