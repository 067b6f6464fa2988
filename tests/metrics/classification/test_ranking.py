import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from duetgan.metrics.classification.answers import Ranking

MEASURES = {"auroc": roc_auc_score, "average_precision": average_precision_score}


def answers(n, *, levels=None, seed=0, shift=1.0):
    """Scores [n], of a few levels if asked for, and which are positive."""
    draw = np.random.default_rng(seed)
    positive = draw.random(n) < 0.3
    positive[:2] = True, False
    scores = draw.standard_normal(n) + shift * positive
    return (scores if levels is None else np.round(scores * levels / 4)), positive


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
