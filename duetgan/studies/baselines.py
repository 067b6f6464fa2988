"""What tells images apart without the training of a network: a logistic regression on features that
images without labels standardise, and labels that spread over neighbours.
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
from duetgan.metrics.samples.spreading import UNKNOWN, spreading
from duetgan.models.classifier import Classifier, ModelConfig, scaled
from duetgan.training.classifier.frozen import blocks, image_features
from duetgan.training.classifier.network import load_discriminator
from duetgan.training.classifier.probe import fit
from duetgan.utils.seeding import forked

SIDE = 32  # px of images whose pixels are features, at most

Features = Callable[[Dataset], Tensor]  # -> float32 [n, F]
# (features [n, F], labels int64 [n], some UNKNOWN, those asked for [m, F], classes) -> their
# classes int64 [m]
Learner = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def pixels(reader: Dataset) -> Tensor:
    """The values of all pixels, of large images at SIDE px."""
    side = min(SIDE, reader.spec.side)
    parts = (
        read_batch(reader, rows).images.float() for rows in blocks(len(reader), reader.spec.side)
    )
    return torch.cat([scaled(images, side).flatten(1) for images in parts])


def before_training(reader: Dataset, **about: Any) -> Tensor:
    """What the head takes of a classifier's network (keys of ModelConfig) before its first step: as
    it is drawn, key (0, "init", "classifier"), or a discriminator's.
    """
    # a GAN's run must be there
    config = ModelConfig(**about | {"weights": about["weights"] and str(about["weights"])})
    with forked(0, "init", "classifier"):
        model = Classifier(
            config, channels=reader.spec.channels, classes=2, resolution=reader.resolution
        )
    if config.discriminator is not None:
        load_discriminator(model)
    with torch.no_grad():
        return image_features(model, reader, mirror=False)[0][:, 0]


def readout(features: Tensor, labels: Tensor, asked: Tensor, classes: int) -> Tensor:
    """By the regression that a fine-tuning may begin with, its strength chosen by cross-validation."""
    known = labels != UNKNOWN
    found = fit(features[known, None], labels[known], classes, like=features)
    return F.linear(asked, found.weight, found.bias).argmax(1)


def spread(features: Tensor, labels: Tensor, asked: Tensor, classes: int) -> Tensor:
    """By labels that spread over a graph of neighbours."""
    return spreading(features, labels, asked, classes)[1].argmax(1)


def ways(model: ModelConfig) -> dict[str, tuple[str, Features, Learner]]:
    """Name -> what it is, features, learner."""
    before, untrained = (
        "a logistic regression on what the recipe's network gives",
        model.model_dump(),
    )
    return {
        "pixels": ("a logistic regression on the pixels", pixels, readout),
        "untrained features": (
            f"{before} before its first step",
            partial(before_training, **untrained),
            readout,
        ),
        "neighbours": ("labels spread over neighbours, by their pixels", pixels, spread),
    }


def hits_of(
    training: Path, files: Mapping[str, Path], features: Features, learn: Learner, known: Any
) -> dict[str, np.ndarray]:
    """Which images of each file are told right, bool [n], where of the training images `known`
    (labels -> records; None: all) have labels.
    """
    with Dataset(training) as reader:
        x, labels, classes = features(reader), torch.tensor(reader.labels()), len(reader.classes)
    if known is not None:
        chosen = torch.from_numpy(known(labels.numpy()))
        labels = torch.full_like(labels, UNKNOWN).scatter(0, chosen, labels[chosen])
    asked: dict[str, tuple[Tensor, Tensor]] = {}
    for name, file in files.items():
        with Dataset(file) as reader:
            asked[name] = features(reader), torch.tensor(reader.labels())
    answers = learn(x, labels, torch.cat([of for of, _ in asked.values()]), classes)
    split = zip(asked, answers.split([len(of) for of, _ in asked.values()]), strict=True)
    return {name: (found == asked[name][1]).numpy() for name, found in split}
