import numpy as np
import pytest
import torch
from PIL import Image

from metrics.evaluate_run import classifier_table, gan_table
from metrics.images import Best, MistakeBoard, SampleBoard, save_confusion


def shades(*values, side=8):
    return torch.tensor(values, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, side, side)


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


def test_best_keeps_the_highest_over_batches_and_the_earlier_of_equals():
    best = Best(3)
    best.add(shades(1, 2, 3), torch.tensor([0.1, 0.9, 0.5]), ["a", "b", "c"])
    best.add(shades(4, 5), torch.tensor([0.5, 0.7]), ["d", "e"])
    assert best.captions == ["b", "e", "c"]
    assert [int(image[0, 0, 0]) for image in best.images] == [2, 5, 3]


def test_sample_board_has_a_row_for_each_class(tmp_path):
    board = SampleBoard(["a", "b"], columns=3)
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    board.observe(shades(10, 20, 30, 40), torch.tensor([0, 1, 0, 0]), probabilities)
    board.observe(shades(50), torch.tensor([0]), torch.tensor([[0.5, 0.5]]))
    assert board.save(tmp_path) == ["samples.png", "recognised_best.png", "recognised_worst.png"]
    found = pixels(tmp_path / "samples.png")[::64, -3 * 64 :: 64]
    np.testing.assert_array_equal(found, [[10, 30, 40], [20, 255, 255]])
    assert board.best.captions[0] == "a 0.90"
    assert board.worst.captions[0] == "a 0.30\nnamed b"


def test_sample_board_without_classes_or_judge(tmp_path):
    board = SampleBoard([], columns=2)
    board.observe(shades(1, 2, 3, 4, 5), torch.zeros(5, dtype=torch.int64), None)
    assert board.save(tmp_path) == ["samples.png"]
    np.testing.assert_array_equal(pixels(tmp_path / "samples.png")[::64, ::64], [[1, 2], [3, 4]])


def test_mistakes_are_the_confident_wrong_ones_with_their_place(tmp_path):
    board = MistakeBoard(["a", "b"], size=2)
    board.observe(shades(1, 2), torch.tensor([0, 1]), torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
    assert board.mistakes.captions == ["1: b\nnamed a 0.80"]
    board.observe(shades(3, 4), torch.tensor([0, 0]), torch.tensor([[0.05, 0.95], [0.4, 0.6]]))
    assert board.mistakes.captions == ["2: a\nnamed b 0.95", "1: b\nnamed a 0.80"]
    assert board.save(tmp_path) == ["mistakes.png"]
    assert MistakeBoard(["a", "b"]).save(tmp_path) == []


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
    document = {
        **HEAD,
        "task": "gan",
        "distances": [{**row, "diversity_ratio": 0.5, "n": 20}],
        "recognised": 0.75,
        "recognised_interval": [0.5, 0.875],
        "judge": {"accuracy": 0.9375, "n": 16},
        "recognised_by_class": {"a": 1.0, "b": None},
        "diversity_ratio": 0.5,
        "diversity_by_class": {"a": 0.5, "b": 0.625},
        "diversity_extractor": "resnet50",
        "notes": {"floor": "nothing to compare with"},
    }
    lines = gan_table(document).splitlines()
    assert "resnet50    12.346      -  0.012346      -      0.500  20" in lines
    assert "recognised        0.7500  (95 %: 0.5000 to 0.8750)" in lines
    assert "the judge itself  0.9375  of the real images" in lines
    assert any(line.split() == ["b", "-", "0.6250"] for line in lines)
    assert lines[-1] == "floor: nothing to compare with"
    assert not any("memorisation" in line for line in lines)
    copies = {"extractor": "pixels", "searched": 500, "share": 0.25, "expected": 0.01, "c_t": None, "p_value": 0.0004}
    for verdict, told in (
        (True, "COPIES TRAINING IMAGES (p 0.0004): 25.0%"),
        (False, "no sign of copies (p 0.0004)"),
    ):
        text = gan_table({**document, "memorisation": {**copies, "copies": verdict}})
        assert f"memorisation      {told}" in text
        assert "C_T - (pixels, 500 training images searched)" in text
    unjudged = document | {"recognised": None, "recognised_interval": None, "judge": None}
    lines = gan_table(unjudged).splitlines()
    assert "recognised       -" in lines
    assert not any("judge" in line or "95 %" in line for line in lines)


def test_classifier_table_shows_figures_by_class():
    rows = {"a": {"precision": None, "recall": 0.5, "f1": 0.25, "support": 20}}
    figures = {"accuracy": 0.5, "top5_accuracy": None, "ece": 0.125, "per_class": rows}
    more = {"accuracy_interval": [0.25, 0.75], "notes": {"n": "few images (20)"}}
    lines = classifier_table({**HEAD, "task": "classifier", **figures, **more}).splitlines()
    assert "accuracy                 0.5000  (95 %: 0.2500 to 0.7500)" in lines
    assert lines[-1] == "n: few images (20)"
    assert not any("top-5" in line for line in lines)
    assert any(line.split() == ["a", "-", "0.5000", "0.2500", "20"] for line in lines)
