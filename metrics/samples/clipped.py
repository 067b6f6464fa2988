"""Clipped density and clipped coverage (Salvy et al. 2025, 2507.01761): shares that can be read as percentages.

Where x % of the samples are noise, clipped density is about 1 - x %. Where samples leave out x % of the real images'
kinds, so is clipped coverage. Real images have about 1.
"""

import torch
from torch import Tensor

from metrics.intervals import jackknife_variance, normal_interval
from metrics.samples.neighbours import Neighbourhoods, estimate


def clipped_density(found: Neighbourhoods) -> tuple[float, list[float]]:
    """Density of balls no wider than the median one, each sample's share at most 1, over the same of real images.

    The value, at most 1, and its 95 % interval. 0 where the real images have none (more than half of them are twins).
    """
    k = found.k_density
    samples = estimate(found.clipped, lambda counts: (counts / k).clamp(max=1), len(found.covering), rescale=True)
    real = estimate(found.clipped_real, lambda counts: (counts / k).clamp(max=1), len(found.covering), rescale=True)
    if real.value == 0:
        return 0.0, [0.0, 1.0]
    value = samples.value / real.value
    # a group of real images is left out both as centres and as the images that lie in others' balls
    centres, both = samples.without_other, real.without_own + real.without_other - real.value
    variance = jackknife_variance(samples.without_own / real.value) + jackknife_variance(centres / both)
    return min(1.0, value), normal_interval(value, variance, low=0.0, high=1.0)


def clipped_coverage(found: Neighbourhoods) -> tuple[float, list[float]]:
    """How full the real images' balls are of samples, at most k in each, as the share of good samples that gives that.

    The value, 0 to 1, and its 95 % interval.
    """
    k, samples, real = found.k_density, len(found.dense), len(found.covering)
    fullness = estimate(found.covering, lambda counts: (counts / k).clamp(max=1), samples, rescale=True)
    expected = expected_fullness(samples, real, k)
    low, high = fullness.interval(high=1.0)
    return _share_of(fullness.value, expected), [_share_of(low, expected), _share_of(high, expected)]


def expected_fullness(samples: int, real: int, k: int) -> Tensor:
    """Expected min(J, k) / k for M = 0 to `samples` draws of the real distribution, float64 [samples + 1].

    J is how many of M lie in the ball that reaches to the k-th of N - 1 others: beta-binomial,
    P(J = j) = C(M, j) B(k + j, N - k + M - j) / B(k, N - k), whatever the distribution (section 4.2 of the paper).
    """
    m = torch.arange(samples + 1, dtype=torch.float64)[:, None]  # [M, 1]
    j = torch.arange(k, dtype=torch.float64)[None]  # [1, k]
    rest = (m - j).clamp(min=0)
    choose = torch.lgamma(m + 1) - torch.lgamma(j + 1) - torch.lgamma(rest + 1)
    beta = torch.lgamma(k + j) + torch.lgamma(real - k + rest) - torch.lgamma(real + m)
    fixed = torch.lgamma(torch.tensor([k, real - k, real], dtype=torch.float64))
    chances = (choose + beta - fixed[0] - fixed[1] + fixed[2]).exp() * (m >= j)
    return 1 - (chances * (k - j)).sum(1) / k


def _share_of(fullness: float, expected: Tensor) -> float:
    """The least share of good samples that is expected to give so much."""
    return int(torch.searchsorted(expected, fullness)) / len(expected)
