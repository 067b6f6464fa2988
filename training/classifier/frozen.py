"""What the first stages of a classifier give for every image, computed once: for training that leaves them as they are,
and for whoever fits something of their own to a network's features.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import evaluating
from duetgan.models.classifier import Classifier

BLOCK, PIXELS = 256, 1 << 21  # images that are computed together, and their pixels, at most


def blocks(count: int, side: int) -> Iterator[np.ndarray]:
    """The records of images of `side` px that are computed together: always the same ones, for the last bits of a
    convolution may depend on the others of its batch.
    """
    size = max(1, min(BLOCK, PIXELS // side**2))
    return (np.arange(start, min(start + size, count)) for start in range(0, count, size))


def outputs(
    model: Classifier,
    dataset: Dataset,
    records: np.ndarray,
    *,
    mirror: bool,
    end: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What the first `end` stages (None: all, then the pooling) give for images as they are stored and, with `mirror`,
    mirrored left-right: [n, 1 or 2, ...] where the model lies; and labels int64 [n]. Modes, precision and gradients are
    the caller's.
    """
    batch = read_batch(dataset, records)
    images = classifier_input(model, batch.images)
    views = [images, images.flip(3)] if mirror else [images]
    return torch.stack([model.features(view, end) for view in views], 1), batch.labels


def image_features(model: Classifier, dataset: Dataset, *, mirror: bool = True) -> tuple[Tensor, Tensor]:
    """Pooled features, which the head takes, of every image of a data set and of its mirror image: float32 [n, 2, F] on
    the CPU (without `mirror` [n, 1, F]), and labels int64 [n].

    `features[:, 0]` are the images', `features[:, 1]` the mirror images'. They are brought to the model's size and
    channels, computed where it lies, in evaluation mode; random crops of the data set are not taken. The same call
    gives the same bits.
    """
    with evaluating(model):
        sides = blocks(len(dataset), model.side or model.resolution)
        parts = [outputs(model, dataset, records, mirror=mirror) for records in sides]
        features, labels = (torch.cat(part) for part in zip(*((f.float().cpu(), y) for f, y in parts), strict=True))
    return features, labels
