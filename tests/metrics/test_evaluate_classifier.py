import io

import pytest
import torch
from tqdm import tqdm

from data.dataset import Dataset
from metrics.evaluate_classifier import evaluate_classifier
from models.classifier import Classifier
from tests.metrics.conftest import CLASSES, SIDE, Ranks, pack
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


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_every_image_counts_once_at_any_number_of_ranks(test_reader, world_size):
    model = ByBrightness()
    whole = evaluate_classifier(model, test_reader, batch_size=16)
    assert whole["n"] == 60
    assert sum(map(sum, whole["confusion"])) == 60
    ranks = Ranks()
    share = {"batch_size": 4, "world_size": world_size}
    for rank in range(world_size):
        evaluate_classifier(model, test_reader, rank=rank, reduce=ranks.keep, **share)
    assert evaluate_classifier(model, test_reader, reduce=ranks.total, **share) == whole


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


def test_observer_and_progress_see_every_image(test_reader, monkeypatch):
    seen, bars = [], []

    def bar(**named):
        bars.append(tqdm(**named | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr("metrics.evaluate_classifier.Bar", bar)
    evaluate_classifier(
        ByBrightness(),
        test_reader,
        batch_size=25,
        observe=lambda images, labels, probabilities: seen.append((images.shape, labels.shape, probabilities.shape)),
        show=True,
    )
    assert [shapes[2] for shapes in seen] == [(25, 3), (25, 3), (10, 3)]
    assert [(each.n, each.total) for each in bars] == [(60, 60)]


def test_data_without_its_labels_is_told(tmp_path):
    for name, classes, told in (("none", [], "no labels"), ("two", ["a", "b"], "2 classes, the classifier 3")):
        path = pack(tmp_path / f"{name}.lmdb", classes=classes)
        with Dataset(path) as reader, pytest.raises(UserError, match=told):
            evaluate_classifier(ByBrightness(), reader)


def test_no_image_is_told(test_reader):
    with pytest.raises(UserError, match="no image"):
        evaluate_classifier(ByBrightness(), test_reader, limit=0)
