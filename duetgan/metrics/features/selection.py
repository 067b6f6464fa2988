"""Choose the images of an evaluation: random images of a dataset, and a generator's samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.models.gan import ImageGenerator, generate
from duetgan.utils.seeding import numpy_generator


@dataclass(frozen=True)
class Selection:
    """Images drawn from a dataset, with their labels."""

    indices: np.ndarray  # record numbers, int64 [m]
    labels: np.ndarray  # int64 [m]
    key: str  # identifies the draw among all draws from the same dataset

    def images(self, dataset: Dataset, rows: range) -> Tensor:
        """Read the selected images at the positions `rows` of the selection: [b, C, H, W]."""
        return torch.from_numpy(dataset.read(self.indices[rows.start : rows.stop])[0])


def select(
    labels: np.ndarray,
    *,
    n: int,
    seed: int,
    role: str,
    per_class: int = 0,
    multi_hot: np.ndarray | None = None,
) -> Selection:
    """Draw n images without replacement, then add images until each class has `per_class`.

    If a class has fewer images than `per_class`, all of them are drawn.

    Args:
        labels: Labels of the whole dataset, int64 [count].
        seed: Seed of the draw. The random key is (seed, "eval", role).
        role: Name of the draw, such as "test".
        multi_hot: Classes of each label, bool [labels, classes], if labels stand for sets of
            classes.
    """
    order = numpy_generator(seed, "eval", role).permutation(len(labels))
    required = np.zeros(len(order), dtype=bool)
    if multi_hot is None:
        classes = [labels[order] == label for label in np.unique(labels)]
    else:
        classes = list(multi_hot[labels[order]].T)
    for is_member in classes:
        required[np.flatnonzero(is_member)[:per_class]] = True
    order = np.concatenate([order[:n], order[n:][required[n:]]])
    return Selection(order, labels[order], f"{role} {seed} {n} {per_class}")


def draw_samples(
    generator: ImageGenerator, conditions: Tensor | None, indices: Sequence[int], *, seed: int
) -> Tensor:
    """Generate samples in full float32 precision: images [n, C, H, W], uint8 for 8-bit generators.

    The sample with number i depends only on the seed, i and its condition.

    Args:
        conditions: Labels in the generator's format, [n, ...]; None for an unconditional one.
        indices: Numbers of the n samples.
    """
    with evaluating(generator), full_float32(device_of(generator)):
        return generate(generator, labels=conditions, indices=indices, seed=seed)
