import math

import numpy as np
import pytest
import torch

from metrics import bootstrap as module
from metrics.bootstrap import bootstrap, bootstrap_interval, percentile_interval, resamples
from metrics.intervals import normal_interval


def mean_of(values):
    return lambda weights: weights @ values / weights.sum(1)


def test_a_resample_draws_as_many_images_as_there_are():
    weights = torch.cat(list(resamples(50, "test", count=400)))
    assert (weights.shape, weights.dtype) == ((400, 50), torch.float64)
    assert (weights.sum(1) == 50).all()
    assert weights.var() == pytest.approx(1 - 1 / 50, rel=0.05)  # of a multinomial
    assert weights.mean(0).sub(1).abs().max() < 5 / math.sqrt(400)


def test_chunks_and_memory_change_nothing(monkeypatch):
    whole = torch.cat(list(resamples(30, 1, "test", count=17)))
    monkeypatch.setattr(module, "CHUNK", 100)
    pieces = list(resamples(30, 1, "test", count=17))
    assert [len(piece) for piece in pieces] == [3] * 5 + [2]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(torch.cat(list(resamples(30, 2, "test", count=17))), whole)


def test_equal_to_resampling_one_by_one():
    """The weights are those of the images drawn, and the quantiles NumPy's."""
    values = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = bootstrap_interval(mean_of(values), 40, "test")
    means = []
    for row in torch.cat(list(resamples(40, "test"))):
        images = torch.repeat_interleave(torch.arange(40), row.long())
        means.append(float(values[images].mean()))
    assert found == pytest.approx(np.quantile(means, [0.025, 0.975]).tolist(), abs=1e-12)


def test_interval_of_a_mean_is_near_the_closed_form():
    values = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = normal_interval(float(values.mean()), float(values.var()) / 2000)
    assert bootstrap_interval(mean_of(values), 2000, "test") == pytest.approx(expected, abs=0.002)


def test_several_figures_at_once_and_undefined_ones():
    values = torch.rand(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = bootstrap(lambda weights: weights @ values / 30, 30, "test", count=100)
    assert found.shape == (100, 2)
    alone = bootstrap_interval(mean_of(values[:, 1]), 30, "test", count=100)
    assert percentile_interval(found[:, 1]) == pytest.approx(alone, rel=1e-12)
    some = torch.tensor([math.nan, 1.0, 1.0, 3.0])
    assert percentile_interval(some) == pytest.approx([1.0, 2.9])
    assert percentile_interval(torch.tensor([math.nan, math.nan, 1.0])) is None


def test_normal_interval_stays_within_what_is_possible():
    assert normal_interval(0.5, 0.01) == pytest.approx([0.5 - 0.1959964, 0.5 + 0.1959964])
    assert normal_interval(0.9, 0.01, low=0, high=1) == pytest.approx([0.9 - 0.1959964, 1.0])
    with pytest.raises(ValueError, match="no images"):
        next(resamples(0, "test"))
