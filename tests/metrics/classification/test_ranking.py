import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from metrics.classification.ranking import Ranking

MEASURES = {"auroc": roc_auc_score, "average_precision": average_precision_score}


def answers(n, *, levels=None, seed=0, shift=1.0):
    """Scores [n], of a few levels if asked for, and which are positive."""
    draw = np.random.default_rng(seed)
    positive = draw.random(n) < 0.3
    positive[:2] = True, False
    scores = draw.standard_normal(n) + shift * positive
    return (scores if levels is None else np.round(scores * levels / 4)), positive


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("levels", [None, 2, 8])
@pytest.mark.parametrize("n", [2, 7, 300])
def test_equal_to_scikit_learn_with_and_without_ties(measure, levels, n):
    scores, positive = answers(n, levels=levels)
    found = getattr(Ranking(scores, positive), measure)()
    assert found == pytest.approx(MEASURES[measure](positive, scores), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
@settings(deadline=None, max_examples=60)
def test_equal_to_scikit_learn_for_any_ties(rows):
    scores, positive = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    if positive.all() or not positive.any():
        with pytest.raises(ValueError, match="a positive and a negative"):
            Ranking(scores, positive)
        return
    for measure, expected in MEASURES.items():
        assert getattr(Ranking(scores, positive), measure)() == pytest.approx(expected(positive, scores), abs=1e-9)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("levels", [None, 6])
def test_influence_is_the_derivative_by_an_images_weight(measure, levels):
    """Against scikit-learn's figures with the weight of one image raised and lowered."""
    scores, positive = answers(60, levels=levels)
    influence = getattr(Ranking(scores, positive), f"{measure}_influence")()
    step = 1e-5
    for image in range(60):
        values = []
        for change in (step, -step):
            weights = np.ones(60)
            weights[image] += change
            values.append(MEASURES[measure](positive, scores, sample_weight=weights))
        assert influence[image] / 60 == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)
    assert influence.sum() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("measure", MEASURES)
def test_spread_is_the_bootstraps(measure):
    scores, positive = answers(800)
    influence = getattr(Ranking(scores, positive), f"{measure}_influence")()
    draw = np.random.default_rng(1)
    values = []
    for _ in range(400):
        chosen = draw.integers(0, 800, 800)
        values.append(getattr(Ranking(scores[chosen], positive[chosen]), measure)())
    assert np.sqrt(np.square(influence).sum()) / 800 == pytest.approx(np.std(values), rel=0.12)


def test_spread_of_auroc_is_delongs():
    """A slow loop over DeLong, DeLong and Clarke-Pearson 1988, equation 4, with 1/m instead of 1/(m - 1)."""
    scores, positive = answers(80, levels=10)
    wins = [[(p > q) + (p == q) / 2 for q in scores[~positive]] for p in scores[positive]]
    table = np.array(wins)
    variance = table.mean(1).var() / len(table) + table.mean(0).var() / table.shape[1]
    influence = Ranking(scores, positive).auroc_influence()
    assert np.square(influence).sum() / 80**2 == pytest.approx(variance, rel=1e-9)
