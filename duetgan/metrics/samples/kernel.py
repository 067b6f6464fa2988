"""Kernel distance of two sets of features (KID; Binkowski et al. 2018, 1801.01401)."""

import torch
from torch import Tensor

from duetgan.utils.seeding import numpy_generator

SUBSETS = 20
SUBSET_SIZE = 1000


def polynomial_kernel(first: Tensor, second: Tensor) -> Tensor:
    """k(x, y) = (<x, y> / F + 1)^3 of features [n, F] and [m, F]; returns [n, m]."""
    return (first @ second.T / first.shape[1] + 1).pow(3)


def squared_mmd(first: Tensor, second: Tensor) -> tuple[float, list[Tensor]]:
    """Unbiased estimate of the squared maximum mean discrepancy (Gretton et al. 2012, eq. 3), which
    may be below 0, and how it answers to the weight of each image: its derivatives [n] and [m] by
    log weights, which sum to 0.

    `first` [n, F] and `second` [m, F] in float64, n and m at least 2.
    """
    inner, rows = [], []
    for features in (first, second):
        kernel = polynomial_kernel(features, features)
        inner.append((kernel.sum() - kernel.trace()) / (len(features) * (len(features) - 1)))
        rows.append((kernel.sum(1) - kernel.diagonal()) / (len(features) - 1))
    cross = polynomial_kernel(first, second)
    mean = cross.mean()
    answers = [
        2 * ((row - own) - (cross.mean(1 - side) - mean)) / len(row)
        for side, (row, own) in enumerate(zip(rows, inner, strict=True))
    ]
    return float(inner[0] + inner[1] - 2 * mean), answers


def kernel_distance(first: Tensor, second: Tensor, *, seed: int) -> tuple[float, float]:
    """Mean unbiased squared MMD of features [n, F] and [m, F] over random subsets of equal size, 0
    is expected of equal distributions; and its variance over draws of both sets of images by the
    infinitesimal jackknife.

    Subset i is drawn without replacement by the key (seed, "eval", "kernel", i). Where both sets
    have no more than SUBSET_SIZE vectors, all subsets would be the whole sets, which are then taken
    once. A bootstrap would be biased: an image that is drawn twice is unusually near to itself.
    Where the sets are equal but for chance, the variance is up to twice too large. Raises
    ValueError for different dimensions, or fewer than two vectors in a set.
    """
    size = min(SUBSET_SIZE, len(first), len(second))
    if size < 2 or first.shape[1] != second.shape[1]:
        raise ValueError(
            f"no kernel distance between features {list(first.shape)} and {list(second.shape)}"
        )
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    if size == len(first) == len(second):
        value, answers = squared_mmd(first, second)
        return value, sum(float(each.square().sum()) for each in answers)
    total, sums = 0.0, [first.new_zeros(len(first)), second.new_zeros(len(second))]
    for index in range(SUBSETS):
        draw = numpy_generator(seed, "eval", "kernel", index)
        rows = [torch.from_numpy(draw.permutation(len(part))[:size]) for part in (first, second)]
        value, answers = squared_mmd(first[rows[0]], second[rows[1]])
        total += value
        for kept, chosen, answer in zip(sums, rows, answers, strict=True):
            kept[chosen] += answer / SUBSETS
    return total / SUBSETS, sum(float(each.square().sum()) for each in sums)
