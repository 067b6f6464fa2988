import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from duetgan.metrics.classification import calibration
from tests.metrics.classification.test_answers import answers, figures_of


def sharpened(factor, *, n=2000, seed=0):
    """Logits that are calibrated, times a factor, and labels drawn from the calibrated probabilities."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 5, generator=draw) * 1.5
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    return logits * factor, labels


def test_likelihood_is_torchs():
    logits, labels = answers()
    expected = cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(calibration.negative_log_likelihood(logits, labels), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_temperature_is_scipys(factor):
    logits, labels = sharpened(factor)

    def loss(log_temperature):
        return float(cross_entropy(logits.double() / np.exp(log_temperature), labels))

    expected = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-10})
    found = calibration.fit_temperature(logits, labels)
    assert found == pytest.approx(np.exp(expected.x), rel=1e-6)
    assert found == pytest.approx(factor, rel=0.1)


def test_temperature_stays_within_its_bounds():
    for sign, bound in ((1, calibration.COLDEST), (-1, calibration.HOTTEST)):  # every image is right, or wrong
        assert calibration.fit_temperature(sign * torch.eye(4), torch.arange(4)) == pytest.approx(bound, rel=1e-6)


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
    assert found is not None
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
