"""What is frozen is computed once: features of every image, and training behind what is cached."""

from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.augment.transforms import to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.training.classifier import frozen
from duetgan.utils.seeding import forked
from tests.models.helpers import draw

pytestmark = pytest.mark.usefixtures("slim")


def network(name: str = "resnet18", side: int = 32, **config: Any) -> Classifier:
    with forked(0, "init", "test frozen"):
        return Classifier(ModelConfig(name=name, **config), channels=1, classes=10, resolution=side)


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "efficientnet_b0", "airbench", "timm:test_resnet"])
def test_a_network_cut_after_any_stage_is_the_whole_one(name):
    model, images = network(name).eval(), draw(4, 1, 32, 32).float()
    expected = model(images)
    last = len(model.stages) - 1
    for end in range(1, last + 1) if model.backbone.in_turn else [last]:
        model.begin = 0
        between = model.features(images, end)
        assert between.ndim == (2 if end == last else 4)
        model.begin = end
        assert torch.equal(model(between), expected)


def test_features_of_every_image_and_its_mirror(packed, monkeypatch):
    dataset, model = Dataset(packed / "train.lmdb"), network(side=24, stem="small-stride2")  # images of 16 px
    monkeypatch.setattr(frozen, "PIXELS", 24 * 24 * 48)  # four blocks of 48 and one of 8
    features, labels = frozen.image_features(model, dataset)
    assert model.training
    images = to_float(torch.from_numpy(dataset.read(np.arange(200))[0]))
    large = torch.nn.functional.interpolate(images, size=(24, 24), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = torch.stack([model.eval().features(x) for x in (large, large.flip(3))], 1)
    assert labels.tolist() == dataset.labels().tolist()
    assert torch.allclose(features, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(features[:, 0], features[:, 1], rtol=1e-2)
    again, _ = frozen.image_features(model, dataset)
    alone, _ = frozen.image_features(model, dataset, mirror=False)
    assert torch.equal(again, features)
    assert torch.equal(alone, features[:, :1])
