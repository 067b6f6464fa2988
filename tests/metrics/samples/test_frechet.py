import math

import numpy as np
import pytest
import scipy.linalg
import torch

from metrics.samples.frechet import Moments, frechet_distance, gaussian_frechet_distance


def normal(n, dim, seed, *, scale=1.0, shift=0.0, dtype=torch.float64):
    features = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    mixing = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed + 100), dtype=dtype) / dim**0.5
    return features @ mixing * scale + shift


def moments_of(features):
    moments = Moments(features.shape[1])
    moments.update(features)
    return moments


def by_scipy(first, second):
    a, b = first.numpy(), second.numpy()
    covariance1, covariance2 = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(covariance1 @ covariance2).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(covariance1 + covariance2 - 2 * root)


def test_agrees_with_scipys_matrix_square_root():
    first, second = normal(300, 12, 0), normal(200, 12, 1, scale=1.7, shift=0.4)
    assert frechet_distance(moments_of(first), moments_of(second)) == pytest.approx(by_scipy(first, second), rel=1e-9)


def test_agrees_with_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid")
    first, second = moments_of(normal(300, 12, 2)), moments_of(normal(300, 12, 3, shift=1.0))
    expected = fid._compute_fid(first.mean, first.covariance, second.mean, second.covariance)
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-9)


def test_closed_form_of_diagonal_gaussians():
    mean1, mean2 = torch.tensor([1.0, -2.0, 0.0]).double(), torch.tensor([1.5, 0.0, 0.0]).double()
    sigma1, sigma2 = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 2.0, 0.0]).double()
    expected = float((mean1 - mean2).square().sum() + (sigma1 - sigma2).square().sum())
    found = gaussian_frechet_distance(mean1, sigma1.square().diag(), mean2, sigma2.square().diag())
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_set_is_at_no_distance_from_itself_and_the_order_of_sets_does_not_matter():
    first, second = moments_of(normal(64, 20, 4)), moments_of(normal(64, 20, 5))
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-9)
    assert frechet_distance(first, second) > 0.1


@pytest.mark.parametrize(("n", "m"), [(20, 30), (300, 5), (5, 300)])
def test_fewer_vectors_than_dimensions(n, m):
    """The trace of the root is then the nuclear norm of X Y' / sqrt((n - 1)(m - 1)), X and Y centred."""
    first, second = normal(n, 128, 6), normal(m, 128, 7, shift=0.1)
    x, y = first - first.mean(0), second - second.mean(0)
    trace = torch.linalg.svdvals(x @ y.T).sum() / math.sqrt((n - 1) * (m - 1))
    spread = x.square().sum() / (n - 1) + y.square().sum() / (m - 1)
    expected = float((first.mean(0) - second.mean(0)).square().sum() + spread - 2 * trace)
    assert frechet_distance(moments_of(first), moments_of(second)) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(moments_of(first), moments_of(first)) == pytest.approx(0, abs=1e-9 * float(spread))


def test_a_generator_that_draws_one_image_only():
    one = torch.ones(50, 6, dtype=torch.float64)
    real = normal(50, 6, 8)
    expected = float((real.mean(0) - 1).square().sum() + torch.cov(real.T).trace())
    assert frechet_distance(moments_of(one), moments_of(real)) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(moments_of(real), moments_of(one)) == pytest.approx(expected, rel=1e-6)


def test_different_dimensions_are_refused():
    with pytest.raises(ValueError, match="dimensions"):
        frechet_distance(moments_of(torch.randn(9, 3)), moments_of(torch.randn(9, 4)))
