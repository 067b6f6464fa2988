"""A teacher's answers as targets: it is not changed, resume is exact, what a pupil may judge, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.restore import classifier_from
from duetgan.training.base.data import open_training
from duetgan.training.classifier.loss import Targets
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.checkpoint.provenance import Lineage, recorded
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.oracle.test_classifier import CPU
from tests.training.classifier.test_frozen import TREE, train

pytestmark = pytest.mark.usefixtures("slim")


@pytest.fixture(scope="module")
def files(tmp_path_factory, slim_module):
    """24 images each of two sets, and the run of a teacher of the first."""
    folder = tmp_path_factory.mktemp("distillation")
    for seed, (name, classes) in enumerate({"first": "abc", "data": "abc", "other": "abd", "swapped": "acb"}.items()):
        images = np.random.default_rng(seed).integers(0, 256, (24, 1, 16, 16), dtype=np.uint8)
        pack_arrays(folder / f"{name}.lmdb", images, labels=np.arange(24) % 3, classes=[*classes])
    train(config_of(folder, "first", teacher=None), folder / "teacher", max_steps=1)
    return folder


def config_of(folder, data="data", **loss: Any) -> Any:
    tree = TREE | {"data": {"path": str(folder / f"{data}.lmdb")}, "steps": 6, "batch_size": 8}
    tree |= {"loss": {"teacher": str(folder / "teacher"), **loss}}
    return build_run_config(tree, [], "test")


def test_the_teacher_stays_as_it_was(files, tmp_path):
    task, _ = train(config_of(files), tmp_path / "run")
    assert task.describe()["taught by"] == str(files / "teacher")
    teacher = classifier_from(load(resolve(str(files / "teacher"))))
    assert fingerprint(task.criterion.teacher.network) == fingerprint(teacher)
    images = torch.rand(2, 1, 8, 8) * 2 - 1  # it sees them as it has been trained: grey, at 16 px
    own = torch.nn.functional.interpolate(images, size=(16, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(task.criterion.teacher(images.expand(2, 3, 8, 8)), teacher(own))


def test_a_pupil_has_seen_what_its_teacher_has_and_judges_nothing_that_this_taught(files, tmp_path):
    task, _ = train(config_of(files), tmp_path / "run", max_steps=1)
    pupil, taught = (
        recorded(load(resolve(str(tmp_path / "run")))),
        Lineage.of(teachers=[fingerprint(task.criterion.teacher.network)]),
    )
    with Dataset(files / "first.lmdb") as first, Dataset(files / "data.lmdb") as own:
        assert {first.meta.content_hash, own.meta.content_hash} <= set(pupil.trained_on)
        assert pupil.may_not_judge(Lineage.of(), "own", {first.meta.content_hash}) == "was trained on the test images"
    assert "supplied a loss" in pupil.may_not_judge(taught, "own", set())
    assert pupil.may_not_judge(Lineage.of(teachers=["another"]), "own", set()) == ""


def test_a_head_begins_with_the_rows_of_the_same_classes(files):
    config = config_of(files, "other", teacher=None)
    config = config.changed(model=config.model.changed(weights=str(files / "teacher")))
    own = ClassifierTask(config, open_training(config.data), None, CPU).model.head
    donor = classifier_from(load(resolve(str(files / "teacher")))).head
    assert [torch.equal(*rows) for rows in zip(own.weight, donor.weight, strict=True)] == [True, True, False]


def test_a_teacher_answers_in_the_runs_precision_and_weights_keep_their_own_lineage(files):
    config = config_of(files).changed(precision="bf16")
    task, precise = ClassifierTask(config, open_training(config.data), None, CPU), []
    lineages = [Lineage.of(trained_on=["own"]), task.lineage()]
    task.model.lineage = lineages[0]
    assert set(task.lineage().trained_on) == {"own", *lineages[1].trained_on}
    assert task.lineage().teachers == lineages[1].teachers

    def teacher(images: torch.Tensor) -> torch.Tensor:
        precise.append(torch.is_autocast_enabled("cpu"))
        return torch.zeros(len(images), 3)

    task.criterion.teacher = teacher  # type: ignore[assignment]
    task.criterion(torch.zeros(2, 3), Targets(torch.tensor([0, 1])), torch.zeros(2, 1, 16, 16))
    assert precise == [True]


@pytest.mark.parametrize(
    ("data", "loss", "text"),
    [
        ("other", {}, "loss.teacher .*: its classes differ from those of .*other.lmdb; train it on the same classes"),
        ("swapped", {}, "loss.teacher .*: its classes differ from those of .*swapped.lmdb"),
        ("data", {"kind": "bce", "teacher": None, "logit_adjustment": 1.0}, "loss.logit_adjustment is for one class"),
        ("data", {"teacher": "nowhere"}, "nowhere"),
    ],
)
def test_what_is_refused(files, data, loss, text):
    def start() -> None:
        config = config_of(files, data, **loss)
        ClassifierTask(config, open_training(config.data), None, CPU)

    assert_raises(UserError, text, start)
