from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.metrics import images
from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.classification.corruptions import CORRUPTIONS
from duetgan.metrics.images import (
    SampleBoard,
    save_confusion,
    save_corruptions,
    save_evidence,
    save_mistakes,
    save_reliability,
)
from duetgan.metrics.tables import classifier_table, gan_table
from duetgan.utils.errors import UserError
from duetgan.utils.images import PADDING
from tests.metrics.conftest import CLASSES
from tests.utils.test_images import pixels, shade


def shades(*values):
    return torch.stack([shade(value) for value in values])


def test_best_keeps_the_highest_over_batches_and_the_earlier_of_equals(monkeypatch):
    monkeypatch.setattr(images, "SHOWN", 3)
    board = SampleBoard(["a", "b"])
    for batch, scores in ((shades(1, 2, 3), [0.1, 0.9, 0.5]), (shades(4, 5), [0.5, 0.7])):
        sure = torch.tensor(scores)
        board.observe(batch, torch.zeros(len(batch), dtype=torch.int64), torch.stack([sure, 1 - sure], dim=1))
    best, worst = ([int(image[0, 0, 0]) for _, image, _ in kept] for kept in board.kept.values())
    assert (best, worst) == ([2, 5, 3], [1, 3, 4])


def test_sample_board_has_a_row_for_each_class_or_none(tmp_path):
    board = SampleBoard(["a", "b"], columns=3)
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    board.observe(shades(10, 20, 30, 40), torch.tensor([0, 1, 0, 0]), probabilities)
    board.observe(shades(50), torch.tensor([0]), torch.tensor([[0.5, 0.5]]))
    assert board.save(tmp_path) == ["samples.png", "recognised_best.png", "recognised_worst.png"]
    found = pixels(tmp_path / "samples.png")[::64, -3 * 64 :: 64]
    np.testing.assert_array_equal(found, [[10, 30, 40], [20, 255, 255]])
    assert board.kept["recognised_best.png"][0][2] == "a 0.90"
    assert board.kept["recognised_worst.png"][0][2] == "a 0.30\nnamed b"
    board = SampleBoard([], columns=2)
    board.observe(shades(1, 2, 3, 4, 5), torch.zeros(5, dtype=torch.int64), None)
    assert board.save(tmp_path) == ["samples.png"]
    np.testing.assert_array_equal(pixels(tmp_path / "samples.png")[::64, ::64], [[1, 2], [3, 4]])


def answered(labels, predicted, confidence):
    """Answers with these predictions, sure of them as far as is said."""
    rest = (1 - np.asarray(confidence)) / 2
    probabilities = np.stack([rest] * 3, axis=1)
    probabilities[np.arange(len(rest)), predicted] = confidence
    return Answers(torch.from_numpy(probabilities).log(), torch.tensor(labels), CLASSES)


def test_without_a_mistake_or_maps_nothing_is_drawn(test_reader, tmp_path, monkeypatch):
    def no_maps(*_: Any) -> torch.Tensor:
        raise UserError("layer 'fc' gives no maps")

    model: Any = None
    right, wrong = (answered([0] * 5, [predicted] * 5, [0.9] * 5) for predicted in (0, 1))
    monkeypatch.setattr(images, "image_heat", no_maps)
    assert not save_mistakes(test_reader, right, tmp_path / "x.png")
    assert not any(save_evidence(model, test_reader, each, tmp_path / "x.png") for each in (right, wrong))
    assert not (tmp_path / "x.png").exists()


def test_corruptions_have_a_row_each_and_reliability_bars_below_the_diagonal(tmp_path):
    image = np.tile(np.arange(32, dtype=np.uint8) * 8, (3, 32, 1))
    save_corruptions(image, tmp_path / "x.png", seed=0)
    found = pixels(tmp_path / "x.png")
    count = len(CORRUPTIONS)
    assert found.shape[0] >= count * 96
    shades = {tuple(found[-(row + 1) * (96 + PADDING) + 10, -6 * (96 + PADDING) :].tolist()) for row in range(count)}
    assert len(shades) == count
    empty = {"n": 0, "confidence": None, "accuracy": None}
    rows = [empty] * 9 + [{"n": 50, "confidence": 0.95, "accuracy": 0.3}]
    save_reliability(rows, 0.65, tmp_path / "x.png")
    save_reliability([*rows[:9], {"n": 50, "confidence": 0.95, "accuracy": 0.95}], 0, tmp_path / "y.png")
    with Image.open(tmp_path / "x.png") as x, Image.open(tmp_path / "y.png") as y:
        blue = [(np.abs(np.asarray(each.convert("RGB"), int) - (59, 110, 165)).sum(2) < 30).sum() for each in (x, y)]
    assert 2 * blue[0] < blue[1]


