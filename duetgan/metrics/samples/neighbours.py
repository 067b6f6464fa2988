"""Compute precision, recall, density and coverage, and the clipped forms of the last two.

The metrics count how many samples and real images lie in the balls of other images. The ball of an
image reaches to its k-th nearest neighbour in its own set, the samples or the real images. One pass
over all distances makes the counts. It computes in float64 and in blocks, so that memory does not
grow with the square of the number of images.

The counts are separate for GROUPS groups of images, because the intervals follow from the values of
a metric without each group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.intervals import Measured, jackknife_variance

K_MANIFOLD = 3  # neighbours of precision and recall, as in 1904.06991
K_DENSITY = 5  # neighbours of density and coverage, as in 2002.09797
GROUPS = 50  # image i is in group i % GROUPS
# images compared at a time, so that distances take 32 MiB for sets of any size
QUERY_BLOCK, REFERENCE_BLOCK = 1024, 4096
SLACK = 1e-9  # relative enlargement, so that images on the surface of a ball are inside it


def distance_blocks(first: Tensor, second: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield squared Euclidean distances between vectors [n, F] and [m, F] in blocks, float64.

    A block is (rows, columns, distances [rows, columns]); rows and columns are slices.
    """
    # centred features are smaller, so that cancellation loses fewer digits
    centre = second[:REFERENCE_BLOCK].double().mean(0)
    for start in range(0, len(second), REFERENCE_BLOCK):
        columns = slice(start, min(start + REFERENCE_BLOCK, len(second)))
        block = second[columns].double() - centre
        norms = block.square().sum(1)
        for begin in range(0, len(first), QUERY_BLOCK):
            rows = slice(begin, min(begin + QUERY_BLOCK, len(first)))
            queries = first[rows].double() - centre
            squares = torch.addmm(norms[None], queries, block.T, alpha=-2).add_(
                queries.square().sum(1)[:, None]
            )
            yield rows, columns, squares.clamp_(min=0)


