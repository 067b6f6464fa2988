"""Kernel distance of two sets of features (KID; Binkowski et al. 2018, 1801.01401)."""

import torch
from torch import Tensor

from utils.seeding import numpy_generator

SUBSETS = 20
SUBSET_SIZE = 1000


def polynomial_kernel(first: Tensor, second: Tensor) -> Tensor:
    """k(x, y) = (<x, y> / F + 1)^3 of features [n, F] and [m, F]; returns [n, m]."""
    return (first @ second.T / first.shape[1] + 1).pow(3)


def squared_mmd(first: Tensor, second: Tensor) -> float:
    """Unbiased estimate of the squared maximum mean discrepancy (Gretton et al. 2012, eq. 3); may be below 0.

    `first` [n, F] and `second` [m, F] in float64, n and m at least 2.
    """
    inner = []
    for features in (first, second):
        kernel = polynomial_kernel(features, features)
        inner.append((kernel.sum() - kernel.trace()) / (len(features) * (len(features) - 1)))
    return float(inner[0] + inner[1] - 2 * polynomial_kernel(first, second).mean())


def kernel_distance(
    first: Tensor,  # features [n, F]
    second: Tensor,  # features [m, F]
    *,
    seed: int,
    subsets: int = SUBSETS,
    subset_size: int = SUBSET_SIZE,
) -> float:
    """Mean unbiased squared MMD over random subsets of equal size; 0 is expected of equal distributions.

    Subset i is drawn without replacement by the key (seed, "eval", "kernel", i). Where both sets have no more than
    `subset_size` vectors, all subsets would be the whole sets, which are then taken once.
    Raises ValueError for different dimensions, or fewer than two vectors in a set.
    """
    size = min(subset_size, len(first), len(second))
    if size < 2 or first.shape[1] != second.shape[1]:
        raise ValueError(f"no kernel distance between features {list(first.shape)} and {list(second.shape)}")
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    if size == len(first) == len(second):
        return squared_mmd(first, second)
    total = 0.0
    for index in range(subsets):
        draw = numpy_generator(seed, "eval", "kernel", index)
        rows1 = torch.from_numpy(draw.permutation(len(first))[:size])
        rows2 = torch.from_numpy(draw.permutation(len(second))[:size])
        total += squared_mmd(first[rows1], second[rows2])
    return total / subsets
