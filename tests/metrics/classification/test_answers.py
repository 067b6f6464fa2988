"""A classifier's figures against scikit-learn's and torchmetrics'."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    confusion_matrix,
    log_loss,
    precision_recall_fscore_support,
    roc_auc_score,
    top_k_accuracy_score,
)
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_calibration_error

from duetgan.metrics.classification import answers as calibration
from duetgan.metrics.classification.answers import (
    Answers,
    auroc,
    average_precision,
    balanced_accuracy,
    confused_pairs,
    ece,
    outliers,
    per_class,
    reliability,
    top5_accuracy,
)
from duetgan.metrics.evaluate_classifier import document_of
from duetgan.metrics.figures import CLASSIFIER, measured
from duetgan.metrics.intervals import wilson
from duetgan.utils.errors import UserError


def answers(n=500, classes=7, seed=0, sharpness=2.0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=draw)
    logits = torch.randn(n, classes, generator=draw) * sharpness
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


def given(logits, labels):
    return Answers(logits, labels, [f"c{i}" for i in range(logits.shape[1])])


def figures_of(logits, labels) -> dict[str, Any]:
    """The figures of logits [n, K] and labels [n]."""
    return measured(CLASSIFIER, given(logits, labels), {})


def test_a_document_is_scikit_learns_and_lies_in_its_intervals():
    logits, labels = answers()
    document, kept = document_of(given(logits, labels), seed=0)
    probabilities, predicted = logits.double().softmax(1).numpy(), logits.argmax(1)
    assert document["confusion"] == confusion_matrix(labels, predicted).tolist()
    assert document["accuracy"] == pytest.approx((predicted == labels).double().mean().item())
    assert document["accuracy_interval"] == wilson(int((predicted == labels).sum()), 500)
    assert document["top5_accuracy"] == pytest.approx(top_k_accuracy_score(labels, logits, k=5))
    assert document["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert document["nll"] == pytest.approx(log_loss(labels, probabilities))
    expected = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert document["auroc"] == pytest.approx(expected, abs=1e-9)
    rows = [list(row.values())[:4] for row in document["per_class"].values()]
    table = np.array(precision_recall_fscore_support(labels, predicted))  # [4, K]
    np.testing.assert_allclose(np.array(rows).T, table, rtol=1e-12)
    for place, row in enumerate(document["per_class"].values()):
        assert row["auroc"] == pytest.approx(roc_auc_score(labels == place, probabilities[:, place]), abs=1e-9)
        score = average_precision_score(labels == place, probabilities[:, place])
        assert row["average_precision"] == pytest.approx(score, abs=1e-9)
    for figure in (row for row in CLASSIFIER if row.interval):
        low, high = document[f"{figure.key}_interval"]
        assert low < document[figure.key] < high < low + 0.3, figure.key
    assert document["temperature"]["judged_on"] == 250
    json.dumps(document, allow_nan=False)
    assert {name: column.shape for name, column in kept.items()} == dict.fromkeys(kept, (500,))
    assert kept["loss"].mean() == pytest.approx(document["nll"])
    assert (kept["prediction"] == predicted.numpy()).all()


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 8.0])
def test_calibration_error_is_torchmetrics_and_that_of_the_bins(sharpness):
    logits, labels = answers(sharpness=sharpness)
    expected = multiclass_calibration_error(logits.double().softmax(1), labels, num_classes=7, n_bins=15, norm="l1")
    error = ece(given(logits, labels))
    assert error.value == pytest.approx(expected.item(), rel=1e-6)
    assert float(error.influence.sum()) == pytest.approx(0, abs=1e-9)
    rows: list[Any] = [row for row in reliability(given(logits, labels)) if row["n"]]
    gaps = sum(row["n"] * abs(row["accuracy"] - row["confidence"]) for row in rows)
    assert error.value == pytest.approx(gaps / 500, abs=1e-8)


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
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]]).double()
    record = given(probabilities.log(), torch.tensor([0, 1, 1, 0]))
    assert auroc(record).by_class == [0.875, 0.875, None]
    assert average_precision(record).by_class == [pytest.approx(5 / 6), pytest.approx(5 / 6), None]


@pytest.mark.parametrize(
    ("logits", "labels", "fault", "told"),
    [
        (torch.zeros(0, 3), [], UserError, "no image"),
        (torch.zeros(1, 3), [3], UserError, "beyond the classifier's 3 classes"),
        (torch.zeros(2, 3), [0], ValueError, "expected logits"),
    ],
)
def test_bad_input_is_told(logits, labels, fault, told):
    with pytest.raises(fault, match=told):
        given(logits, torch.tensor(labels, dtype=torch.int64))


def test_the_macro_interval_covers():
    """The mean AUROC of large draws lies in at least 90 of 100 intervals of small ones."""
    exact, hits = auroc(given(*answers(n=20_000, classes=3, seed=99))).value or 0.0, 0
    for seed in range(100):
        low, high = auroc(given(*answers(n=150, classes=3, seed=seed))).interval or []
        hits += low <= exact <= high
    assert hits >= 90


def test_influence_on_balanced_accuracy_is_the_bootstraps_spread():
    (logits, labels), draw = answers(), np.random.default_rng(0)
    values = []
    for _ in range(200):
        chosen = draw.integers(0, 500, 500)
        values.append(balanced_accuracy(given(logits[chosen], labels[chosen])).value or 0.0)
    influence: Any = balanced_accuracy(given(logits, labels)).influence
    assert np.sqrt(np.square(influence).sum()) / 500 == pytest.approx(np.std(values), rel=0.12)
    assert influence.sum() == pytest.approx(0, abs=1e-9)


def test_confused_pairs_come_by_their_number_and_then_by_class():
    confusion = np.array([[9, 2, 0], [2, 9, 5], [0, 0, 9]])
    labels, predicted = (
        torch.from_numpy(np.repeat(each, confusion.ravel())) for each in np.indices((3, 3)).reshape(2, 9)
    )
    record = given(torch.eye(3)[predicted], labels)
    pairs = [(each["true"], each["predicted"], each["n"]) for each in confused_pairs(record)]
    assert pairs == [("c1", "c2", 5), ("c0", "c1", 2), ("c1", "c0", 2)]
    assert confused_pairs(given(torch.eye(3), torch.arange(3))) == []


def test_outliers_are_ranked_as_scikit_learn_ranks():
    draw = torch.Generator().manual_seed(0)
    own, others = torch.randn(300, 4, generator=draw) * 3, torch.randn(200, 4, generator=draw)
    document = outliers(own, others)
    truth = np.arange(500) < 300
    both = torch.cat([own, others]).double()
    for name, scores in (("max_probability", both.softmax(1).amax(1)), ("energy", both.logsumexp(1))):
        assert document[name]["auroc"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-9)
        low, high = document[name]["auroc_interval"]
        assert low < document[name]["auroc"] < high
        threshold = np.sort(scores[:300].numpy())[15]  # 285 of 300 reach it
        assert document[name]["fpr95"] == (scores[300:].numpy() >= threshold).mean()
    assert document["n"] == 200


def sharpened(factor, *, n=2000, seed=0):
    """Logits that are calibrated, times a factor, and labels drawn from the calibrated probabilities."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 5, generator=draw) * 1.5
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    return logits * factor, labels


