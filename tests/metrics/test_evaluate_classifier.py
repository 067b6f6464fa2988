import io

import numpy as np
import pytest
import torch
from tqdm import tqdm

from data.reading.dataset import Dataset
from metrics.evaluate_classifier import evaluate_classifier
from models.classifier import Classifier
from tests.metrics.conftest import CLASSES, SIDE, pack
from utils.errors import UserError


class ByBrightness(Classifier):
    """Names a class by the mean brightness, wrongly now and then."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.channels, self.resolution, self.classes = 1, SIDE, 3
        self.gain = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        assert not self.training
        assert not torch.is_grad_enabled()
        centres = torch.tensor([-0.95, -0.3, 0.3])
        return -(x.mean((1, 2, 3))[:, None] - centres).square() * 9 * self.gain


@pytest.mark.parametrize("batch_size", [1, 7, 64, 500])
def test_every_image_counts_once_at_any_batch_size(test_reader, batch_size):
    """And at any number of ranks: tests/distributed/test_evaluation.py."""
    found = evaluate_classifier(ByBrightness(), test_reader, batch_size=batch_size)
    assert found["n"] == sum(map(sum, found["confusion"])) == 60
    assert found == evaluate_classifier(ByBrightness(), test_reader)


def test_limit_takes_the_first_images(test_reader):
    found = evaluate_classifier(ByBrightness(), test_reader, limit=20)
    assert found["n"] == 20
    assert found["per_class"]["dark"]["support"] == 20  # packed in the order of classes


def test_mode_comes_back_and_classes_are_named(test_reader):
    model = ByBrightness().train()
    found = evaluate_classifier(model, test_reader)
    assert model.training
    assert list(found["per_class"]) == CLASSES
    assert found["top5_accuracy"] is None


def test_logits_and_progress_are_of_every_image_in_order(tmp_path, monkeypatch):
    kept: list[torch.Tensor] = []
    bars: list[tqdm] = []

    def bar(**named):
        bars.append(tqdm(**named | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr("metrics.evaluate_classifier.Bar", bar)
    model = ByBrightness().eval()
    with Dataset(pack(tmp_path / "many.lmdb", count=150)) as reader:
        evaluate_classifier(model, reader, batch_size=25, kept=kept, show=True)
        images = torch.from_numpy(reader.read(np.arange(150))[0])
    assert [len(logits) for logits in kept] == [64, 64, 22]  # whole chunks, whatever the batch size
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(kept), model(images.float() / 127.5 - 1))
    assert [(each.n, each.total) for each in bars] == [(150, 150)]


def test_data_without_its_labels_is_told(tmp_path):
    for name, classes, told in (("none", [], "no labels"), ("two", ["a", "b"], "2 classes, the classifier 3")):
        path = pack(tmp_path / f"{name}.lmdb", classes=classes)
        with Dataset(path) as reader, pytest.raises(UserError, match=told):
            evaluate_classifier(ByBrightness(), reader)


def test_no_image_is_told(test_reader):
    with pytest.raises(UserError, match="no image"):
        evaluate_classifier(ByBrightness(), test_reader, limit=0)
