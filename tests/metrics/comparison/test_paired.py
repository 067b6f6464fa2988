import math

import numpy as np
import pytest
from scipy.stats import norm, ttest_rel

from duetgan.metrics.classification.answers import Ranking
from duetgan.metrics.comparison import paired
from duetgan.metrics.intervals import wilson


def pair(gained, lost, both=10, neither=10):
    """Two columns of hits of which the second has `gained` alone, the first `lost`."""
    first = np.repeat([False, True, True, False], [gained, lost, both, neither])
    second = np.repeat([True, False, True, False], [gained, lost, both, neither])
    return first, second


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 0), (6, 0), (3, 9), (40, 20)])
def test_mcnemar_is_the_sum_of_the_binomials_tails(gained, lost):
    found = paired.paired_fractions(*pair(gained, lost))
    count = gained + lost
    tail = sum(math.comb(count, k) for k in range(min(gained, lost) + 1)) / 2**count
    assert found.p == pytest.approx(min(1, 2 * tail), rel=1e-9)
    assert found.difference == pytest.approx((gained - lost) / (count + 20))
    low, high = found.interval or [1, 0]
    assert low <= found.difference <= high


@pytest.mark.parametrize(
    ("gained", "lost", "n", "expected"),
    [(0, 0, 44, (-0.0803, 0.0803)), (0, 1, 44, (-0.1181, 0.0594)), (12, 2, 50, (0.0611, 0.3447))],
)
def test_tango_gives_what_newcombe_lists(gained, lost, n, expected):
    """Newcombe 1998, Stat. Med. 17, 2635-2650, compares ten methods; Tango's are given there and in Tango 1998."""
    assert paired.tango(gained, lost, n) == pytest.approx(expected, abs=5e-5)


def test_paired_figures_of_auroc_is_delongs_test():
    """Against a slow loop over DeLong's placements, with 1/m instead of 1/(m - 1)."""
    draw = np.random.default_rng(0)
    positive = draw.random(120) < 0.4
    scores = [draw.standard_normal(120) + shift * positive for shift in (0.6, 1.2)]
    rankings = [Ranking(each, positive) for each in scores]
    influences = (each.auroc_influence() for each in rankings)
    found = paired.paired_figures(rankings[1].auroc() - rankings[0].auroc(), *influences)
    rows, columns = [], []
    for each in scores:
        wins = np.array([[(p > q) + (p == q) / 2 for q in each[~positive]] for p in each[positive]])
        rows.append(wins.mean(1))
        columns.append(wins.mean(0))
    variance = np.var(rows[1] - rows[0]) / len(rows[0]) + np.var(columns[1] - columns[0]) / len(columns[0])
    error = math.sqrt(variance)
    assert found.p == pytest.approx(2 * norm.sf(abs(found.difference) / error), rel=1e-9)
    assert found.interval == pytest.approx(norm.interval(0.95, found.difference, error), rel=1e-6)


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


def test_an_interval_leaves_0_out_where_its_p_says_so():
    """J15: of every number of images that only one of two gets right, out of 100. The same answers do not differ."""
    for gained in range(12):
        for lost in range(12):
            result = paired.paired_fractions(*pair(gained, lost, both=60, neither=40 - gained - lost))
            low, high = result.interval or [1, 0]
            assert result.p is not None
            assert (result.p < 0.05) == (low > 0 or high < 0), (gained, lost)
            assert low <= result.difference <= high
    found = paired.paired_figures(0.0, np.ones(5), np.ones(5))
    assert (found.interval, found.p, paired.paired_fractions(*pair(0, 0)).p) == ([0.0, 0.0], 1.0, 1)
