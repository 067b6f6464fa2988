"""Precision, recall, density and coverage against prdc, the density and coverage paper's own library."""

import numpy as np
import prdc
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import betabinom
from sklearn.neighbors import NearestNeighbors

from duetgan.metrics.samples import neighbours as module
from duetgan.metrics.samples.neighbours import (
    clipped_coverage,
    clipped_density,
    coverage,
    density,
    neighbourhoods,
    neighbours,
    precision,
    recall,
)


def features(seed, n=300, dim=8, shift=0.0, spread=1.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * spread + shift


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", 64)
    monkeypatch.setattr(module, "REFERENCE_BLOCK", 100)


@pytest.mark.parametrize(("samples", "k"), [((1, 300), 3), ((1, 220), 5), ((2, 130, 8, 0.7, 0.5), 4)])
def test_equal_to_prdc(samples, k, small_blocks, monkeypatch, capsys):
    monkeypatch.setattr(module, "K_MANIFOLD", k)
    monkeypatch.setattr(module, "K_DENSITY", k)
    fake, real = features(*samples), features(9)
    expected = prdc.compute_prdc(real.double().numpy(), fake.double().numpy(), nearest_k=k)
    found = neighbourhoods(fake, real)
    for figure in (precision, recall, density, coverage):
        assert figure(found).value == pytest.approx(expected[figure.__name__], abs=1e-9), figure


def test_own_neighbours_are_scikit_learns_and_blocks_change_no_count(small_blocks, monkeypatch):
    points = features(3)
    squares, indices = neighbours(points, points, 4)
    distances, places = NearestNeighbors(n_neighbors=5).fit(points.numpy()).kneighbors(points.numpy())
    assert squares.sqrt().numpy() == pytest.approx(distances[:, 1:], rel=1e-6)
    assert np.array_equal(indices.numpy(), places[:, 1:])
    fake, real = features(1) + 1000, features(2, 250) + 1000  # far from 0, where float32 would lose the distances
    pieces = neighbourhoods(fake, real)
    monkeypatch.undo()
    whole = neighbourhoods(fake, real)
    for name in ("manifold_of_real", "manifold_of_samples", "dense", "covering", "clipped", "clipped_real"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name)), name


def test_twins_lie_on_the_rim_of_their_ball_and_a_small_set_is_refused():
    """Copies have a ball of radius 0, which holds other copies of the same image, whatever the rounding."""
    image = features(5, 1) * 3
    real = torch.cat([features(6, 40), image.expand(8, -1)])
    found = neighbourhoods(image.expand(20, -1), real)
    assert precision(found).value == 1.0
    assert (density(found).value or 0) >= 8 / 5
    with pytest.raises(ValueError, match="no 5 neighbours"):
        neighbourhoods(features(1), features(2, 5))


def test_an_estimate_without_a_group_is_that_of_the_other_images():
    """With groups of two sizes; rescaled counts are those that all groups would give."""
    counts = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (103, 50)))
    group = torch.arange(103) % 50
    for rescale in (False, True):
        found = module.estimate(counts, torch.sqrt, 77, rescale=rescale)
        assert found.value == pytest.approx(float(counts.sum(1).double().sqrt().mean()))
        for one in range(50):
            own = counts[group != one].sum(1).double()
            assert float(found.without_averaged[one]) == pytest.approx(float(own.sqrt().mean()))
            rest = (counts.sum(1) - counts[:, one]).double() * (77 / (77 - (2 if one < 27 else 1)) if rescale else 1)
            assert float(found.without_counted[one]) == pytest.approx(float(rest.sqrt().mean()))


