import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, top_k_accuracy_score
from torchmetrics.functional.classification import multiclass_calibration_error

from metrics.evaluate_classifier import ClassificationCounts
from utils.errors import UserError


def answers(n=500, classes=7, seed=0, sharpness=2.0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=draw)
    logits = torch.randn(n, classes, generator=draw) * sharpness
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


def figures_of(*answers):
    """The figures of logits [n, K] and labels [n]."""
    return counted(*answers).figures([f"c{i}" for i in range(answers[0].shape[1])])


def counted(logits, labels, **options):
    counts = ClassificationCounts(logits.shape[1], **options)
    counts.update(logits, labels)
    return counts


def test_confusion_top_k_and_per_class_are_scikit_learns():
    logits, labels = answers()
    figures = figures_of(logits, labels)
    predicted = logits.argmax(1)
    assert figures["confusion"] == confusion_matrix(labels, predicted).tolist()
    assert figures["accuracy"] == pytest.approx((predicted == labels).double().mean().item())
    assert figures["top5_accuracy"] == pytest.approx(top_k_accuracy_score(labels, logits, k=5))
    expected = np.array(precision_recall_fscore_support(labels, predicted))  # [4, K]
    found = [list(row.values()) for row in figures["per_class"].values()]
    np.testing.assert_allclose(np.array(found).T, expected, rtol=1e-12)
    json.dumps(figures, allow_nan=False)


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 8.0])
def test_calibration_error_is_torchmetrics(sharpness):
    logits, labels = answers(sharpness=sharpness)
    expected = multiclass_calibration_error(logits.double().softmax(1), labels, num_classes=7, n_bins=15, norm="l1")
    assert figures_of(logits, labels)["ece"] == pytest.approx(expected.item(), rel=1e-6)


def test_calibration_error_by_hand():
    """Two images at confidence 0.85 of which one is right, |1.7 - 1| / 4; two at 0.62, both right, |1.24 - 2| / 4."""
    probabilities = torch.tensor([[0.85, 0.15], [0.85, 0.15], [0.62, 0.38], [0.38, 0.62]]).double()
    ece = figures_of(probabilities.log(), torch.tensor([0, 1, 0, 1]))["ece"]
    assert ece == pytest.approx((0.7 + 0.76) / 4, abs=1e-7)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    assert counted(torch.zeros(1, 2), torch.tensor([0]), bins=2).bin_counts.tolist() == [1, 0]


def test_certain_and_right_is_calibrated():
    logits = torch.eye(6) * 1000
    figures = figures_of(logits, torch.arange(6))
    assert figures["ece"] == 0
    assert figures["accuracy"] == figures["top5_accuracy"] == 1


@given(cuts=st.lists(st.integers(0, 120), max_size=5), order=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_batches_in_any_order_give_identical_counts(cuts, order):
    logits, labels = answers(n=120)
    whole = counted(logits, labels)
    rows = list(range(120))
    order.shuffle(rows)
    counts = ClassificationCounts(7)
    for start, end in pairwise(sorted({0, *cuts, 120})):
        counts.update(logits[rows[start:end]], labels[rows[start:end]])
    names = list("abcdefg")
    assert counts.figures(names) == whole.figures(names)  # exactly, the calibration error too


def test_top5_is_undefined_up_to_five_classes_where_it_would_always_be_one():
    assert figures_of(*answers(classes=4))["top5_accuracy"] is None
    assert figures_of(*answers(classes=5))["top5_accuracy"] is None
    logits, labels = answers(classes=6)
    expected = top_k_accuracy_score(labels, logits, k=5)
    assert expected < 1
    assert figures_of(logits, labels)["top5_accuracy"] == pytest.approx(expected)


def test_ties_go_to_the_lower_class():
    counts = counted(torch.zeros(6, 6), torch.arange(6))
    assert int(counts.top_k_hits) == 5


def test_undefined_figures_are_none():
    """Class b is never named and class c is never there."""
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]])
    rows = counted(logits, torch.tensor([0, 1, 0])).per_class(["a", "b", "c"])
    assert rows["b"] == {"precision": None, "recall": 0, "f1": 0, "support": 1}
    assert rows["c"] == {"precision": 0, "recall": None, "f1": 0, "support": 0}


def test_bad_input_is_told():
    counts = ClassificationCounts(3)
    with pytest.raises(UserError, match="no image"):
        counts.figures(["a", "b", "c"])
    with pytest.raises(UserError, match="not finite"):
        counts.update(torch.tensor([[0.0, float("nan"), 1.0]]), torch.tensor([0]))
    with pytest.raises(UserError, match="beyond the classifier's 3 classes"):
        counts.update(torch.zeros(1, 3), torch.tensor([3]))
    with pytest.raises(ValueError, match="expected logits"):
        counts.update(torch.zeros(2, 4), torch.tensor([0, 1]))
