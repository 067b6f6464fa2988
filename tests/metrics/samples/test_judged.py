from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from duetgan.metrics.samples import judged
from duetgan.metrics.samples.judged import recognised


def class_score(probabilities) -> Any:
    return judged.class_score(probabilities)


def drawn(seed, n=300, classes=6):
    return (torch.randn(n, classes, generator=torch.Generator().manual_seed(seed)) * 2).double().softmax(1)


def test_class_score_is_scipys_divergence_within_its_bounds():
    p = torch.rand(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(1)
    p[:40] = torch.eye(5, dtype=torch.float64)[0]  # sure of it: logarithms of 0
    expected = np.exp(np.mean([entropy(row, p.mean(0).numpy()) for row in p.numpy()]))
    score = class_score(p)
    assert score.value == pytest.approx(expected, rel=1e-9)
    assert score.interval[0] < score.value < score.interval[1]
    eye = torch.eye(4)
    assert class_score(eye.repeat(25, 1)).value == pytest.approx(4)
    assert class_score(eye[:1].expand(100, -1)).value == 1.0
    assert class_score(torch.full((50, 4), 0.25)).value == pytest.approx(1)
    for call in (lambda: class_score(torch.empty(0, 4)), lambda: recognised(torch.empty(0, 4), torch.empty(0))):
        with pytest.raises(ValueError, match="undefined"):
            call()


def test_interval_of_the_class_score_is_the_bootstraps_and_as_wide_as_chance():
    p, draw = drawn(0), np.random.default_rng(0)
    resampled = [class_score(p[draw.integers(0, 300, 300)]).value for _ in range(400)]
    low, high = class_score(p).interval
    assert (high - low) / (2 * 1.96) == pytest.approx(np.std(resampled), rel=0.15)
    scores = [class_score(drawn(seed)) for seed in range(40)]
    widths = np.diff([score.interval for score in scores], axis=1).mean() / (2 * 1.96)
    assert 0.75 < widths / np.std([score.value for score in scores]) < 1.35


def test_recognised_over_all_and_by_class():
    answers = torch.eye(3)[[0, 0, 1, 2]]
    share: Any = recognised(answers, torch.tensor([0, 1, 1, 1]))
    assert share.value == 0.5
    assert share.by_class == [1.0, pytest.approx(1 / 3), None]
    assert share.interval[0] < 0.5 < share.interval[1]
