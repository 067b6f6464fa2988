"""Kernel distance between two feature sets (KID; Binkowski et al. 2018, 1801.01401)."""

import torch
from torch import Tensor

from duetgan.utils.seeding import numpy_generator

SUBSETS = 20
SUBSET_SIZE = 1000


def polynomial_kernel(first: Tensor, second: Tensor) -> Tensor:
    """Return k(x, y) = (<x, y> / F + 1)^3, [n, m], of features [n, F] and [m, F]."""
    return (first @ second.T / first.shape[1] + 1).pow(3)


def squared_mmd(first: Tensor, second: Tensor) -> tuple[float, list[Tensor]]:
    """Return the squared MMD of features [n, F] and [m, F], and each image's influence on it.

    The squared MMD (maximum mean discrepancy) is estimated without bias (Gretton et al. 2012,
    equation 3), so it may be below 0. An influence is the derivative of the estimate by the
    logarithm of an image's weight. The influences, [n] and [m], sum to 0. Features must be float64,
    and n and m at least 2.
    """
    inner, rows = [], []
    for features in (first, second):
        kernel = polynomial_kernel(features, features)
        inner.append((kernel.sum() - kernel.trace()) / (len(features) * (len(features) - 1)))
        rows.append((kernel.sum(1) - kernel.diagonal()) / (len(features) - 1))
    cross = polynomial_kernel(first, second)
    mean = cross.mean()
    influences = [
        2 * ((row - row_mean) - (cross.mean(1 - side) - mean)) / len(row)
        for side, (row, row_mean) in enumerate(zip(rows, inner, strict=True))
    ]
    return float(inner[0] + inner[1] - 2 * mean), influences


def kernel_distance(first: Tensor, second: Tensor, *, seed: int) -> tuple[float, float]:
    """Return the kernel distance of features [n, F] and [m, F], and its variance.

    The distance is the mean unbiased squared MMD over SUBSETS random subsets; its expectation is 0
    for equal distributions. Subset i is drawn without replacement by the key (seed, "eval",
    "kernel", i). Two sets of the same size, at most SUBSET_SIZE, are compared only once, as a
    whole.

    The variance, over draws of both sets, is that of the infinitesimal jackknife. A bootstrap would
    be biased: an image that is drawn twice is unusually near to itself. If both sets come from the
    same distribution, the variance is up to twice too large. Each set must have at least two
    vectors.
    """
    size = min(SUBSET_SIZE, len(first), len(second))
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    if size == len(first) == len(second):
        value, influences = squared_mmd(first, second)
        return value, sum(float(influence.square().sum()) for influence in influences)
    total = 0.0
    sums = [first.new_zeros(len(first)), second.new_zeros(len(second))]
    for index in range(SUBSETS):
        draw = numpy_generator(seed, "eval", "kernel", index)
        rows = [torch.from_numpy(draw.permutation(len(part))[:size]) for part in (first, second)]
        value, influences = squared_mmd(first[rows[0]], second[rows[1]])
        total += value
        for part_sum, chosen, influence in zip(sums, rows, influences, strict=True):
            part_sum[chosen] += influence / SUBSETS
    return total / SUBSETS, sum(float(part_sum.square().sum()) for part_sum in sums)