def test_each_metric_leaves_out_groups_of_the_set_that_it_counts(monkeypatch):
    """The sizes of the sets whose images are averaged, and counted in balls: 60 samples and 70 real images."""
    sizes: list[tuple[int, int]] = []
    estimate = module.estimate

    def recorded(counts, figure, counted, **options):
        sizes.append((len(counts), counted))
        return estimate(counts, figure, counted, **options)

    monkeypatch.setattr(module, "estimate", recorded)
    near = neighbourhoods(features(1, 60), features(2, 70))
    for metric in (precision, recall, density, coverage, clipped_density, clipped_coverage):
        metric(near)
    assert sizes == [(60, 70), (70, 60), (60, 70), (70, 60), (60, 70), (70, 70), (70, 60)]


@pytest.mark.parametrize("figure", [precision, recall, density, coverage, clipped_density, clipped_coverage])
def test_intervals_are_as_wide_as_chance(figure):
    """Over draws of both sets: the spread of the figure is what its interval says, and 95 % hold the mean."""
    how = {"spread": 1.5} if "clipped" in figure.__name__ else {"shift": 0.5}
    pairs = [(features(2 * i, 200, 4, **how), features(2 * i + 1, 200, 4)) for i in range(60)]
    runs = [figure(neighbourhoods(*pair)) for pair in pairs]
    values = torch.tensor([each.value for each in runs], dtype=torch.float64)
    intervals = torch.tensor([each.interval for each in runs], dtype=torch.float64)
    told = (intervals[:, 1] - intervals[:, 0]).mean() / (2 * 1.96)
    assert 0.75 < float(told / values.std()) < 1.6
    held = (intervals[:, 0] <= values.mean()) & (values.mean() <= intervals[:, 1])
    assert held.double().mean() > 0.85


# --- clipped density and coverage

K = 5


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


def clusters(seed, *, n, dim=16):
    """n images of ten kinds, far from one another, all equally often."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, dim, generator=torch.Generator().manual_seed(0)) * 10
    return centres[torch.arange(n) % 10] + torch.randn(n, dim, generator=draw)


def figures(samples, real):
    near = neighbourhoods(samples, real)
    return clipped_density(near).value, clipped_coverage(near).value


@pytest.mark.parametrize(("n", "shift"), [(70, 0.0), (50, 0.8)])
def test_equal_to_a_slow_oracle(n, shift):
    draw = torch.Generator().manual_seed(n)
    samples, real = torch.randn(n, 3, generator=draw) + shift, torch.randn(60, 3, generator=draw)
    assert figures(samples, real) == pytest.approx(oracle(samples.double().numpy(), real.double().numpy()), abs=1e-9)


def test_one_far_real_image_hides_no_noise_nor_do_twins():
    """An odd real image has a ball as wide as the space; unclipped density and precision count what lies in it."""
    real, samples = clusters(1, n=500), clusters(2, n=500)
    real[:6] = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)) * 60
    samples[:250] = torch.randn(250, 16, generator=torch.Generator().manual_seed(4)) * 30
    assert figures(samples, real)[0] == pytest.approx(0.5, abs=0.05)
    real, samples = torch.zeros(20, 4), torch.ones(20, 4)
    assert figures(samples, real) == (0.0, 0.0)
    assert figures(real, real)[0] == 1.0


def test_intervals_end_at_what_is_possible():
    draw = torch.Generator().manual_seed(3)
    real, alike, crowd, far = (torch.randn(60, 2, generator=draw) for _ in range(4))
    sparse = torch.cat([real[:1], 100 + far[1:]])  # one sample is real
    few, near = neighbourhoods(sparse, real), neighbourhoods(alike, real)
    for figure in (precision, coverage, clipped_density):
        ends = [figure(each).interval or pytest.fail("no interval") for each in (few, near)]
        assert ends[0][0] == 0 < ends[0][1] < 0.6
    value = clipped_density(near).value
    assert value is not None
    assert ends[1][0] < value < ends[1][1] == 1
    dense = density(neighbourhoods(0.01 * crowd, real))  # more often near to real images than these are
    low, high = dense.interval or pytest.fail("no interval")
    assert dense.value is not None
    assert low < dense.value < high
    assert dense.value > 1
