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


def test_without_a_mistake_or_maps_nothing_is_drawn(test_reader, tmp_path, monkeypatch):
    def no_maps(*_: Any) -> torch.Tensor:
        raise UserError("layer 'fc' gives no maps")

    model: Any = None
    right, wrong = (answered([0] * 5, [predicted] * 5, [0.9] * 5) for predicted in (0, 1))
    monkeypatch.setattr(images, "image_heat", no_maps)
    assert not save_mistakes(test_reader, right, tmp_path / "x.png")
    assert not any(save_evidence(model, test_reader, each, tmp_path / "x.png") for each in (right, wrong))
    assert not (tmp_path / "x.png").exists()


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
