from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics.samples.frechet import Moments


def moments_of(features):
    moments = Moments(features.shape[1])
    moments.update(features)
    return moments


def test_mean_and_covariance_are_torchs():
    features = torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 100
    moments = moments_of(features)
    torch.testing.assert_close(moments.mean, features.mean(0))
    torch.testing.assert_close(moments.covariance, torch.cov(features.T), rtol=1e-9, atol=1e-9)
    assert torch.equal(moments.covariance, moments.covariance.T)


@given(cuts=st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same(cuts):
    features = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    found, whole = Moments(5), moments_of(features)
    for start, end in pairwise(sorted({0, *cuts, 40})):
        found.update(features[start:end])
    assert found.count == 40
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-12, atol=1e-12)


def test_half_precision_input_is_summed_in_float64():
    features = torch.full((4096, 1), 1.0009765625, dtype=torch.bfloat16)  # a bfloat16 sum would stop at 256
    moments = moments_of(features)
    assert moments.total.dtype == torch.float64
    assert moments.mean.item() == features[0].item()


def test_too_few_vectors_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="no features"):
        _ = Moments(3).mean
    with pytest.raises(ValueError, match="at least 2"):
        _ = moments_of(torch.zeros(1, 3)).covariance
    with pytest.raises(ValueError, match=r"\[n, 3\]"):
        Moments(3).update(torch.zeros(2, 4))
