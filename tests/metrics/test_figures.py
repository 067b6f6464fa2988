"""The table of figures: a row is evaluated, followed, written, reported and compared, with an interval or without."""

import json
from collections.abc import Iterator

import pytest
import torch

import evaluate
from duetgan.metrics import evaluate_classifier, evaluate_gan, figures, tables
from duetgan.metrics.comparison import compare, predictions
from duetgan.metrics.evaluate_classifier import evaluate_classifier as evaluated
from duetgan.metrics.figures import PAGE, Figure, history, written
from duetgan.metrics.intervals import Measured
from duetgan.models.restore import classifier_from
from duetgan.reporting import figures as report
from duetgan.reporting.report import write_report
from duetgan.utils.checkpoint import load, resolve
from tests.metrics.conftest import read_json
from tests.metrics.test_scripts import call


def mean_confidence(answers):
    """No interval is known."""
    return Measured(float(answers.confidence.mean()))


def brightest(samples):
    gaps = samples.counted[0].max(1).values.double()
    return Measured.normal(float(gaps.mean()), float(gaps.var()) / len(gaps))


NEW = {
    "classifier": Figure(
        "mean_confidence", "mean confidence", "mean of the largest probability", mean_confidence, interval=False,
        in_training=True,
    ),
    "gan": Figure("brightest", "brightest feature", "mean of a sample's largest feature", brightest, better="larger"),
}  # fmt: skip


@pytest.fixture(params=NEW)
def task(request, monkeypatch) -> Iterator[str]:
    """The task whose table has one more row."""
    name, rows = request.param.upper(), (*getattr(figures, request.param.upper()), NEW[request.param])
    for module in (figures, evaluate_classifier, evaluate_gan, tables):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, rows)
    monkeypatch.setattr(report, "FIGURES", rows)
    monkeypatch.setattr(report, "TILES", rows)
    return request.param


def test_a_row_is_all_that_a_new_figure_needs(task, runs, tmp_path, capsys):
    """J12. It is evaluated, printed and reported, whether it has an interval or not."""
    row, run = NEW[task], runs[task]
    (tmp_path / "config.yaml").write_text(f"task: {task}\n")
    options = ["--extractor", "pixels", "--n", 20, "--searched", 0] if task == "gan" else []
    assert call(evaluate, "--checkpoint", run, "--out", tmp_path / "eval", *options) == 0
    document, printed = read_json(tmp_path / "eval" / "metrics.json"), capsys.readouterr().out
    assert document[row.key] > 0
    assert (f"{row.key}_interval" in document) == row.interval
    assert row.title in printed
    assert f"{document[row.key]:.4f}" in printed
    page = write_report(tmp_path).read_text()
    assert row.meaning.replace("'", "&#39;") in page


def test_a_row_is_followed_in_training_if_it_says_so(task, runs, test_reader):
    if task == "classifier":
        model = classifier_from(load(resolve(runs[task])))
        document = evaluated(model, test_reader, details=False)
        assert history(evaluate_classifier.CLASSIFIER, document).keys() == {"accuracy", "nll", "ece", "mean_confidence"}


def test_what_a_figure_lacks_is_none_and_said():
    row = Figure("x", "x", "x", lambda record: Measured(1.0), needs={"training": "no training images", "labels": ""})
    record = figures.Samples(
        fake=torch.zeros(2, 1), real=torch.zeros(2, 1), training=None, labels=torch.zeros(2), n=2, names=[],
        probabilities=None, seed=0,
    )  # fmt: skip
    notes: dict[str, str] = {}
    assert figures.measured([row], record, notes) == {"x": None, "x_interval": None}
    assert notes == {"x": "no training images"}


def test_every_key_stands_once_and_the_docs_have_the_table():
    for rows in (figures.CLASSIFIER, figures.GAN):
        assert len({row.key for row in rows}) == len(rows)
    page = PAGE.read_text()
    assert written(page) == page, "python -m metrics.figures writes it"


def test_comparisons_and_columns_come_from_the_table():
    assert compare.ROWS.keys() == {row.key for row in figures.FIGURES if row.better}
    assert {row.key for row in figures.CLASSIFIER} < predictions.COLUMNS.keys()
    json.dumps({row.key: row.meaning for row in figures.FIGURES})