@pytest.mark.parametrize("count", [2, 40])
def test_confusion_matrix_is_darkest_where_the_share_is_largest(tmp_path, count):
    confusion = (np.eye(count, dtype=int) * 100).tolist()
    save_confusion(confusion, ["$a_b"] * count, tmp_path / "x.png")
    found = pixels(tmp_path / "x.png")
    assert (found < 100).mean() > 0.1 / count
    save_confusion([[0] * count] * count, ["a"] * count, tmp_path / "empty.png")
    assert (pixels(tmp_path / "empty.png") < 100).mean() < (found < 100).mean()


HEAD = {"checkpoint": "runs/x", "step": 3, "data": "test.lmdb", "n": 20, "seed": 0}


def test_gan_table_shows_figures_floors_and_notes():
    row = {"extractor": "resnet50", "frechet": 12.3456, "kernel": 0.0123456, "floor": None, "kernel_floor": None}
    document = {**HEAD, "task": "gan", "distances": [{**row, "diversity_ratio": 0.5, "n": 20}]}
    document |= {"recognised": 0.75, "recognised_interval": [0.5, 0.875], "judge": {"accuracy": 0.9375, "n": 16}}
    document |= {"diversity_ratio": 0.5, "notes": {"floor": "nothing to compare with"}}
    document |= {"recognised_by_class": {"a": 1.0, "b": None}, "diversity_by_class": {"a": 0.5, "b": 0.625}}
    lines = gan_table(document).splitlines()
    words = [line.split() for line in lines]
    assert ["resnet50", "12.346", "-", "0.012346", "-", "0.500", "20"] in words
    assert ["b", "-", "0.6250"] in words
    assert "recognised        0.7500  (95 %: 0.5000 to 0.8750)" in lines
    assert "the judge itself  0.9375  of the real images" in lines
    assert lines[-1] == "floor: nothing to compare with"
    assert not any("memorisation" in line for line in lines)
    copies = {"extractor": "pixels", "searched": 500, "share": 0.25, "expected": 0.01, "c_t": None, "p_value": 0.0004}
    for verdict, told in ((True, "COPIES TRAINING IMAGES (p 0.0004): 25.0%"), (False, "no sign of copies (p 0.0004)")):
        text = gan_table({**document, "memorisation": {**copies, "copies": verdict}})
        assert f"memorisation  {told}" in " ".join(text.split()).replace("memorisation ", "memorisation  ")
        assert "C_T - (pixels, 500 training images searched)" in text
    unjudged = document | {"recognised": None, "recognised_interval": None, "judge": None}
    lines = gan_table(unjudged).splitlines()
    assert not any("judge" in line or line.startswith("recognised") or "95 %" in line for line in lines)


def test_classifier_table_shows_figures_by_class():
    row = {"precision": None, "recall": 0.5, "f1": 0.25, "auroc": 0.75, "average_precision": 0.625, "support": 20}
    figures = {"accuracy": 0.5, "balanced_accuracy": 0.25, "top5_accuracy": None, "auroc": 0.75, "nll": 2.5}
    figures |= {"average_precision": 0.625, "ece": 0.125}
    intervals = {f"{name}_interval": None for name in figures} | {"accuracy_interval": [0.25, 0.75]}
    temperature = {"value": 1.5, "ece_before": 0.25, "ece_after": 0.0625}
    more = {"per_class": {"a": row}, "temperature": temperature, "notes": {"n": "few images (20)"}}
    more |= {"confused": [{"true": "a", "predicted": "b", "n": 3}]}
    document = {**HEAD, "task": "classifier", **figures, **intervals, **more}
    lines = classifier_table(document).splitlines()
    assert "accuracy                     0.5000  (95 %: 0.2500 to 0.7500)" in lines
    assert "AUROC (mean of the classes)  0.7500" in lines
    assert "temperature                  1.500  (ECE 0.2500 -> 0.0625 on the other half)" in lines
    assert "most confused                a as b (3)" in lines
    assert lines[-1] == "n: few images (20)"
    assert not any("top-5" in line or "outliers" in line or "strength" in line for line in lines)
    assert any(line.split() == ["a", "-", "0.5000", "0.2500", "0.7500", "0.6250", "20"] for line in lines)
    bare = classifier_table(document | {"temperature": None, "confused": []})
    assert "temperature" not in bare
    assert "confused" not in bare
