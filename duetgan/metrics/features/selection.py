"""Which images of a file an evaluation looks at."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.utils.seeding import numpy_generator


@dataclass(frozen=True)
class Selection:
    """Which images of a file are looked at."""

    indices: np.ndarray  # int64 [m]
    labels: np.ndarray  # int64 [m]
    key: str  # tells this draw from every other one of the same file

    def images(self, reader: Dataset, rows: range) -> Tensor:
        """Those at some places of the draw, uint8 [b, C, H, W]."""
        return torch.from_numpy(reader.read(self.indices[rows.start : rows.stop])[0])


def select(
    labels: np.ndarray,
    *,
    n: int,
    seed: int,
    role: str,
    per_class: int = 0,
    hot: np.ndarray | None = None,
) -> Selection:
    """Draw n images without replacement by the key (seed, "eval", role), then add until a class has
    `per_class`.

    `labels` int64 [count] are those of the whole file; `hot` bool [labels, classes]: of which
    classes an image of each is, if not of one. A class with fewer than `per_class` in it comes with
    all it has.
    """
    order = numpy_generator(seed, "eval", role).permutation(len(labels))
    wanted = np.zeros(len(order), dtype=bool)
    for each in np.unique(labels) if hot is None else range(hot.shape[1]):
        members = labels[order] == each if hot is None else hot[labels[order], each]
        wanted[np.flatnonzero(members)[:per_class]] = True
    order = np.concatenate([order[:n], order[n:][wanted[n:]]])
    return Selection(order, labels[order], f"{role} {seed} {n} {per_class}")