def test_likelihood_is_torchs_and_temperature_stays_within_its_bounds():
    logits, labels = answers()
    expected = cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(calibration.negative_log_likelihood(logits, labels), expected, rtol=1e-12, atol=1e-12)
    for sign, bound in ((1, calibration.COLDEST), (-1, calibration.HOTTEST)):  # every image is right, or wrong
        assert calibration.fit_temperature(sign * torch.eye(4), torch.arange(4)) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_temperature_is_scipys(factor):
    logits, labels = sharpened(factor)

    def loss(log_temperature):
        return float(cross_entropy(logits.double() / np.exp(log_temperature), labels))

    expected = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-10})
    found = calibration.fit_temperature(logits, labels)
    assert found == pytest.approx(np.exp(expected.x), rel=1e-6)
    assert found == pytest.approx(factor, rel=0.1)


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


def test_an_overconfident_classifier_is_mended_on_images_the_fit_has_not_seen():
    logits, labels = sharpened(3.0)
    found = calibration.judged_temperature(logits, labels, seed=0)
    assert found["fitted_on"] == found["judged_on"] == 1000
    assert found["value"] == pytest.approx(3, rel=0.1)
    assert found["ece_after"] < 0.05 < 0.1 < found["ece_before"]
    assert found["nll_after"] < found["nll_before"]
    fitted, judged = calibration.halves(labels.numpy(), 0)
    assert found["value"] == calibration.fit_temperature(logits[fitted], labels[fitted])
    assert found["ece_before"] == pytest.approx(figures_of(logits[judged], labels[judged])["ece"], abs=1e-8)
    assert found["ece_interval_before"][0] < found["ece_before"] < found["ece_interval_before"][1]
    changed = labels.clone()
    changed[judged] = 0  # the fit does not look at the judged half
    half = logits[fitted], changed[fitted]
    assert calibration.fit_temperature(*half) == found["value"]
    assert calibration.judged_temperature(logits[:3], labels[:3], seed=0) is None