def neighbours(queries: Tensor, references: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k references, of [m, F], that are nearest to each query, of [n, F].

    If queries and references are the same tensor, an image is no neighbour of itself.

    Returns:
        Squared distances, ascending, and indices of the references, both [n, k].

    Raises:
        ValueError: If there are fewer than k references.
    """
    if len(references) - (queries is references) < k:
        raise ValueError(f"{len(references)} images have no {k} neighbours each")
    squares = torch.full((len(queries), k), torch.inf, dtype=torch.float64)
    indices = torch.zeros(len(queries), k, dtype=torch.int64)
    for rows, columns, block in distance_blocks(queries, references):
        first = max(rows.start, columns.start)
        if queries is references:
            diagonal = torch.arange(first, max(first, min(rows.stop, columns.stop)))
            block[diagonal - rows.start, diagonal - columns.start] = torch.inf
        if k == 1:  # min returns the first of equally near references
            values, places = block.min(1, keepdim=True)
        else:
            values, places = block.topk(min(k, block.shape[1]), largest=False)
        merged = torch.cat([squares[rows], values], dim=1).sort(dim=1, stable=True)
        squares[rows] = merged.values[:, :k]
        candidates = torch.cat([indices[rows], places + columns.start], dim=1)
        indices[rows] = candidates.gather(1, merged.indices[:, :k])
    return squares, indices


@dataclass(frozen=True, kw_only=True)
class Neighbourhoods:
    """Numbers of the m samples and n real images that lie in each other's balls.

    Each field has a row of counts for every sample, [m, G], or for every real image, [n, G]. Column
    g counts only images of group g.
    """

    # [m, G]: real images whose ball of K_MANIFOLD neighbours holds the sample
    manifold_of_real: Tensor
    # [n, G]: samples whose ball of K_MANIFOLD neighbours holds the real image
    manifold_of_samples: Tensor
    dense: Tensor  # [m, G]: real images whose ball of K_DENSITY neighbours holds the sample
    covering: Tensor  # [n, G]: samples in the real image's ball of K_DENSITY neighbours
    clipped: Tensor  # [m, G]: as `dense`, with radii limited to the median radius
    clipped_real: Tensor  # [n, G]: real images whose limited ball holds this real image


def neighbourhoods(samples: Tensor, real: Tensor) -> Neighbourhoods:
    """Count samples and real images in each other's balls, from features [m, F] and [n, F].

    Raises ValueError if there are at most K_DENSITY real images or at most K_MANIFOLD samples.
    """
    near_real, indices = neighbours(real, real, K_DENSITY)
    near_samples, _ = neighbours(samples, samples, K_MANIFOLD)
    scale = float(real[:REFERENCE_BLOCK].double().var(0).sum())
    manifold, dense = near_real[:, K_MANIFOLD - 1], near_real[:, K_DENSITY - 1]
    limited = dense.clamp(max=float(dense.quantile(0.5)))
    real_balls = [_squared_radii(squares, scale) for squares in (manifold, dense, limited)]
    sample_balls = _squared_radii(near_samples[:, K_MANIFOLD - 1], scale)
    sample_groups, real_groups = _one_hot(len(samples)), _one_hot(len(real))
    real_around_sample = [torch.zeros(len(samples), real_groups.shape[1]) for _ in real_balls]
    manifold_of_samples = torch.zeros(len(real), sample_groups.shape[1])
    covering = torch.zeros_like(manifold_of_samples)
    for rows, columns, squares in distance_blocks(samples, real):
        for counts, radii in zip(real_around_sample, real_balls, strict=True):
            counts[rows] += (squares <= radii[columns]).float() @ real_groups[columns]
        in_sample_ball = (squares <= sample_balls[rows, None]).float()
        manifold_of_samples[columns] += in_sample_ball.T @ sample_groups[rows]
        in_real_ball = (squares <= real_balls[1][columns]).float()
        covering[columns] += in_real_ball.T @ sample_groups[rows]
    inside = near_real <= real_balls[2][:, None]
    centres = inside.nonzero()[:, 0]
    clipped_real = torch.zeros(len(real), real_groups.shape[1])
    clipped_real.index_add_(0, indices[inside], real_groups[centres])
    return Neighbourhoods(
        manifold_of_real=real_around_sample[0],
        manifold_of_samples=manifold_of_samples,
        dense=real_around_sample[1],
        covering=covering,
        clipped=real_around_sample[2],
        clipped_real=clipped_real,
    )


def _squared_radii(squares: Tensor, scale: float) -> Tensor:
    """Return squared radii, enlarged a little so that rounding excludes no image on a surface.

    `scale` is the sum of the variances of the features.
    """
    return squares * (1 + SLACK) + scale * 1e-12


def _one_hot(count: int) -> Tensor:
    """Return the groups of `count` images as one-hot rows, float32 [count, G]."""
    groups = min(GROUPS, count)
    return torch.eye(groups)[torch.arange(count) % groups]


class Estimate(NamedTuple):
    """A mean over images, and the same mean computed again without each group of images."""

    value: float
    without_averaged: Tensor  # [G]: without each group of the images that are averaged
    without_counted: Tensor  # [G]: without each group of the images that are counted in balls

    def measured(self, *, high: float = 1.0) -> Measured:
        """Return the mean with a 95 % interval, by the jackknife over the groups of both sets."""
        variance = jackknife_variance(self.without_averaged)
        variance += jackknife_variance(self.without_counted)
        return Measured.normal(self.value, variance, low=0.0, high=high)


def estimate(
    counts: Tensor, figure: Callable[[Tensor], Tensor], counted: int, *, rescale: bool = False
) -> Estimate:
    """Average a metric over A images, and again without each group of images.

    Each of the A images has a count of other images; the count of a sample, for example, is the
    number of real images whose ball holds the sample. The metric of an image is a function of its
    count. The average is computed anew without each group of the A images, and with counts that
    leave out each group of the counted images.

    Args:
        counts: Counts of the A images, [A, G]. Column g counts only images of group g.
        figure: Function from the total counts, [A], to the metric of each image, [A].
        counted: Size of the set that is counted.
        rescale: If True, a count without a group is scaled up to the size of the whole set.
    """
    totals = counts.double().sum(1)
    values = figure(totals)
    groups = _one_hot(len(counts)).double()
    without_averaged = (values.sum() - values @ groups) / (len(counts) - groups.sum(0))
    without_counted = []
    for group, size in enumerate(_one_hot(counted).sum(0).tolist()):
        remaining = totals - counts[:, group]
        if rescale:
            remaining = remaining * (counted / (counted - size))
        without_counted.append(figure(remaining).mean())
    return Estimate(float(values.mean()), without_averaged, torch.stack(without_counted))


# --- Kynkäänniemi et al. 2019, 1904.06991, eq. 1 and 2


def precision(near: Neighbourhoods) -> Measured:
    """Return the fraction of samples in the manifold of real images.

    The manifold is the union of the real images' balls.
    """
    return estimate(near.manifold_of_real, _any, len(near.manifold_of_samples)).measured()


def recall(near: Neighbourhoods) -> Measured:
    """Return the fraction of real images in the manifold of samples.

    The manifold is the union of the samples' balls.
    """
    return estimate(near.manifold_of_samples, _any, len(near.manifold_of_real)).measured()


# --- Naeem et al. 2020, 2002.09797, eq. 6 and 7


def density(near: Neighbourhoods) -> Measured:
    """Return the mean number of real images' balls that hold a sample, divided by K_DENSITY.

    The density is about 1 if the samples are real images. It is above 1 if the samples concentrate
    where real images are dense.
    """
    result = estimate(
        near.dense, lambda counts: counts / K_DENSITY, len(near.covering), rescale=True
    )
    return result.measured(high=torch.inf)


def coverage(near: Neighbourhoods) -> Measured:
    """Return the fraction of real images whose ball holds at least one sample.

    The coverage is about 1 - (1/2)^K_DENSITY if the samples are real images.
    """
    return estimate(near.covering, _any, len(near.dense)).measured()


# --- Salvy et al. 2025, 2507.01761: fractions that can be read as percentages. If x % of the
# samples are noise, clipped density is about 1 - x %. If samples miss x % of the modes of the real
# images, clipped coverage is about 1 - x %. If the samples are real images, both are about 1.


def clipped_density(near: Neighbourhoods) -> Measured:
    """Return the density of samples, divided by that of real images, at most 1.

    For both densities, a radius is at most the median radius, and an image adds at most 1. The
    value is 0 if the density of the real images is 0.
    """
    samples = estimate(near.clipped, _filled, len(near.covering), rescale=True)
    real = estimate(near.clipped_real, _filled, len(near.covering), rescale=True)
    if real.value == 0:
        return Measured(0.0, [0.0, 1.0])
    value = samples.value / real.value
    # real images are centres of balls in both densities, and also lie in balls in their own one
    without_real = real.without_averaged + real.without_counted - real.value
    variance = jackknife_variance(samples.without_averaged / real.value)
    variance += jackknife_variance(samples.without_counted / without_real)
    return Measured(min(1.0, value), Measured.normal(value, variance, low=0.0, high=1.0).interval)


def clipped_coverage(near: Neighbourhoods) -> Measured:
    """Return M / m if M ideal samples fill the real images' balls as well as the m samples do.

    Ideal samples have the distribution of the real images. The fullness of a ball is the number of
    samples in it divided by K_DENSITY, at most 1. M is the number of ideal samples whose expected
    mean fullness is that of the m samples.
    """
    samples = len(near.dense)
    fullness = estimate(near.covering, _filled, samples, rescale=True).measured()
    expected = expected_fullness(samples, len(near.covering), K_DENSITY)

    def invert(fraction: float | None) -> float:
        return float(np.searchsorted(expected, fraction or 0.0) / len(expected))

    interval = list(map(invert, fullness.interval or ()))
    has_interval = bool(interval) and interval[0] < interval[1]
    return Measured(invert(fullness.value), interval if has_interval else None)


def expected_fullness(samples: int, real: int, k: int) -> np.ndarray:
    """Return the expected fullness of a real image's ball for 0 to `samples` ideal samples.

    The result is float64 [samples + 1]. Ideal samples have the distribution of the N real images.
    The fullness is min(J, k) / k if J of M ideal samples are in the ball, which reaches to the k-th
    nearest of the N - 1 other real images. J is beta-binomial with the parameters k and N - k for
    any distribution (section 4.2 of the paper).
    """
    from scipy.stats import betabinom  # imported here because the import takes a second

    j = np.arange(k)  # [k]
    chances = betabinom.pmf(j, np.arange(samples + 1)[:, None], k, real - k)  # [samples + 1, k]
    return 1 - (chances * (k - j)).sum(1) / k


def _any(counts: Tensor) -> Tensor:
    return (counts > 0).double()


def _filled(counts: Tensor) -> Tensor:
    """Return the fullness of balls: counts divided by K_DENSITY, at most 1."""
    return (counts / K_DENSITY).clamp(max=1)
