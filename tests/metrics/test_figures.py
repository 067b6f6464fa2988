"""The table of figures: a row is evaluated, followed, written, reported and compared, with an interval or without."""

import json

import numpy as np
import pytest
import torch

from duetgan.commands import evaluate
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics import evaluate_classifier, evaluate_gan, figures, tables
from duetgan.metrics.evaluate_classifier import evaluate_classifier as evaluated
from duetgan.metrics.figures import PAGE, Figure, history, written
from duetgan.metrics.intervals import Measured, wilson
from duetgan.metrics.lineage import NO_DATA_PATH, leaks
from duetgan.metrics.tables import few_images
from duetgan.models.restore import classifier_from
from duetgan.reporting import figures as report
from duetgan.reporting.report import write_report
from duetgan.utils.checkpoint import load, resolve
from tests.metrics.conftest import pack, read_json
from tests.metrics.test_scripts import call


def mean_confidence(answers):
    """No interval is known."""
    return Measured(float(answers.confidence.mean()))


def brightest(samples):
    gaps = samples.pixels[0].max(1).values.double()  # those of the extractor `pixels`
    return Measured.normal(float(gaps.mean()), float(gaps.var()) / len(gaps))


NEW = {
    "classifier": Figure(
        "mean_confidence", "mean confidence", "mean of the largest probability", mean_confidence, interval=False,
        in_training=True,
    ),
    "gan": Figure("brightest", "brightest feature", "mean of a sample's largest feature", brightest, better="larger"),
}  # fmt: skip


@pytest.fixture(params=NEW)
def task(request, monkeypatch):
    """The task whose table has one more row."""
    name, rows = request.param.upper(), (*getattr(figures, request.param.upper()), NEW[request.param])
    for module in (figures, evaluate_classifier, evaluate_gan, tables, report):
        for table in (name, "FIGURES"):
            if hasattr(module, table):
                monkeypatch.setattr(module, table, rows)
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
    assert f"{100 * document[row.key]:.1f} %" in printed
    page = write_report(tmp_path).read_text()
    assert row.meaning.replace("'", "&#39;") in page


def test_a_row_is_followed_in_training_if_it_says_so(task, runs, test_reader):
    if task == "classifier":
        model = classifier_from(load(resolve(runs[task])))
        document = evaluated(model, test_reader, batch_size=256, details=False)
        assert history(evaluate_classifier.CLASSIFIER, document).keys() == {"accuracy", "nll", "ece", "mean_confidence"}


