"""Small packed files and untrained runs that the evaluation is tried on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image
from duetgan.data.reading.dataset import Dataset
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.checkpoint import point, save
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import forked

CLASSES = ["dark", "grey", "light"]
SIDE = 8
TINY: dict[str, Any] = {"z_dim": 8, "w_dim": 8, "mapping_layers": 1, "channel_base": 64, "channel_max": 8}


def pack(path, *, count=60, classes=CLASSES, channels=1, side=SIDE, seed=0, resize_filter="none"):
    """Images whose brightness tells their class, packed in the order of classes; returns the path."""
    draw = np.random.default_rng(seed)
    kinds = max(1, len(classes))
    writer = LMDBWriter(path, Layout.of(ImageSpec(channels, side, side)), classes=classes, resize_filter=resize_filter)
    with writer:
        for label in np.sort(np.arange(count) % kinds).tolist():
            noise = draw.integers(0, 40, (side, side, channels))
            add_image(writer, (noise + label * 200 // kinds).astype(np.uint8), label)
        writer.finish()
    return Path(path)


def make_run(
    folder, *, task, config, shape, state, classes=CLASSES, step=7, resize_filter="none", content_hash="", **more
):
    """A run folder with one checkpoint; returns the folder."""
    content = {"schema": 1, "task": task, "step": step, "config": config, "classes": classes}
    content["data"] = {"content_hash": content_hash, "count": 0, "resize_filter": resize_filter}
    path = save(folder / "checkpoints", {**content, "shape": shape, "state": state, **more})
    for which in ("last", "best"):
        point(folder / "checkpoints", which, path)
    return folder


def gan_run(
    folder,
    *,
    classes=CLASSES,
    channels=1,
    side=SIDE,
    data=None,
    loss=None,
    discriminator=None,
    seed=0,
    sizes=None,  # the discriminator's config
    **more,
):
    """A run of an untrained generator with strong noise, so that its samples differ."""
    shape = {"channels": channels, "classes": len(classes), "resolution": side}
    with forked(seed, "init", "test generator"):
        generator = Generator(GeneratorConfig(**TINY), **shape)
    config = {"generator": TINY, "data": data or {}, "loss": loss or {}}
    state = {"generator_ema": generator.state_dict()}
    if discriminator is not None:
        config["discriminator"], state["discriminator"] = sizes, discriminator.state_dict()
    return make_run(folder, task="gan", config=config, shape=shape, state=state, classes=classes, **more)


def classifier_run(folder, *, classes=CLASSES, channels=1, data=None, seed=0, resize_filter="none", **more):
    """A run of an untrained ResNet-18."""
    shape = {"channels": channels, "classes": len(classes), "resolution": SIDE}
    with forked(seed, "init", "test classifier"):
        classifier = Classifier(ModelConfig(stem="small-stride2"), **shape)
    config = {"model": {"stem": "small-stride2"}, "data": data or {}}
    state = {"model_ema": classifier.state_dict()}
    more = {"classes": classes, "resize_filter": resize_filter, **more}
    return make_run(folder, task="classifier", config=config, shape=shape, state=state, **more)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Packed training and test images: {"path", "val_path"} as in a run's config."""
    folder = tmp_path_factory.mktemp("packed")
    train, test = pack(folder / "train.lmdb", seed=1, count=90), pack(folder / "test.lmdb", seed=2)
    return {"path": str(train), "val_path": str(test)}


@pytest.fixture(scope="module", autouse=True)
def slim_classifiers(slim_resnet18):
    """No figure depends on its size."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, files):
    """Run folders {"gan", "classifier"} over `files`."""
    folder = tmp_path_factory.mktemp("runs")
    return {"gan": gan_run(folder / "gan", data=files), "classifier": classifier_run(folder / "classifier", data=files)}


@pytest.fixture
def test_reader(files):
    with Dataset(files["val_path"]) as reader:
        yield reader


@pytest.fixture
def train_reader(files):
    with Dataset(files["path"]) as reader:
        yield reader


@pytest.fixture
def no_weights(monkeypatch):
    """No ResNet-50 weights are found on this machine."""
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", ())
    monkeypatch.delenv("DUET_WEIGHTS", raising=False)


def read_json(path):
    return json.loads(Path(path).read_text(), parse_constant=lambda word: pytest.fail(f"{word} in {path}"))
