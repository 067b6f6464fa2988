"""Whole runs of both tasks on real and synthetic images: resume to the bit, what reaches the loss."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.training.base import data
from duetgan.training.base.generated import GeneratedSamples
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.preflight import plan_rows
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.task import GanTask
from duetgan.utils.checkpoint import load
from duetgan.utils.errors import UserError
from tests.conftest import sample_images
from tests.metrics.conftest import gan_run
from tests.training.classifier.test_frozen import train

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "steps": 6,
    "evaluation": {"every": 100, "n": 20},
    "checkpoint": {"every": 100},
    "log": {"every": 4, "tensorboard": False, "samples_every": 0},
}
TREES: dict[str, dict[str, Any]] = {
    "classifier": COMMON
    | {
        "task": "classifier",
        "batch_size": 48,  # five of them are more than an epoch of 200
        "model": {"stem": "small-stride2"},
        "augment": {"flip": True, "mixup": 0.4},
        "optimizer": {"lr": 0.02, "warmup_steps": 2},
    },
    "gan": COMMON
    | {
        "task": "gan",
        "batch_size": 48,
        "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
        "discriminator": {"channel_base": 64, "channel_max": 8},
    },
}
MIXTURE = {"share": 0.3, "until": 0.7}  # a share of 14.4 images; 4.2 steps: the fifth is the last that is mixed


def config_of(packed: Path, task: str = "classifier", more: Any = None, **synthetic: Any) -> Any:
    """The held-out images serve as synthetic ones."""
    settings = {"path": str(packed / "test.lmdb")} | MIXTURE | synthetic
    section: dict[str, Any] = {"path": str(packed / "train.lmdb"), "crop": "random", "synthetic": settings}
    return build_run_config(TREES[task] | {"data": section} | (more or {}), [], "x")


def test_a_run_cannot_go_on_with_another_mixture(packed, tmp_path):
    train(config_of(packed), tmp_path / "run", max_steps=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    alone = build_run_config(TREES["classifier"] | {"data": {"path": str(packed / "train.lmdb")}}, [], "x")
    with pytest.raises(UserError, match=r"trained with data\.synthetic"):
        train(alone, tmp_path / "run")
    images, labels, classes = sample_images("test", 5)
    pack_arrays(tmp_path / "other.lmdb", images, labels=labels, classes=classes)
    with pytest.raises(UserError, match=r"data\.synthetic has other images now"):
        train(config_of(packed, path=str(tmp_path / "other.lmdb")), tmp_path / "copy")


def test_the_plan_names_the_mixture(packed):
    config = config_of(packed)
    training = data.open_training(config.data)
    rows = plan_rows(config, ClassifierTask(config, training, None, CPU), training, None, CPU, "fp32")
    real = "no passport: they count as real"
    assert rows["synthetic data"] == f"100 images, 16 px, grey, 10 classes, raw, {real}; 0.3 of each batch"


def test_checkpoints_record_who_drew_the_images(packed, tmp_path):
    images, labels, classes = sample_images("test", 5)
    run = gan_run(tmp_path / "generator", classes=classes, side=16)
    passport = GeneratedSamples(str(run), 10, None).passport(4)
    pack_arrays(tmp_path / "drawn.lmdb", images, labels=labels, classes=classes, passport=passport)
    file, fresh = {"path": str(tmp_path / "drawn.lmdb")}, {"path": None, "checkpoint": str(run)}
    for settings in (file, fresh):
        config = config_of(packed, more={"seed": 4}, **settings)
        training = data.open_training(config.data)
        found = data.lineage(config, training).document()
        assert found["synthetic"] == [passport]
        assert training.meta.content_hash in found["trained_on"]
        assert (training.synthetic.meta.content_hash in found["trained_on"]) == (settings is file)
    folder = tmp_path / "run"
    train(config, folder, max_steps=1)
    assert load(folder / "checkpoints" / "step-00000001.pt")["lineage"] == found


@pytest.mark.parametrize(("task", "same_images"), [("classifier", None), ("gan", True), ("gan", False)])
def test_the_mixture_ends_at_a_step_however_many_batches_a_step_takes(packed, task, same_images):
    more = {} if same_images is None else {"loss": {"objective": "relativistic", "same_pairs": same_images}}
    config = config_of(packed, task, more, until=3)
    loader = data.make_loader(config, data.open_training(config.data), CPU)
    batches = 2 if same_images is False else 1
    mixed = [bool(next(loader).synthetic.any()) for _ in range(5 * batches)]
    assert mixed == [True] * 3 * batches + [False] * 2 * batches


def test_samples_have_labels_as_often_as_d_sees_them(tmp_path):
    for name, labels in (("train", [0, 0, 0, 0, 1, 2]), ("test", [1, 1, 2])):
        images = np.zeros((len(labels), 1, 16, 16), np.uint8)
        pack_arrays(tmp_path / f"{name}.lmdb", images, labels, ["a", "b", "c"])
    config = config_of(tmp_path, "gan", share=0.25)
    task = GanTask(config, data.open_training(config.data), None, CPU)
    expected = [0.75 * 4 / 6, 0.75 / 6 + 0.25 * 2 / 3, 0.75 / 6 + 0.25 / 3]
    assert task.context.draws.class_weights.tolist() == pytest.approx(expected)


def test_the_weight_counts_no_more_when_the_mixture_has_ended(packed):
    """`until` is a step: from there on a batch is of real images alone, and its loss a plain mean."""
    losses = []
    for weight in (1.0, 0.5, 0.25):
        config = config_of(packed, weight=weight, until=0.001)
        training = data.open_training(config.data)
        task, loader = ClassifierTask(config, training, None, CPU), data.make_loader(config, training, CPU)
        next(loader)
        losses.append(float(task.step(loader, 1)["loss/classifier"]))
    assert losses[1] == losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # without a weight the mean is computed another way
