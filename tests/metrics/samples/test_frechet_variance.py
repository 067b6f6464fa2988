import pytest
import torch

from metrics.samples.frechet import Moments, frechet_distance, gaussian_frechet_distance
from metrics.samples.frechet_variance import frechet_with_variance
from metrics.samples.kernel import kernel_distance, kernel_with_variance


def features(seed, n, dim, shift=0.0, spread=1.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * spread + shift


def distance(*sets):
    moments = [Moments(part.shape[1]) for part in sets]
    for each, part in zip(moments, sets, strict=True):
        each.update(part)
    return frechet_distance(*moments)


@pytest.mark.parametrize(("n", "m", "dim"), [(200, 150, 10), (30, 40, 64), (20, 200, 50), (65, 64, 64)])
def test_value_is_the_frechet_distance(n, m, dim):
    first, second = features(0, n, dim), features(1, m, dim, 0.3, 1.4)
    assert frechet_with_variance(first, second)[0] == pytest.approx(distance(first, second), rel=1e-6)


def test_equal_sets_and_images_that_are_all_one():
    same = features(0, 100, 8)
    assert frechet_with_variance(same, same)[0] == pytest.approx(0, abs=1e-9)
    one = torch.ones(50, 8)
    assert frechet_with_variance(one, same)[0] == pytest.approx(distance(one, same), rel=1e-6)
    assert frechet_with_variance(one, one) == (0.0, 0.0)
    with pytest.raises(ValueError, match="no Frechet distance"):
        frechet_with_variance(one[:1], same)


@pytest.mark.parametrize(("n", "dim"), [(60, 5), (20, 30)])
def test_variance_is_that_of_the_numeric_derivatives(n, dim):
    """The distance between weighted Gaussians, moved by the weight of each image of both sets."""
    sets = [features(0, n, dim).double(), features(1, n, dim, 0.4, 1.3).double()]

    def weighted(weights):
        parts = []
        for part, weight in zip(sets, weights, strict=True):
            mean = (weight[:, None] * part).sum(0) / weight.sum()
            parts += [mean, (part - mean).T @ (weight[:, None] * (part - mean)) / weight.sum() * n / (n - 1)]
        return gaussian_frechet_distance(*parts)

    step, expected = 1e-5, 0.0
    for side in range(2):
        answers = []
        for i in range(n):
            weights = [torch.ones(n, dtype=torch.float64) for _ in sets]
            weights[side][i] += step
            up = weighted(weights)
            weights[side][i] -= 2 * step
            answers.append((up - weighted(weights)) / (2 * step))
        moved = torch.tensor(answers, dtype=torch.float64)
        expected += float((moved - moved.mean()).square().sum()) * n / (n - 1)
    assert frechet_with_variance(*sets)[1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("n", "dim", "shift"), [(400, 8, 0.3), (200, 64, 0.3), (60, 100, 0.2), (300, 16, 0.0)])
def test_told_spread_is_that_of_other_draws(n, dim, shift):
    """Up to twice the variance where the sets are equal but for chance; a little more than the truth elsewhere."""
    found = torch.tensor(
        [frechet_with_variance(features(2 * i, n, dim), features(2 * i + 1, n, dim, shift)) for i in range(80)],
        dtype=torch.float64,
    )
    told = found[:, 1].mean().sqrt() / found[:, 0].std()
    assert 0.8 < float(told) < 1.7


@pytest.mark.parametrize(("n", "size", "shift"), [(150, 1000, 0.3), (150, 50, 0.3), (150, 1000, 0.0)])
def test_kernel_distance_and_its_spread(n, size, shift):
    sets = [(features(2 * i, n, 8), features(2 * i + 1, n, 8, shift)) for i in range(80)]
    found = [kernel_with_variance(*each, seed=0, subset_size=size) for each in sets]
    assert found[0][0] == kernel_distance(*sets[0], seed=0, subset_size=size)
    values, variances = torch.tensor(found, dtype=torch.float64).T
    assert 0.75 < float(variances.mean().sqrt() / values.std()) < 1.7
