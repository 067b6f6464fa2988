"""Training on unlabelled images: a run that every command takes, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from duetgan.commands import evaluate, export, predict
from duetgan.data.augment.transforms import to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.few_labels.spreading import spread_to
from duetgan.metrics.grad_cam import image_heat
from duetgan.models.restore import classifier_from
from duetgan.training.classifier.frozen import image_features
from duetgan.training.classifier.probe import fit, look_alike_groups, scale_of
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.images import save_png
from tests.conftest import assert_raises
from tests.training.classifier.test_frozen import train
from tests.training.classifier.test_readout import config_of, few  # noqa: F401

pytestmark = pytest.mark.usefixtures("slim")


@pytest.mark.slow
def test_a_run_of_it_is_evaluated_predicts_explains_and_is_exported(few, tmp_path, capsys):  # noqa: F811
    runtime: Any = pytest.importorskip("onnxruntime")
    still = {"finetune": {"freeze": ["backbone"], "probe": True}, "steps": 1, "optimizer": {"name": "sgd", "lr": 1e-12}}
    unlabelled = {"unlabelled": {"path": str(few / "all.lmdb"), "weight": 0, "spread": 0.5}}
    run = tmp_path / "run"
    task, _ = train(config_of(few, **still, **unlabelled), run)
    with Dataset(few / "test.lmdb") as reader:
        images, labels = (torch.from_numpy(part) for part in reader.read(np.arange(len(reader))))
    with Dataset(few / "few.lmdb") as reader, Dataset(few / "all.lmdb") as every:
        found, like = image_features(task.model, reader, mirror=False), image_features(task.model, every, mirror=False)
        expected = fit(*found, 10, groups=look_alike_groups(reader), scale=scale_of(like[0][:, 0]))
        logits = task.model.head(found[0][:, 0]).detach()
    torch.testing.assert_close(logits, F.linear(found[0][:, 0], expected.weight, expected.bias), rtol=1e-3, atol=1e-3)
    said = spread_to(like[0][:, 0], found[0][:, 0], found[1], 10)
    torch.testing.assert_close(task.unlabelled.propagated_labels, said.float(), rtol=1e-3, atol=1e-4)
    assert task.lineage().trained_on
    model = classifier_from(load(resolve(str(run))))
    right = (model(to_float(images)).argmax(1) == labels).double().mean().item()
    assert right > 0.4
    assert run_cli_of(evaluate, "--data", few / "test.lmdb", run=run) == 0
    assert json.loads((run / "eval/metrics.json").read_text())["accuracy"] == pytest.approx(right)
    save_png(images[0].numpy().transpose(1, 2, 0), tmp_path / "x.png")
    capsys.readouterr()
    assert run_cli_of(predict, tmp_path / "x.png", "--json", run=run) == 0
    assert json.loads(capsys.readouterr().out)[0]["label"] == model_label(model, images[:1], few)
    heat = image_heat(model, images[:4], labels[:4])
    assert heat.amax().item() == 1
    file = str(tmp_path / "x.onnx")
    assert run_cli(export.main, ["--checkpoint", str(run), "--format", "onnx", "--out", file]) == 0
    (logits,) = runtime.InferenceSession(file).run(None, {"images": to_float(images).contiguous().numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(to_float(images)), rtol=1e-3, atol=1e-3)


def test_unlabelled_images_give_the_scale_and_get_labels_that_spread(few, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ClassifierTask, "begin", lambda task: None)  # fits the probe
    with Dataset(few / "few.lmdb") as reader, Dataset(few / "all.lmdb") as every:
        task = task_of(few, reader, spread=0.5)
        task.begin()
        (own, labels), (like, _) = (image_features(task.model, images, mirror=False) for images in (reader, every))
        torch.testing.assert_close(task.feature_scale(), scale_of(like[:, 0]))
    said = spread_to(like[:, 0], own[:, 0], labels, 10)
    torch.testing.assert_close(task.unlabelled.propagated_labels, said.float(), rtol=1e-3, atol=1e-4)


def task_of(few: Any, dataset: Dataset, **unlabelled: Any) -> Any:  # noqa: F811
    frozen = {"finetune": {"freeze": ["backbone"], "probe": True}, "steps": 90}
    config = config_of(few, **frozen, unlabelled={"path": str(few / "all.lmdb")} | unlabelled)
    return TASKS["classifier"].task(config, dataset, None, torch.device("cpu"))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_unlabelled_images_count_as_seen_and_steps_with_them_read_no_kept_features(few, weight):  # noqa: F811
    with Dataset(few / "few.lmdb") as labelled, Dataset(few / "all.lmdb") as unlabelled:
        task = task_of(few, labelled, weight=weight)
        assert unlabelled.meta.content_hash in task.lineage().trained_on
    assert bool(task.frozen.spans) is not bool(weight)


def test_thresholds_are_those_of_the_global_batch(few, monkeypatch):  # noqa: F811
    """Of two ranks with two images each."""
    probabilities = torch.rand(4, 10, generator=torch.Generator().manual_seed(0)).mul(5).softmax(1)
    confidences = probabilities.amax(1)
    with Dataset(few / "few.lmdb") as labelled:
        whole, rank = (task_of(few, labelled).stream for _ in range(2))
    expected = whole._thresholds(probabilities, confidences)
    other = torch.cat([probabilities[2:].mean(0), confidences[2:].mean()[None]])
    monkeypatch.setattr(collectives, "average_", lambda tensors: [tensor.lerp_(other, 0.5) for tensor in tensors])
    torch.testing.assert_close(rank._thresholds(probabilities[:2], confidences[:2]), expected)
    torch.testing.assert_close(rank.means, whole.means)


def run_cli_of(script: Any, *arguments: Any, run: Any) -> int:
    return run_cli(script.main, ["--checkpoint", str(run), *map(str, arguments), "--device", "cpu"])


def model_label(model: Any, images: torch.Tensor, folder: Any) -> str:
    with Dataset(folder / "test.lmdb") as reader:
        return reader.classes[int(model(to_float(images)).argmax())]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"unlabelled": {"path": "all.lmdb", "spread": 0.5}}, "set finetune.probe true"),
        ({"unlabelled": {"path": "all.lmdb"}, "augment": {"mixup": 0.2}}, "leave out augment.mixup"),
        ({"unlabelled": {"path": "all.lmdb"}, "loss": {"kind": "focal"}}, "learn by cross-entropy of one label"),
    ],
)
def test_what_it_is_refused_for(few, more, text):  # noqa: F811
    assert_raises(UserError, text, config_of, few, **more)
