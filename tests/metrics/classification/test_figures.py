import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, log_loss, roc_auc_score

from metrics.classification.corruptions import CORRUPTIONS, STRENGTHS
from metrics.classification.figures import confused_pairs, further_figures, outliers, rankings, robustness
from metrics.intervals import wilson
from tests.metrics.classification.test_counts import answers, figures_of


def further(logits, labels, seed=0):
    return further_figures(figures_of(logits, labels), logits, labels, seed=seed)


def test_figures_are_scikit_learns_and_lie_in_their_intervals():
    logits, labels = answers()
    figures, kept = further(logits, labels)
    probabilities, named = logits.double().softmax(1).numpy(), logits.argmax(1)
    assert figures["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, named))
    assert figures["nll"] == pytest.approx(log_loss(labels, probabilities))
    expected = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert figures["auroc"] == pytest.approx(expected, abs=1e-9)
    for place, row in enumerate(figures["per_class"].values()):
        assert row["auroc"] == pytest.approx(roc_auc_score(labels == place, probabilities[:, place]), abs=1e-9)
        precision = average_precision_score(labels == place, probabilities[:, place])
        assert row["average_precision"] == pytest.approx(precision, abs=1e-9)
        assert {"precision", "recall", "f1", "support"} < row.keys()
    for name in ("balanced_accuracy", "auroc", "average_precision", "nll"):
        low, high = figures[f"{name}_interval"]
        assert low < figures[name] < high < low + 0.3, name
    assert figures["accuracy_interval"] == wilson(int((named == labels).sum()), 500)
    assert figures["temperature"]["judged_on"] == 250
    json.dumps(figures, allow_nan=False)
    assert {name: column.shape for name, column in kept.items()} == dict.fromkeys(kept, (500,))
    assert kept["loss"].mean() == pytest.approx(figures["nll"])
    assert (kept["prediction"] == named.numpy()).all()


def test_ties_and_classes_without_images():
    """Class c is never there; two images have equal scores."""
    probabilities = np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]])
    found, influences = rankings(probabilities, np.array([0, 1, 1, 0]))
    assert found == {
        "auroc": [0.875, 0.875, None],
        "average_precision": [pytest.approx(5 / 6), pytest.approx(5 / 6), None],
    }
    assert influences["auroc"].shape == (4,)
    alone, _ = rankings(np.ones((2, 2)) / 2, np.array([0, 0]))
    assert alone == {"auroc": [None, None], "average_precision": [None, None]}


def test_one_class_of_images_has_no_ranking_but_all_else():
    figures, _ = further(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64))
    assert figures["auroc"] is None
    assert figures["auroc_interval"] is None
    assert figures["balanced_accuracy"] == 1


def test_the_macro_interval_covers():
    """The mean AUROC of large draws lies in at least 90 of 100 intervals of small ones."""
    exact, _ = further(*answers(n=20_000, classes=3, seed=99))
    hits = 0
    for seed in range(100):
        figures, _ = further(*answers(n=150, classes=3, seed=seed))
        low, high = figures["auroc_interval"]
        hits += low <= exact["auroc"] <= high
    assert hits >= 90


def test_confused_pairs_come_by_their_number_and_then_by_class():
    confusion = [[9, 2, 0], [2, 9, 5], [0, 0, 9]]
    pairs = confused_pairs(confusion, ["a", "b", "c"])
    assert [(each["true"], each["predicted"], each["n"]) for each in pairs] == [
        ("b", "c", 5),
        ("a", "b", 2),
        ("b", "a", 2),
    ]
    assert confused_pairs([[1, 0], [0, 1]], ["a", "b"]) == []


def test_robustness_is_a_table_of_shares():
    hits = torch.arange(len(CORRUPTIONS) * STRENGTHS).view(len(CORRUPTIONS), STRENGTHS)
    found = robustness(hits, 50, 64)
    assert found["accuracy"] == pytest.approx(hits.double().mean().item() / 50)
    row = found["corruptions"]["noise"]["strengths"][2]
    place = list(CORRUPTIONS).index("noise")
    assert row["accuracy"] == int(hits[place, 2]) / 50
    assert row["accuracy_interval"] == wilson(int(hits[place, 2]), 50)
    assert row["amount"] == CORRUPTIONS["noise"].amount(3, 64)


def test_outliers_are_ranked_as_scikit_learn_ranks():
    draw = torch.Generator().manual_seed(0)
    own, others = torch.randn(300, 4, generator=draw) * 3, torch.randn(200, 4, generator=draw)
    found = outliers(own, others)
    truth = np.arange(500) < 300
    both = torch.cat([own, others]).double()
    for name, scores in (("max_probability", both.softmax(1).amax(1)), ("energy", both.logsumexp(1))):
        assert found[name]["auroc"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-9)
        low, high = found[name]["auroc_interval"]
        assert low < found[name]["auroc"] < high
        threshold = np.sort(scores[:300].numpy())[15]  # 285 of 300 reach it
        assert found[name]["fpr95"] == (scores[300:].numpy() >= threshold).mean()
    assert found["n"] == 200
