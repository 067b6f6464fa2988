from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics import images
from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.images import (
    save_evidence,
    save_mistakes,
)
from duetgan.utils.errors import UserError
from tests.metrics.conftest import CLASSES
from tests.utils.test_images import shade


def shades(*values):
    return torch.stack([shade(value) for value in values])


def answered(labels, predicted, confidence):
    """Answers with these predictions, sure of them as far as is said."""
    rest = (1 - np.asarray(confidence)) / 2
    probabilities = np.stack([rest] * 3, axis=1)
    probabilities[np.arange(len(rest)), predicted] = confidence
    return Answers(torch.from_numpy(probabilities).log(), torch.tensor(labels), CLASSES)


@pytest.fixture
def charts(monkeypatch):
    """The figures that would be written, by their file's name."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(images, "save_figure", lambda figure, path: drawn.update({path.name: figure}))
    return drawn


@pytest.mark.parametrize("count", [3, 30, 31])
def test_the_confusion_is_shaded_by_the_true_class_and_has_its_counts(count, charts, tmp_path):
    """More than 30 classes have no room for words."""
    confusion = np.zeros((count, count), int)
    confusion[:3, :3] = [[5, 0, 15], [3, 3, 0], [0, 1, 0]]
    images.save_confusion(confusion.tolist(), [f"c{label}" for label in range(count)], tmp_path / "x.png")
    (axes,) = charts["x.png"].axes
    (shades,) = axes.images
    fractions = np.zeros((count, count))
    fractions[:3, :3] = [[0.25, 0, 0.75], [0.5, 0.5, 0], [0, 1, 0]]
    np.testing.assert_allclose(shades.get_array(), fractions)
    assert (shades.get_clim(), axes.get_xlabel(), axes.get_ylabel()) == ((0, 1), "predicted class", "true class")
    words = [(text.get_position(), text.get_text(), text.get_color()) for text in axes.texts]
    expected = [((0, 0), "5", "black"), ((2, 0), "15", "white"), ((0, 1), "3", "black"), ((1, 1), "3", "black")]
    expected += [((1, 2), "1", "white")]
    assert words == (expected if count < 31 else [])
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        names = [label.get_text() for label in labels]
        assert (names == [f"c{label}" for label in range(count)]) == (count < 31)
    width, height = charts["x.png"].get_size_inches()
    assert width == height == pytest.approx({3: 4.65, 30: 12, 31: 12}[count])


def test_calibration_has_a_bar_for_each_bin_with_images(charts, tmp_path):
    bins: list[Any] = [{"n": 0, "accuracy": None, "confidence": None} for _ in range(10)]
    bins[4], bins[9] = {"n": 3, "accuracy": 1 / 3, "confidence": 0.42}, {"n": 8, "accuracy": 0.75, "confidence": 0.97}
    images.save_reliability(bins, 0.1234, tmp_path / "x.png")
    upper, lower = charts["x.png"].axes
    for axes, heights in ((upper, [1 / 3, 0.75]), (lower, [3, 8])):
        bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axes.patches]
        expected = [(start, 0.1, height) for start, height in zip((0.4, 0.9), heights, strict=True)]
        assert bars == [pytest.approx(bar) for bar in expected]
    points, diagonal = (np.transpose(line.get_data()) for line in upper.lines)
    np.testing.assert_allclose(points, [[0.45, 0.42], [0.95, 0.97]])
    assert diagonal.tolist() == [[0, 0], [1, 1]]
    assert (upper.get_xlim(), upper.get_ylim(), lower.get_xlim()) == ((0, 1), (0, 1), (0, 1))
    assert (upper.get_title(), upper.get_ylabel()) == ("calibration error 0.1234", "accuracy")
    assert (lower.get_xlabel(), lower.get_ylabel()) == ("confidence", "images")
    assert {text.get_text() for text in charts["x.png"].legends[0].get_texts()} == {"accuracy", "mean confidence"}


def test_without_a_mistake_or_maps_nothing_is_drawn(test_reader, tmp_path, monkeypatch):
    def no_maps(*_: Any) -> torch.Tensor:
        raise UserError("layer 'fc' gives no maps")

    model: Any = None
    right, wrong = (answered([0] * 5, [predicted] * 5, [0.9] * 5) for predicted in (0, 1))
    monkeypatch.setattr(images, "image_heat", no_maps)
    assert not save_mistakes(test_reader, right, tmp_path / "x.png")
    assert not any(save_evidence(model, test_reader, each, tmp_path / "x.png") for each in (right, wrong))
    assert not (tmp_path / "x.png").exists()


def test_evidence_stands_in_four_columns_and_samples_have_the_range_of_the_data_set(tmp_path, monkeypatch):
    """An image and its heat map for each of two predictions in a row; the judge's pictures of floats from 0 to 4."""
    values = np.stack([np.full((1, 8, 8), value, np.float32) for value in (0, 4, 2)])
    pack_arrays(tmp_path / "x.lmdb", values, labels=[0, 1, 2], classes=CLASSES)
    drawn: dict[str, Any] = {}

    def save(shown: Any, captions: Any, path: Any, **options: Any) -> None:
        drawn[path.stem] = len(captions), options

    monkeypatch.setattr(images, "save_captioned", save)
    monkeypatch.setattr(images, "save_rows", lambda shown, path, **options: drawn.update({path.stem: options["spec"]}))
    monkeypatch.setattr(images, "draw_samples", lambda *_, seed: torch.from_numpy(values))
    monkeypatch.setattr(images, "image_heat", lambda model, shown, classes: torch.zeros(len(shown), 2, 2))
    with Dataset(tmp_path / "x.lmdb") as dataset:
        found, generator = answered([0, 1, 2], [1, 1, 2], [0.6, 0.9, 0.9]), SimpleNamespace(classes=3)
        probabilities = found.probabilities
        images.save_samples(generator, dataset, torch.arange(3), probabilities, tmp_path, seed=0)  # type: ignore[arg-type]
        assert save_evidence(None, dataset, found, tmp_path / "evidence.png")  # type: ignore[arg-type]
        judged = {f"recognised_{name}": (3, {"spec": dataset.spec}) for name in ("best", "worst")}
        assert drawn == judged | {"evidence": (6, {"columns": 4}), "samples": dataset.spec, "real": dataset.spec}


def test_mistakes_are_drawn_with_the_range_of_the_data_set(tmp_path):
    """Floats from 0 to 4; the surest of two mistakes comes first."""
    pixels_of = np.stack([np.full((1, 8, 8), value, np.float32) for value in (0, 4, 2)])
    pack_arrays(tmp_path / "x.lmdb", pixels_of, labels=[0, 1, 1], classes=CLASSES)
    with Dataset(tmp_path / "x.lmdb") as dataset:
        drawn: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(images, "save_captioned", lambda *arguments, **options: drawn.append((arguments, options)))
            assert save_mistakes(dataset, answered([0, 1, 1], [1, 0, 1], [0.6, 0.9, 0.9]), tmp_path / "x.png")
        ((shown, captions, path), options) = drawn[0]
    assert [float(image.mean()) for image in shown] == [4, 0]
    assert (len(captions), path, options) == (2, tmp_path / "x.png", {"spec": dataset.spec})
