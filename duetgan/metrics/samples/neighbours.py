"""Which images lie in whose neighbourhood: precision, recall, density and coverage, plain and
clipped, in one pass.

The ball of an image reaches to its k-th nearest neighbour in its own set. Everything is computed in
float64 and in blocks, so that memory does not grow with the square of the number of images. Counts
are kept for each of GROUPS groups of images: figures without one group give their intervals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.intervals import Measured, jackknife_variance

K_MANIFOLD = 3  # neighbours of precision and recall, as in 1904.06991
K_DENSITY = 5  # of density and coverage, as in 2002.09797
GROUPS = 50  # image i is in group i % GROUPS
# rows at a time: 32 MiB of distances whatever the sizes of the sets
QUERY_BLOCK, REFERENCE_BLOCK = 1024, 4096
SLACK = 1e-9  # relative: an image on the rim of a ball is inside, whatever the rounding


def distance_blocks(first: Tensor, second: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Squared Euclidean distances of [n, F] and [m, F], float64, block by block: (rows, columns,
    [rows, columns]).
    """
    # about it, numbers are small and lose less to cancellation
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
    """The k nearest references [m, F] of each query [n, F], of the set itself the others alone:
    squared distances, ascending, and indices, both [n, k]. Raises ValueError for fewer references.
    """
    if len(references) - (queries is references) < k:
        raise ValueError(f"{len(references)} images have no {k} neighbours each")
    squares = torch.full((len(queries), k), torch.inf, dtype=torch.float64)
    indices = torch.zeros(len(queries), k, dtype=torch.int64)
    for rows, columns, block in distance_blocks(queries, references):
        first = max(rows.start, columns.start)
        # the images that are in both
        own = torch.arange(first, max(first, min(rows.stop, columns.stop)))
        if queries is references:
            block[own - rows.start, own - columns.start] = torch.inf
        # of equally near ones the first
        near = (
            block.min(1, keepdim=True)
            if k == 1
            else block.topk(min(k, block.shape[1]), largest=False)
        )
        both = torch.cat([squares[rows], near.values], dim=1).sort(dim=1, stable=True)
        squares[rows] = both.values[:, :k]
        indices[rows] = torch.cat([indices[rows], near.indices + columns.start], dim=1).gather(
            1, both.indices[:, :k]
        )
    return squares, indices


@dataclass(frozen=True, kw_only=True)
class Neighbourhoods:
    """Counts of balls and images in them, by the group of the other image. m samples, n real
    images.
    """

    # [m, G]: real images whose ball of K_MANIFOLD neighbours holds the sample
    manifold_of_real: Tensor
    # [n, G]: samples whose ball of K_MANIFOLD neighbours holds the real image
    manifold_of_samples: Tensor
    dense: Tensor  # [m, G]: real images whose ball of K_DENSITY neighbours holds the sample
    covering: Tensor  # [n, G]: samples in the real image's ball of K_DENSITY neighbours
    clipped: Tensor  # [m, G]: as `dense`, but no ball reaches farther than the median one
    clipped_real: Tensor  # [n, G]: the other real images whose such ball holds the real image


def neighbourhoods(samples: Tensor, real: Tensor) -> Neighbourhoods:
    """Of features [m, F] and [n, F]. Raises ValueError where a set has no more images than
    neighbours are asked for.
    """
    near_real, indices = neighbours(real, real, K_DENSITY)
    near_samples, _ = neighbours(samples, samples, K_MANIFOLD)
    scale = float(real[:REFERENCE_BLOCK].double().var(0).sum())
    manifold, dense = near_real[:, K_MANIFOLD - 1], near_real[:, K_DENSITY - 1]
    short = dense.clamp(max=float(dense.quantile(0.5)))
    # balls around real images
    by_sample = [_reach(squares, scale) for squares in (manifold, dense, short)]
    ball_of_sample = _reach(near_samples[:, K_MANIFOLD - 1], scale)
    groups = [_one_hot(len(part)) for part in (samples, real)]
    on_samples = [torch.zeros(len(samples), groups[1].shape[1]) for _ in by_sample]
    # by samples' balls, in real balls
    on_real = [torch.zeros(len(real), groups[0].shape[1]) for _ in range(2)]
    for rows, columns, squares in distance_blocks(samples, real):
        for total, reach in zip(on_samples, by_sample, strict=True):
            total[rows] += (squares <= reach[columns]).float() @ groups[1][columns]
        for total, reach in zip(
            on_real, (ball_of_sample[rows, None], by_sample[1][columns]), strict=True
        ):
            total[columns] += (squares <= reach).float().T @ groups[0][rows]
    inside = near_real <= by_sample[2][:, None]
    centres = inside.nonzero()[:, 0]
    own = torch.zeros(len(real), groups[1].shape[1])
    own.index_add_(0, indices[inside], groups[1][centres])
    return Neighbourhoods(
        manifold_of_real=on_samples[0],
        manifold_of_samples=on_real[0],
        dense=on_samples[1],
        covering=on_real[1],
        clipped=on_samples[2],
        clipped_real=own,
    )


def _reach(squares: Tensor, scale: float) -> Tensor:
    """Squared radii with the slack of rounding, of numbers about `scale` large."""
    return squares * (1 + SLACK) + scale * 1e-12


