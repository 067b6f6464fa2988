import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import betabinom

from metrics.samples.clipped import clipped_coverage, clipped_density, expected_fullness
from metrics.samples.neighbours import neighbourhoods

K = 5


def expected_share(m, n):
    """Of a ball's K places, filled by m of the images that made n balls."""
    counts = np.arange(m + 1)
    return float((betabinom.pmf(counts, m, K, n - K) * np.minimum(counts, K)).sum() / K)


def oracle(samples, real):
    """Both figures image by image, as section 4 of 2507.01761 defines them."""
    own, across = cdist(real, real), cdist(real, samples)
    np.fill_diagonal(own, np.inf)
    radii = np.sort(own, axis=1)[:, K - 1]
    short = np.minimum(radii, np.median(radii))
    held = [min(sum(across[i, j] <= short[i] for i in range(len(real))) / K, 1) for j in range(len(samples))]
    best = [min(sum(own[i, j] <= short[i] for i in range(len(real))) / K, 1) for j in range(len(real))]
    full = np.mean([min((across[i] <= radii[i]).sum(), K) / K for i in range(len(real))])
    expected = [
        sum(betabinom.pmf(j, m, K, len(real) - K) * min(j, K) / K for j in range(m + 1))
        for m in range(len(samples) + 1)
    ]
    share = sum(value < full for value in expected) / len(expected)
    return min(1.0, np.mean(held) / np.mean(best)), share


def clusters(seed, *, n=3000, kinds=10, dim=16):
    """n images of so many kinds out of ten, far from one another, all equally often."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, dim, generator=torch.Generator().manual_seed(0)) * 10
    return centres[torch.arange(n) % kinds] + torch.randn(n, dim, generator=draw)


def figures(samples, real):
    found = neighbourhoods(samples, real)
    return clipped_density(found)[0], clipped_coverage(found)[0]


@pytest.mark.parametrize(("n", "shift"), [(70, 0.0), (50, 0.8)])
def test_equal_to_a_slow_oracle(n, shift):
    draw = torch.Generator().manual_seed(n)
    samples, real = torch.randn(n, 3, generator=draw) + shift, torch.randn(60, 3, generator=draw)
    assert figures(samples, real) == pytest.approx(oracle(samples.double().numpy(), real.double().numpy()), abs=1e-9)


def test_expected_fullness_is_beta_binomial():
    found = expected_fullness(40, 30, K)
    for m in (0, 1, 4, 5, 17, 40):
        assert float(found[m]) == pytest.approx(expected_share(m, 30), abs=1e-9)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0])
def test_noise_lowers_clipped_density_by_its_share(share):
    real, samples = clusters(1), clusters(2)
    noisy = int(share * len(samples))
    samples[:noisy] = torch.randn(noisy, 16, generator=torch.Generator().manual_seed(3)) * 30
    density, coverage = figures(samples, real)
    assert density == pytest.approx(1 - share, abs=0.05)
    assert coverage == pytest.approx(1 - share, abs=0.05)


@pytest.mark.parametrize("dropped", [0, 1, 2, 4, 6, 9])
def test_dropped_classes_lower_clipped_coverage_by_their_share(dropped):
    """10 k points for k of 10 classes, and density stays: what is drawn is good."""
    density, coverage = figures(clusters(2, kinds=10 - dropped), clusters(1))
    assert coverage == pytest.approx(1 - dropped / 10, abs=0.05)
    assert density == pytest.approx(1.0, abs=0.05)


def test_one_far_real_image_hides_no_noise():
    """An odd real image has a ball as wide as the space; unclipped density and precision count what lies in it."""
    real, samples = clusters(1, n=500), clusters(2, n=500)
    real[:6] = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)) * 60
    samples[:250] = torch.randn(250, 16, generator=torch.Generator().manual_seed(4)) * 30
    assert figures(samples, real)[0] == pytest.approx(0.5, abs=0.05)


def test_intervals_are_as_wide_as_chance():
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        samples, real = torch.randn(200, 4, generator=generator) * 1.5, torch.randn(200, 4, generator=generator)
        found = neighbourhoods(samples, real)
        return clipped_density(found), clipped_coverage(found)

    for pairs in zip(*(draw(seed) for seed in range(60)), strict=True):
        values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
        low, high = torch.tensor([interval for _, interval in pairs], dtype=torch.float64).T
        assert 0.75 < float((high - low).mean() / (2 * 1.96) / values.std()) < 1.6
        assert ((low <= values.mean()) & (values.mean() <= high)).double().mean() > 0.85


def test_twins_everywhere():
    """Real images that are all one: samples elsewhere have neither."""
    real, samples = torch.zeros(20, 4), torch.ones(20, 4)
    assert figures(samples, real) == (0.0, 0.0)
    assert figures(real, real)[0] == 1.0