def test_a_row_that_a_user_adds_is_reported_too(monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", [])
    rows: list[Figure] = []
    figures.add(rows, NEW["gan"])
    assert rows == figures.FIGURES == [NEW["gan"]]


def test_what_a_figure_lacks_is_none_and_said():
    row = Figure("x", "x", "x", lambda record: Measured(1.0), needs={"training": "no training images", "labels": ""})
    record = figures.Samples(
        fake=torch.zeros(2, 1), real=torch.zeros(2, 1), training=None, labels=torch.zeros(2), n=2, names=[],
        probabilities=None, thresholds=None, seed=0, per_class=1, extractor="",
    )  # fmt: skip
    notes: dict[str, str] = {}
    assert figures.measured([row], record, notes) == {"x": None, "x_interval": None}
    assert notes == {"x": "no training images"}


SETTINGS = """
accuracy headline share interval training
balanced_accuracy tile share interval
top5_accuracy tile share interval
auroc tile number interval
average_precision tile number interval
nll tile number interval training
ece tile share interval training
macro_f1 headline share interval training
micro_f1 tile share interval training
exact_match tile share interval training
frechet column number interval training
floor column number training
kernel column number interval training
kernel_floor column number training
recognised headline share interval judge training recognised_by_class
clipped_density headline share interval
clipped_coverage headline share interval
diversity_ratio headline number interval training diversity_by_class
precision tile share interval
recall tile share interval
density tile number interval
coverage tile share interval
intra_class_frechet tile number interval intra_class_frechet_by_class
"""


def test_keys_settings_and_docs_come_from_the_table():
    """Of each figure its place and unit, what it has and what it needs, and whether training computes it."""
    lines = []
    for row in figures.FIGURES:
        flags = {"interval": row.interval, "judge": row.by_judge, "training": row.in_training, row.by_class: True}
        words = [row.key, row.place, row.unit or "number", *(key for key in flags if flags[key])]
        lines.append(" ".join(words).strip())
    assert lines == SETTINGS.strip().splitlines()
    assert [row.key for row in figures.LABELS if row.in_training] == [row.key for row in figures.LABELS]
    assert [row.key for row in figures.LABELS[:2]] == ["auroc", "average_precision"]
    page = PAGE.read_text()
    assert written(page) == page, "python -m metrics.figures writes it"
    json.dumps({row.key: row.meaning for row in figures.FIGURES})


def test_intervals_solve_the_score_equation_and_stay_within_what_is_possible():
    for hits, count in ((0, 10), (1, 3), (40, 41), (700, 1000), (10, 10)):
        low, high = wilson(hits, count) or pytest.fail("no interval")
        assert low < high
        for end in (low, high):
            assert (hits / count - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count)
    assert wilson(0, 0) is None
    assert Measured.normal(0.5, 0.01).interval == pytest.approx([0.5 - 0.1959964, 0.5 + 0.1959964])
    assert Measured.normal(0.9, 0.01, low=0, high=1).interval == pytest.approx([0.9 - 0.1959964, 1.0])
    assert Measured.normal(0.9, 0.0).interval is None  # 58 images of which none counts are no certainty of 0
    assert Measured.influenced(0.5, np.array([3.0, -3.0])).interval == [0, 1]
    assert Measured.influenced(1.0, np.zeros(4)).interval is None


def test_few_images_are_told_and_many_are_not():
    words = "the accuracy is uncertain by about 15 percentage points either way"
    assert few_images(1, interval=[0.3, 0.6]) == {"n": words}
    assert "same n" in few_images(999, distances=True)["n"]
    assert few_images(1000, interval=[0.5, 0.55], distances=True) == {}
    assert few_images(40, interval=[0.95, 1.0]) == {}


def test_leaks_are_counted_pixel_for_pixel(tmp_path):
    first = pack(tmp_path / "a.lmdb", seed=1, count=30)
    with Dataset(first) as reader, Dataset(first) as same:
        assert "30 of 30" in leaks(reader, same, reason="")["leaks"]
        assert leaks(reader, None, "gone")["leaks"].endswith("is not known: gone")
        assert leaks(reader, None, NO_DATA_PATH) == {}
        with Dataset(pack(tmp_path / "d.lmdb", seed=1, count=45)) as more:  # the first 10 of class 0, the last 5 of 1
            told = leaks(more, reader, reason="")["leaks"]
        assert told.startswith("15 of 45 test images are training images")
        assert told.endswith(f"see duet duplicates {first} {tmp_path / 'd.lmdb'}")
        with Dataset([tmp_path / "d.lmdb"] * 2) as twice:  # every test image counts, also one that occurs twice
            assert leaks(twice, reader, reason="")["leaks"].startswith("30 of 90 test images")
        with Dataset(pack(tmp_path / "b.lmdb", seed=2, count=30)) as other:
            assert not np.isin(other.signatures()["digest"], reader.signatures()["digest"]).any()
            assert leaks(reader, other, reason="") == {}
        with Dataset(pack(tmp_path / "c.lmdb", seed=1, count=30, side=32)) as larger:
            assert leaks(reader, larger, reason="") == {}


def test_a_distance_has_the_upper_half_of_its_interval_beside_it():
    """The lower half is shorter where the interval is cut off at 0."""
    row = {"extractor": "pixels", "n": 5, "frechet": 1.0, "frechet_interval": [0.0, 4.0]}
    (table,) = [table for table in tables.tables({"distances": [row]}) if "frechet" in table[0]]
    assert "1 ± 3" in table[1][0]