def _one_hot(count: int) -> Tensor:
    """The group of each image, float32 [count, G]."""
    groups = min(GROUPS, count)
    return torch.eye(groups)[torch.arange(count) % groups]


class Estimate(NamedTuple):
    """A figure and what it is without each group of the images averaged over, and without each
    group of the others.
    """

    value: float
    without_own: Tensor  # [G]
    without_other: Tensor  # [G]

    def measured(self, *, high: float = 1.0) -> Measured:
        """With its 95 % interval, from the jackknife over the groups of both sets."""
        variance = jackknife_variance(self.without_own) + jackknife_variance(self.without_other)
        return Measured.normal(self.value, variance, low=0.0, high=high)


def estimate(
    counts: Tensor, figure: Callable[[Tensor], Tensor], others: int, *, rescale: bool = False
) -> Estimate:
    """The mean over images of a figure of how many of the `others` count for each, from counts [a,
    G] by group.

    With `rescale` the counts without a group are raised to what all groups would give.
    """
    totals = counts.double().sum(1)
    each = figure(totals)
    own = _one_hot(len(counts)).double()
    left = (each.sum() - each @ own) / (len(counts) - own.sum(0))
    without = []
    for group, size in enumerate(_one_hot(others).sum(0).tolist()):
        rest = totals - counts[:, group]
        without.append(figure(rest * (others / (others - size)) if rescale else rest).mean())
    return Estimate(float(each.mean()), left, torch.stack(without))


# --- Kynkäänniemi et al. 2019, 1904.06991, eq. 1 and 2


def precision(near: Neighbourhoods) -> Measured:
    """Share of samples inside the manifold of real images: in the ball of at least one of them."""
    return estimate(near.manifold_of_real, _any, len(near.manifold_of_samples)).measured()


def recall(near: Neighbourhoods) -> Measured:
    """Share of real images inside the manifold of samples."""
    return estimate(near.manifold_of_samples, _any, len(near.manifold_of_real)).measured()


# --- Naeem et al. 2020, 2002.09797, eq. 6 and 7


def density(near: Neighbourhoods) -> Measured:
    """Real images' balls that hold a sample, over k, on average; above 1 where samples crowd in
    dense regions.
    """
    result = estimate(
        near.dense, lambda counts: counts / K_DENSITY, len(near.covering), rescale=True
    )
    return result.measured(high=torch.inf)


def coverage(near: Neighbourhoods) -> Measured:
    """Share of real images whose ball holds at least one sample. 1 - (1/2)^k is expected of real
    images.
    """
    return estimate(near.covering, _any, len(near.dense)).measured()


# --- Salvy et al. 2025, 2507.01761: shares that can be read as percentages. Where x % of the
# samples are noise, clipped density is about 1 - x %. Where samples leave out x % of the real
# images' kinds, so is clipped coverage. Real images have about 1.


def clipped_density(near: Neighbourhoods) -> Measured:
    """Density of balls no wider than the median one, each sample's share at most 1, over the same
    of real images; at most 1. 0 where the real images have none (more than half of them are twins).
    """
    samples, real = (
        estimate(counts, _filled, len(near.covering), rescale=True)
        for counts in (near.clipped, near.clipped_real)
    )
    if real.value == 0:
        return Measured(0.0, [0.0, 1.0])
    value = samples.value / real.value
    # a group of real images is left out both as centres and as the images that lie in others' balls
    centres, both = samples.without_other, real.without_own + real.without_other - real.value
    variance = jackknife_variance(samples.without_own / real.value) + jackknife_variance(
        centres / both
    )
    return Measured(min(1.0, value), Measured.normal(value, variance, low=0.0, high=1.0).interval)


def clipped_coverage(near: Neighbourhoods) -> Measured:
    """How full the real images' balls are of samples, at most k in each, as the share of good
    samples that is expected to give that.
    """
    samples = len(near.dense)
    fullness = estimate(near.covering, _filled, samples, rescale=True).measured()
    expected = expected_fullness(samples, len(near.covering), K_DENSITY)
    value, *interval = np.searchsorted(
        expected, [fullness.value, *(fullness.interval or ())]
    ) / len(expected)
    return Measured(
        float(value), list(map(float, interval)) if interval[:1] < interval[1:] else None
    )


def expected_fullness(samples: int, real: int, k: int) -> np.ndarray:
    """Expected min(J, k) / k for M = 0 to `samples` draws of the real distribution, float64
    [samples + 1].

    J is how many of M lie in the ball that reaches to the k-th of N - 1 others: beta-binomial with
    the parameters k and N - k, whatever the distribution (section 4.2 of the paper).
    """
    from scipy.stats import betabinom  # here: its import takes a second of every start

    j = np.arange(k)  # [k]
    chances = betabinom.pmf(j, np.arange(samples + 1)[:, None], k, real - k)  # [samples + 1, k]
    return 1 - (chances * (k - j)).sum(1) / k


def _any(counts: Tensor) -> Tensor:
    return (counts > 0).double()


def _filled(counts: Tensor) -> Tensor:
    """The share of K_DENSITY places that counts fill."""
    return (counts / K_DENSITY).clamp(max=1)
