"""What tests/metrics/test_document.py does not reach of a classifier's figures: edges, ties and what is undefined."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    top_k_accuracy_score,
)

from duetgan.metrics.classification import answers as calibration
from duetgan.metrics.classification.answers import (
    Answers,
    auroc,
    average_precision,
    balanced_accuracy,
    ece,
    per_class,
    reliability,
    top5_accuracy,
)
from duetgan.metrics.figures import CLASSIFIER, measured
from duetgan.utils.errors import UserError


def answers(n=500, classes=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=draw)
    logits = torch.randn(n, classes, generator=draw) * 2
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


def given(logits, labels):
    return Answers(logits, labels, [f"c{i}" for i in range(logits.shape[1])])


def figures_of(logits, labels) -> dict[str, Any]:
    """The figures of logits [n, K] and labels [n]."""
    return measured(CLASSIFIER, given(logits, labels), {})


def test_calibration_error_by_hand_edges_and_ties():
    """Two images at confidence 0.85 of which one is right, |1.7 - 1| / 4; two at 0.62, both right, |1.24 - 2| / 4."""
    probabilities = torch.tensor([[0.85, 0.15], [0.85, 0.15], [0.62, 0.38], [0.38, 0.62]]).double()
    assert ece(given(probabilities.log(), torch.tensor([0, 1, 0, 1]))).value == pytest.approx(
        (0.7 + 0.76) / 4, abs=1e-7
    )
    # an edge belongs to the bin below, certain and right is calibrated, ties go to the lower class
    assert [row["n"] for row in reliability(given(torch.zeros(1, 2), torch.tensor([0])), bins=2)] == [1, 0]
    figures = figures_of(torch.eye(6) * 1000, torch.arange(6))
    assert (figures["ece"], figures["accuracy"], figures["top5_accuracy"]) == (0, 1, 1)
    assert top5_accuracy(given(torch.zeros(6, 6), torch.arange(6))).value == 5 / 6


@pytest.mark.parametrize("classes", [4, 5, 6])
def test_top5_is_undefined_up_to_five_classes_where_it_would_always_be_one(classes):
    logits, labels = answers(classes=classes)
    expected = top_k_accuracy_score(labels, logits, k=5) if classes > 5 else None
    assert expected is None or expected < 1
    assert top5_accuracy(given(logits, labels)).value == expected


def test_undefined_figures_are_none():
    """Class c1 is never predicted and class c2 is never there; then two images have equal scores."""
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]])
    rows = per_class(given(logits, torch.tensor([0, 1, 0])))
    assert rows["c1"] == {"precision": None, "recall": 0, "f1": 0, "support": 1}
    assert rows["c2"] == {"precision": 0, "recall": None, "f1": 0, "support": 0}
    alone = figures_of(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64))
    assert alone["auroc"] is alone["auroc_interval"] is alone["average_precision"] is None
    assert alone["balanced_accuracy"] == 1
    two, three = torch.tensor([[1.0, 0], [1, 0], [0, 1]]), torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    labels = torch.tensor([0, 1, 1])
    without, with_one = (balanced_accuracy(given(logits, labels)) for logits in (two, three))
    assert (without.value, without.interval) == (with_one.value, with_one.interval)
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]]).double()
    record = given(probabilities.log(), torch.tensor([0, 1, 1, 0]))
    assert auroc(record).by_class == [0.875, 0.875, None]
    assert average_precision(record).by_class == [pytest.approx(5 / 6), pytest.approx(5 / 6), None]


def test_no_image_is_refused():
    with pytest.raises(UserError, match="no image"):
        given(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


def test_temperature_stays_within_its_bounds_and_needs_images_to_judge_it():
    for sign, bound in ((1, calibration.COLDEST), (-1, calibration.HOTTEST)):  # every image is right, or wrong
        assert calibration.fit_temperature(sign * torch.eye(4), torch.arange(4)) == pytest.approx(bound, rel=1e-6)
    assert calibration.judged_temperature(given(*answers(n=3)), seed=0) is None


def test_halves_are_disjoint_stratified_and_by_the_key():
    labels = np.random.default_rng(0).integers(0, 4, 101)
    first, second = calibration.halves(labels, seed=3)
    assert sorted([*first, *second]) == list(range(101))
    for label in range(4):
        counts = [(labels[half] == label).sum() for half in (first, second)]
        assert abs(int(counts[0]) - int(counts[1])) <= 1
    again, _ = calibration.halves(labels, seed=3)
    other, _ = calibration.halves(labels, seed=4)
    np.testing.assert_array_equal(first, again)
    assert len(first) != len(other) or (first != other).any()
