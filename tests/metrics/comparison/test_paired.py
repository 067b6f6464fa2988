import math

import numpy as np
import pytest
from scipy.stats import norm, ttest_rel

from duetgan.metrics.comparison import paired
from duetgan.metrics.intervals import wilson


def test_independent_figures_cover_the_difference_of_two_shares():
    draw = np.random.default_rng(1)
    hits = 0
    for first, second in draw.binomial(80, [0.9, 0.95], (400, 2)).tolist():
        own, its = (wilson(count, 80) or [0, 1] for count in (first, second))
        found = paired.independent_figures(first / 80, own, second / 80, its)
        low, high = found.interval or [1, 0]
        hits += low <= 0.05 <= high
        assert found.p is not None
        assert (found.p < 0.05) == (low > 0 or high < 0)
    assert 0.93 <= hits / 400 <= 0.98
    sides = (0.5, [0.4, 0.7]), (0.8, [0.75, 0.95])  # each limit at another distance
    low, high = 0.3 - math.hypot(0.05, 0.2), 0.3 + math.hypot(0.15, 0.1)
    p = 2 * norm.sf(0.3 / math.hypot(0.05, 0.2) * norm.isf(0.025))
    for (one, other), sign in ((sides, 1), (sides[::-1], -1)):
        found = paired.independent_figures(*one, *other)
        assert (found.difference, found.p) == pytest.approx((sign * 0.3, p), rel=1e-5)
        assert found.interval == pytest.approx(sorted([sign * low, sign * high]))


def test_over_seeds_it_is_students_paired_test():
    first, second = [0.81, 0.83, 0.79], [0.84, 0.85, 0.83]
    found, expected = paired.by_seeds(first, second), ttest_rel(second, first)
    assert found.p == pytest.approx(expected.pvalue)
    limits = expected.confidence_interval()
    assert found.interval == pytest.approx([limits.low, limits.high])
    assert paired.by_seeds(first, first).p is None
    equal = paired.by_seeds([0.525, 0.555], [0.535, 0.565])  # by 0.01, but for rounding: no spread to judge by
    assert (equal.p, equal.interval) == (None, None)


def test_holm_by_a_slow_loop():
    draw = np.random.default_rng(0)
    for _ in range(50):
        values = np.round(draw.random(5) * 0.2, 3).tolist()
        order = sorted(range(5), key=lambda i: values[i])
        rows = [*({"p": p} for p in values), {"p": None}]
        paired.holm(rows)
        assert rows.pop() == {"p": None}
        for level in (0.01, 0.05, 0.1):
            rejected, step = set(), 0
            while step < 5 and values[order[step]] * (5 - step) < level:
                rejected.add(order[step])
                step += 1
            assert {i for i, row in enumerate(rows) if row["p"] < level} == rejected
