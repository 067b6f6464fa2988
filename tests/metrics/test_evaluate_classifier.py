import io

import numpy as np
import pytest
import torch
from tqdm import tqdm

from duetgan.commands import evaluate
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.evaluate_classifier import (
    answers_of,
    classify,
    evaluate_classifier,
)
from duetgan.metrics.figures import CLASSIFIER, history
from duetgan.models.classifier import Classifier
from duetgan.utils.errors import UserError
from tests.data.conftest import sample_images
from tests.metrics.conftest import CLASSES, SIDE, pack
from tests.metrics.test_scripts import evaluated

FIRST = np.arange(20)


class ByBrightness(Classifier):
    """Names a class by the mean brightness, wrongly now and then."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.channels, self.resolution, self.classes, self.thresholds = 1, SIDE, 3, None
        self.gain = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        assert not self.training
        assert not torch.is_grad_enabled()
        centres = torch.tensor([-0.95, -0.3, 0.3])
        return -(x.mean((1, 2, 3))[:, None] - centres).square() * 9 * self.gain


def test_every_image_counts_once_at_any_batch_size(test_reader):
    """And at any number of ranks: tests/distributed/test_evaluation.py. Records are taken as asked."""
    logits = classify(ByBrightness(), test_reader)
    assert len(logits) == 60
    for batch_size in (1, 7, 64, 500):
        assert torch.equal(logits, classify(ByBrightness(), test_reader, batch_size=batch_size))
    answers = answers_of(ByBrightness(), test_reader, classify(ByBrightness(), test_reader, records=FIRST), FIRST)
    assert answers.labels.tolist() == [0] * 20  # packed in the order of classes
    assert answers.names == CLASSES


def test_mode_comes_back_and_training_pays_for_what_it_follows(test_reader):
    model = ByBrightness().train()
    document = evaluate_classifier(model, test_reader, batch_size=256, details=True)
    assert model.training
    assert document["top5_accuracy"] is None
    few = evaluate_classifier(model, test_reader, batch_size=256, details=False)
    followed = [row.key for row in CLASSIFIER if row.in_training]
    assert few == {key: document[key] for name in followed for key in (name, f"{name}_interval")}
    assert history(CLASSIFIER, few).keys() == {"accuracy", "nll", "ece"}


def test_progress_is_of_every_image(tmp_path, monkeypatch):
    bars: list[tqdm] = []

    def bar(**named):
        bars.append(tqdm(**named | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr("duetgan.metrics.features.extractors.Bar", bar)
    with Dataset(pack(tmp_path / "many.lmdb", count=150)) as reader:
        classify(ByBrightness().eval(), reader, batch_size=25, progress="images")
    assert [(each.n, each.total) for each in bars] == [(150, 150)]


def test_data_without_its_labels_no_image_and_outputs_that_are_not_finite_are_told(test_reader, tmp_path):
    for name, classes, told in (("none", [], "no labels"), ("two", ["a", "b"], "2 classes, the classifier 3")):
        path = pack(tmp_path / f"{name}.lmdb", classes=classes)
        with Dataset(path) as reader, pytest.raises(UserError, match=told):
            evaluate_classifier(ByBrightness(), reader, batch_size=256, details=True)
    model = ByBrightness()
    with pytest.raises(UserError, match="no image"):
        answers_of(model, test_reader, classify(model, test_reader, records=FIRST[:0]), FIRST[:0])
    model.gain.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        evaluate_classifier(model, test_reader, batch_size=256, details=True)


def test_classes_in_another_order_or_without_images_are_put_into_the_models(runs, tmp_path, refused):
    images, found = sample_images(9, 1, side=SIDE), {}
    for name, rows, labels, classes in (
        ("whole", range(9), [0, 1, 2] * 3, CLASSES),
        ("turned", range(9), [2, 1, 0] * 3, CLASSES[::-1]),
        ("part", [0, 2], [1, 0], [CLASSES[2], CLASSES[0]]),
    ):
        pack_arrays(tmp_path / f"{name}.lmdb", images[rows], labels, classes)
        found[name] = evaluated(runs["classifier"], tmp_path / name, "--data", tmp_path / f"{name}.lmdb")
    assert found["turned"]["confusion"] == found["whole"]["confusion"]
    assert [row["support"] for row in found["part"]["per_class"].values()] == [1, 0, 1]
    pack_arrays(tmp_path / "strange.lmdb", images, [0, 1, 2] * 3, ["a", *CLASSES[:2]])
    told = refused(evaluate.main, "--checkpoint", runs["classifier"], "--data", tmp_path / "strange.lmdb")
    assert "a only here" in told or "a missing here" in told
