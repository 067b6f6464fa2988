import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import polynomial_kernel as sklearn_kernel

from duetgan.metrics.samples.kernel import kernel_distance, polynomial_kernel, squared_mmd


def normal(n, dim, seed, shift=0.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)).double() + shift


def test_the_kernel_is_scikit_learns_unbiased_and_subsets_average_near_the_whole():
    """Over many draws from one distribution the mean is 0 within its error, and some estimates lie below it."""
    first, second = normal(7, 5, 0), normal(9, 5, 1)
    expected = sklearn_kernel(first.numpy(), second.numpy(), degree=3, gamma=1 / 5, coef0=1)
    np.testing.assert_allclose(polynomial_kernel(first, second).numpy(), expected, rtol=1e-12)
    values = [squared_mmd(normal(20, 4, 10 + 2 * i), normal(20, 4, 11 + 2 * i))[0] for i in range(300)]
    assert abs(np.mean(values)) < 3 * np.std(values) / 300**0.5
    assert min(values) < 0
    first, second = normal(400, 6, 6), normal(300, 6, 7, shift=0.3)
    found = [kernel_distance(first, second, seed=seed, subset_size=100)[0] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0] == pytest.approx(squared_mmd(first, second)[0], rel=0.2)


def test_estimate_is_the_sum_over_pairs():
    first, second = normal(6, 3, 2), normal(5, 3, 3, shift=1.0)

    def k(x, y):
        return float((x @ y / 3 + 1) ** 3)

    within1 = sum(k(a, b) for i, a in enumerate(first) for j, b in enumerate(first) if i != j) / (6 * 5)
    within2 = sum(k(a, b) for i, a in enumerate(second) for j, b in enumerate(second) if i != j) / (5 * 4)
    across = sum(k(a, b) for a in first for b in second) / (6 * 5)
    assert squared_mmd(first, second)[0] == pytest.approx(within1 + within2 - 2 * across, rel=1e-10)


@pytest.mark.parametrize(("n", "size", "shift"), [(150, 1000, 0.3), (150, 50, 0.3), (150, 1000, 0.0)])
def test_told_spread_is_that_of_other_draws(n, size, shift):
    results = [
        kernel_distance(normal(n, 8, 2 * i), normal(n, 8, 2 * i + 1, shift), seed=0, subset_size=size)
        for i in range(80)
    ]
    values, variances = torch.tensor(results, dtype=torch.float64).T
    assert 0.75 < float(variances.mean().sqrt() / values.std()) < 1.7


@pytest.mark.parametrize("sets", [(normal(1, 3, 0), normal(9, 3, 1)), (normal(9, 3, 0), normal(9, 4, 1))])
def test_sets_without_a_distance_are_refused(sets):
    with pytest.raises(ValueError, match="no kernel distance"):
        kernel_distance(*sets, seed=0)
