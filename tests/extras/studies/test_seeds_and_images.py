import numpy as np
import pytest
from scipy.stats import norm, t

from duetgan.extras.studies.seeds_and_images import by_seeds_and_images


def test_seeds_and_images_are_hillis_formula():
    """Mean squares of the two-way analysis of variance, computed term by term."""
    draw = np.random.default_rng(3)
    first, second = draw.random((2, 4, 30)) < 0.6
    found = by_seeds_and_images(first, second, np.full(30, 1 / 30))
    d = second.astype(float) - first
    mean, rows, columns = d.mean(), d.mean(1), d.mean(0)
    by_seed = 30 * sum((row - mean) ** 2 for row in rows) / 3
    by_image = 4 * sum((column - mean) ** 2 for column in columns) / 29
    rest = sum((d[s, i] - rows[s] - columns[i] + mean) ** 2 for s in range(4) for i in range(30)) / 87
    both = by_seed + max(0, by_image - rest)
    degrees = both**2 / (by_seed**2 / 3)
    assert found.difference == pytest.approx(mean)
    assert found.p == pytest.approx(2 * t.sf(abs(mean) / (both / 120) ** 0.5, degrees))
    assert found.interval == pytest.approx(t.interval(0.95, degrees, mean, (both / 120) ** 0.5))


def test_one_pair_is_over_images_alone_and_equal_runs_do_not_differ():
    first = np.repeat([False, True, True, False], [12, 3, 10, 10])
    second = np.repeat([True, False, True, False], [12, 3, 10, 10])
    found = by_seeds_and_images(first[None], second[None], np.full(35, 1 / 35))
    error = np.std(second.astype(float) - first, ddof=1) / 35**0.5
    assert found.p == pytest.approx(2 * norm.sf(9 / 35 / error))
    same = by_seeds_and_images(np.stack([first, second]), np.stack([first, second]), np.full(35, 1 / 35))
    assert (same.difference, same.interval, same.p) == (0, [0, 0], 1)


def test_weights_choose_and_weigh_images():
    """A class of weight 0 counts nothing; others by their weights."""
    draw = np.random.default_rng(5)
    first, second = draw.random((2, 3, 40)) < 0.5
    weights = np.r_[np.full(10, 0.05), np.full(20, 0.025), np.zeros(10)]
    found = by_seeds_and_images(first, second, weights)
    assert found.difference == pytest.approx(((second.astype(float) - first).mean(0) * weights).sum())
    again = by_seeds_and_images(first[:, :30], second[:, :30], weights[:30])
    assert found.p == pytest.approx(again.p)
    assert found.interval == pytest.approx(again.interval)


def test_seeds_that_agree_leave_the_chance_of_images():
    """R2: every seed gains one image, another one each; also where all gain the same ones."""
    first = np.zeros((3, 20), dtype=bool)
    for places in (range(3), (7, 7, 7)):
        second = first.copy()
        second[range(3), list(places)] = True
        result = by_seeds_and_images(first, second, np.full(20, 1 / 20))
        assert result.difference == pytest.approx(1 / 20)
        assert result.p is not None
        assert 0.05 < result.p < 1
        low, high = result.interval or [1, 0]
        assert low < 0 < result.difference < high
