import numpy as np
import pytest
import torch
from scipy.stats import entropy

from metrics.samples.class_score import class_score


def test_equal_to_scipys_divergence():
    p = torch.rand(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(1)
    p[:40] = torch.eye(5, dtype=torch.float64)[0]  # sure of it: logarithms of 0
    marginal = p.mean(0).numpy()
    expected = np.exp(np.mean([entropy(row, marginal) for row in p.numpy()]))
    value, interval = class_score(p, seed=0)
    assert value == pytest.approx(expected, rel=1e-9)
    assert interval is not None
    assert interval[0] < value < interval[1]


def test_bounds():
    eye = torch.eye(4)
    assert class_score(eye.repeat(25, 1), seed=0)[0] == pytest.approx(4)
    assert class_score(eye[:1].expand(100, -1), seed=0) == (1.0, [1.0, 1.0])
    assert class_score(torch.full((50, 4), 0.25), seed=0)[0] == pytest.approx(1)
    with pytest.raises(ValueError, match="no images"):
        class_score(torch.empty(0, 4), seed=0)


def test_interval_is_as_wide_as_chance():
    def draw(seed):
        logits = torch.randn(300, 6, generator=torch.Generator().manual_seed(seed)) * 2
        return class_score(logits.softmax(1), seed=seed)

    values, intervals = zip(*(draw(seed) for seed in range(40)), strict=True)
    widths = np.diff(intervals, axis=1).mean() / (2 * 1.96)
    assert 0.75 < widths / np.std(values) < 1.35
