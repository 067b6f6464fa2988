"""Precision, recall, density and coverage against prdc, the density and coverage paper's own library."""

import numpy as np
import prdc
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from metrics.samples import neighbours as module
from metrics.samples.density_coverage import coverage, density
from metrics.samples.neighbours import neighbourhoods, own_neighbours
from metrics.samples.precision_recall import precision, recall


def features(seed, n=300, dim=8, shift=0.0, spread=1.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * spread + shift


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", 64)
    monkeypatch.setattr(module, "REFERENCE_BLOCK", 100)


@pytest.mark.parametrize(("samples", "k"), [((1, 300), 3), ((1, 220), 5), ((2, 130, 8, 0.7, 0.5), 4)])
def test_equal_to_prdc(samples, k, small_blocks, capsys):
    fake, real = features(*samples), features(9)
    expected = prdc.compute_prdc(real.double().numpy(), fake.double().numpy(), nearest_k=k)
    found = neighbourhoods(fake, real, k_manifold=k, k_density=k)
    for figure in (precision, recall, density, coverage):
        assert figure(found).value == pytest.approx(expected[figure.__name__], abs=1e-9), figure


def test_blocks_change_no_count(small_blocks, monkeypatch):
    fake, real = features(1) + 1000, features(2, 250) + 1000  # far from 0, where float32 would lose the distances
    pieces = neighbourhoods(fake, real)
    monkeypatch.undo()
    whole = neighbourhoods(fake, real)
    for name in ("manifold_of_real", "manifold_of_samples", "dense", "covering", "clipped", "clipped_real"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name)), name


def test_own_neighbours_are_scikit_learns(small_blocks):
    points = features(3)
    squares, indices = own_neighbours(points, 4)
    distances, places = NearestNeighbors(n_neighbors=5).fit(points.numpy()).kneighbors(points.numpy())
    assert squares.sqrt().numpy() == pytest.approx(distances[:, 1:], rel=1e-6)
    assert np.array_equal(indices.numpy(), places[:, 1:])


def test_twins_lie_on_the_rim_of_their_ball():
    """Copies have a ball of radius 0, which holds other copies of the same image, whatever the rounding."""
    image = features(5, 1) * 3
    real = torch.cat([features(6, 40), image.expand(8, -1)])
    found = neighbourhoods(image.expand(20, -1), real)
    assert precision(found).value == 1.0
    assert density(found).value >= 8 / 5


def test_a_small_set_is_refused():
    with pytest.raises(ValueError, match="no 5 neighbours"):
        neighbourhoods(features(1), features(2, 5))


@pytest.mark.parametrize("figure", [precision, recall, density, coverage])
def test_intervals_are_as_wide_as_chance(figure):
    """Over draws of both sets: the spread of the figure is what its interval says, and 95 % hold the mean."""
    runs = [figure(neighbourhoods(features(2 * i, 200, 4, 0.5), features(2 * i + 1, 200, 4))) for i in range(60)]
    values = torch.tensor([each.value for each in runs], dtype=torch.float64)
    intervals = torch.tensor([each.interval() for each in runs], dtype=torch.float64)
    told = (intervals[:, 1] - intervals[:, 0]).mean() / (2 * 1.96)
    assert 0.75 < float(told / values.std()) < 1.5
    held = (intervals[:, 0] <= values.mean()) & (values.mean() <= intervals[:, 1])
    assert held.double().mean() > 0.85
