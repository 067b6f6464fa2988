"""Thresholds of several labels an image against every choice, and what is undefined."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from duetgan.metrics.classification.labels import LabelAnswers, best_thresholds, macro_f1, micro_f1
from duetgan.metrics.figures import LABELS, measured
from duetgan.utils.errors import UserError

NAMES = ["cat", "dog", "bird", "fish"]


def answers(n, *, levels):
    draw = np.random.default_rng(0)
    labels = draw.random((n, len(NAMES))) < (0.5, 0.2, 0.3, 0.1)
    logits = draw.standard_normal(labels.shape) + labels
    logits = logits if levels is None else np.round(logits * levels) / levels
    return LabelAnswers(torch.tensor(logits).float(), torch.tensor(labels), NAMES, torch.tensor([0.5, 0.3, 0.7, 0.5]))


@pytest.mark.parametrize("levels", [None, 1])
def test_no_threshold_has_a_better_f1_than_the_best_ones(levels):
    given = answers(40, levels=levels)
    found = best_thresholds(given)
    for label, threshold in enumerate(found):
        scores, truth = given.probabilities[:, label].numpy(), given.labels[:, label].numpy()
        ends = np.unique([0.0, *scores])
        every = [f1_score(truth, scores >= (a + b) / 2) for a, b in itertools.pairwise(ends)]
        assert f1_score(truth, scores >= threshold) == pytest.approx(max(every))
    better = LabelAnswers(given.logits, given.labels, NAMES, torch.tensor(found))
    assert (macro_f1(better).value or 0) >= (macro_f1(given).value or 0) > 0


def test_labels_that_are_nowhere_are_left_out_and_nothing_at_all_has_no_figure():
    labels = torch.tensor([[True, False], [False, False]])
    given = LabelAnswers(torch.tensor([[1.0, -1.0], [-1.0, -1.0]]), labels, ["a", "b"], torch.tensor([0.5, 0.5]))
    assert macro_f1(given).value == 1.0
    assert best_thresholds(given)[1] == 0.5
    nothing = LabelAnswers(-torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), ["a", "b"], torch.tensor([0.5, 0.5]))
    assert [figure(nothing).value for figure in (macro_f1, micro_f1)] == [None, None]
    assert measured(LABELS, nothing, {})["exact_match"] == 1.0
    assert (given.class_text(labels[0]), given.class_text(labels[1])) == ("a", "no label")
    with pytest.raises(UserError, match="no image"):
        LabelAnswers(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.bool), ["a", "b"], torch.tensor([0.5, 0.5]))
