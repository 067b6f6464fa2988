"""Baselines that train no network: logistic regression on features.

Features are standardised over all training images, including those whose labels are not used.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.preparation import scaled
from duetgan.models.registry import TRAINED_BACKBONES
from duetgan.training.classifier.frozen import blocks, image_features
from duetgan.training.classifier.probe import fit, scale_of
from duetgan.utils.seeding import forked

SIDE = 32  # side in px to which larger images are scaled if their pixels are the features

Features = Callable[[Dataset], Tensor]  # images -> their features, float32 [n, F]
# (labels int64 [n], seed=) -> indices of the images whose labels are used
Labelled = Callable[..., np.ndarray]


def pixels(dataset: Dataset) -> Tensor:
    """Return the pixel values of all images, scaled down to at most SIDE px, float32 [n, F]."""
    side = min(SIDE, dataset.spec.side)
    parts = (
        read_batch(dataset, rows).images.float() for rows in blocks(len(dataset), dataset.spec.side)
    )
    return torch.cat([scaled(images, side).flatten(1) for images in parts])


def before_training(dataset: Dataset, **model: Any) -> Tensor:
    """Compute the features of all images by a classifier network before its training.

    The features are float32 [n, F]. `model` has the fields of a ModelConfig. The weights are
    random, with the key (0, "init", "classifier"), or those of the discriminator that the config
    names.
    """
    # ModelConfig is built only here, because it requires that the discriminator's run exists.
    config = ModelConfig(**model | {"weights": model["weights"] and str(model["weights"])})
    with forked(0, "init", "classifier"):
        classifier = Classifier(
            config, channels=dataset.spec.channels, classes=2, resolution=dataset.resolution
        )
    if config.discriminator is not None:
        TRAINED_BACKBONES[config.name].load(classifier)
    with torch.no_grad():
        return image_features(classifier, dataset, mirror=False)[0][:, 0]


def baselines(model: ModelConfig) -> dict[str, tuple[str, Features]]:
    """Return the baselines as a dict from name to (description, function).

    The function computes the features of images. `model` is the config of the network whose
    features before training are a baseline.
    """
    return {
        "pixels": ("a logistic regression on the pixels", pixels),
        "untrained features": (
            "a logistic regression on what the recipe's network gives before its first step",
            partial(before_training, **model.model_dump()),
        ),
    }


def hits_of(
    training: Path, files: Mapping[str, Path], features: Features, labelled: Labelled | None
) -> dict[str, np.ndarray]:
    """Fit a logistic regression on training images, and predict the images of other files.

    Cross-validation chooses the regularisation.

    Args:
        training: Packed file of the training images.
        files: Packed files of the images to predict, by name.
        features: Function that computes the features of images.
        labelled: Function of the labels that returns the indices of the training images whose
            labels are used; None: all.

    Returns:
        A dict from the name of a file to bool [n], True for each correct prediction.
    """
    with Dataset(training) as dataset:
        x = features(dataset)
        labels = torch.tensor(dataset.labels())
        classes = len(dataset.classes)
    chosen = torch.arange(len(labels))
    if labelled is not None:
        chosen = torch.from_numpy(labelled(labels.numpy()))
    probe = fit(x[chosen, None], labels[chosen], classes, scale=scale_of(x))
    hits = {}
    for name, file in files.items():
        with Dataset(file) as dataset:
            predicted = F.linear(features(dataset), probe.weight, probe.bias).argmax(1)
            hits[name] = predicted.numpy() == dataset.labels()
    return hits
