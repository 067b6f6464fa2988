"""The Frechet distance against scipy and closed forms; its variance against numeric derivatives."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from duetgan.metrics.samples.frechet import frechet_distance, intra_class_frechet


def normal(n, dim, seed, *, scale=1.0, shift=0.0, dtype=torch.float64):
    features = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    mixing = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed + 100), dtype=dtype) / dim**0.5
    return features @ mixing * scale + shift


def distance(first, second):
    return frechet_distance(first, second)[0]


def of_gaussians(mean1, covariance1, mean2, covariance2):
    root = scipy.linalg.sqrtm(covariance1 @ covariance2).real
    return ((mean1 - mean2) ** 2).sum() + np.trace(covariance1 + covariance2 - 2 * root)


def test_agrees_with_scipys_matrix_square_root_and_for_one_image_only():
    first, second = normal(300, 12, 0), normal(200, 12, 1, scale=1.7, shift=0.4)
    means, covariances = zip(*((x.mean(0).numpy(), x.T.cov().numpy()) for x in (first, second)), strict=True)
    expected = of_gaussians(means[0], covariances[0], means[1], covariances[1])
    assert distance(first, second) == pytest.approx(expected, rel=1e-9)
    one, real = torch.ones(50, 6, dtype=torch.float64), normal(50, 6, 8)
    expected = float((real.mean(0) - 1).square().sum() + torch.cov(real.T).trace())
    assert distance(one, real) == pytest.approx(expected, rel=1e-9)
    assert distance(real, one) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(one, one) == (0.0, 0.0)


def test_closed_form_of_diagonal_gaussians_half_precision_and_far_means():
    """Columns that are exactly uncorrelated: |m1 - m2|^2 + |s1 - s2|^2, one of them without any spread."""
    mean1, mean2 = torch.tensor([1.0, -2.0, 0.0]).double(), torch.tensor([1.5, 0.0, 0.0]).double()
    sigma1, sigma2 = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 2.0, 0.0]).double()
    columns = torch.linalg.qr(torch.cat([torch.ones(50, 1), normal(50, 3, 9)], 1).double())[0][:, 1:] * 7  # mean 0
    sets = mean1 + columns * sigma1, mean2 + columns * sigma2
    expected = float((mean1 - mean2).square().sum() + (sigma1 - sigma2).square().sum())
    assert distance(*sets) == pytest.approx(expected, rel=1e-12)
    half = torch.full((4096, 1), 1.0009765625, dtype=torch.bfloat16)  # a bfloat16 sum would stop at 256
    assert distance(half, torch.zeros(9, 1)) == pytest.approx(half[0].double().item() ** 2, rel=1e-12)
    first, second = normal(80, 5, 1), normal(80, 5, 2)
    assert distance(first + 1000, second + 1000) == pytest.approx(distance(first, second), rel=1e-6)


@pytest.mark.parametrize("n", [64, 15])
def test_a_set_is_at_no_distance_from_itself_and_the_order_of_sets_does_not_matter(n):
    first, second = normal(n, 20, 4), normal(n, 20, 5)
    assert distance(first, first) == pytest.approx(0, abs=1e-9)
    assert distance(first, second) == pytest.approx(distance(second, first), rel=1e-9)
    assert distance(first, second) > 0.1


@pytest.mark.parametrize(("n", "m", "dim"), [(20, 30, 128), (300, 5, 128), (5, 300, 128), (65, 64, 64)])
def test_fewer_vectors_than_dimensions(n, m, dim):
    """The trace of the root is then the nuclear norm of X Y' / sqrt((n - 1)(m - 1)), X and Y centred."""
    first, second = normal(n, dim, 6), normal(m, dim, 7, shift=0.1)
    x, y = first - first.mean(0), second - second.mean(0)
    trace = torch.linalg.svdvals(x @ y.T).sum() / math.sqrt((n - 1) * (m - 1))
    spread = x.square().sum() / (n - 1) + y.square().sum() / (m - 1)
    expected = float((first.mean(0) - second.mean(0)).square().sum() + spread - 2 * trace)
    assert distance(first, second) == pytest.approx(expected, rel=1e-9)
    assert distance(first, first) == pytest.approx(0, abs=1e-9 * float(spread))


@pytest.mark.parametrize("second", [torch.randn(9, 4), torch.randn(1, 3)])
def test_sets_without_a_distance_are_refused(second):
    with pytest.raises(ValueError, match="no Frechet distance"):
        frechet_distance(torch.randn(9, 3), second)


# --- its variance


@pytest.mark.parametrize(("n", "dim"), [(60, 5), (30, 20)])
def test_variance_is_that_of_the_numeric_derivatives(n, dim):
    """The distance between weighted Gaussians, moved by the weight of each image of both sets."""
    sets = [normal(n, dim, 0), normal(n, dim, 1, scale=1.3, shift=0.4)]

    def weighted(weights):
        parts = []
        for part, weight in zip(sets, weights, strict=True):
            mean = (weight[:, None] * part).sum(0) / weight.sum()
            covariance = (part - mean).T @ (weight[:, None] * (part - mean)) / weight.sum() * n / (n - 1)
            parts += [mean.numpy(), covariance.numpy()]
        return of_gaussians(*parts)

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
    assert frechet_distance(*sets)[1] == pytest.approx(expected, rel=1e-4)


# --- within classes


def test_mean_of_each_class_on_its_own():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 4
    labels[labels == 3] = torch.where(torch.arange(30) == 0, 3, 0)  # one image of class 3
    samples, real = torch.randn(120, 6, generator=draw), torch.randn(120, 6, generator=draw) + labels[:, None]
    result = intra_class_frechet(samples, real, labels, 5)
    expected = [distance(samples[labels == label], real[labels == label]) for label in range(3)]
    assert result.by_class == [*(pytest.approx(value, rel=1e-6) for value in expected), None, None]
    assert result.value == pytest.approx(sum(expected) / 3, rel=1e-6)
    low, high = result.interval or [1, 0]
    assert low < (result.value or 0) < high
    assert result.images == 30
    assert "a class has 30 images a side" in result.note
    none = intra_class_frechet(samples[:1], real[:1], labels[:1], 2)  # no class with two images
    assert (none.value, none.interval, none.by_class, none.images) == (None, None, [None, None], 0)
