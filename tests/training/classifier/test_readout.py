"""A readout of all stages: what it takes, scikit-learn's regression on it, and a run that every command takes."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from duetgan.commands import evaluate, export, predict
from duetgan.data.augment.transforms import to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.metrics.grad_cam import image_heat
from duetgan.metrics.samples.spreading import spread_to
from duetgan.models.classifier import Classifier, ModelConfig, read_out
from duetgan.models.fast import fold_batchnorm
from duetgan.models.restore import classifier_from
from duetgan.training.classifier.frozen import image_features
from duetgan.training.classifier.probe import fit, look_alike_groups, scale_of
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.images import save_png
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises, sample_images
from tests.models.test_discriminator_backbone import SIZES, classifier
from tests.training.classifier.test_frozen import TREE, train

pytestmark = pytest.mark.usefixtures("slim")


def network(name: str, side: int = 32, **config: Any) -> Any:
    if name in SIZES:
        return classifier(name, side=16, head="readout", **config)
    with forked(0, "init", "test readout"):
        model = ModelConfig(name=name, head="readout", **config)
        return Classifier(model, channels=1, classes=3, resolution=side)


def largest(maps: torch.Tensor, most: int = 4) -> torch.Tensor:
    """Of each map of [N, C, h, w], of each of up to `most` x `most` equal parts, the largest value: slowly."""
    rows, columns = (next(n for n in (4, 2, 1) if n <= most and side % n == 0) for side in maps.shape[2:])
    strips = [strip.chunk(columns, 3) for strip in maps.chunk(rows, 2)]
    return torch.stack([part.amax((2, 3)) for strip in strips for part in strip], 2).flatten(1)


@pytest.mark.parametrize("read", [{}, {"readout_stages": 2, "readout_parts": 1}, {"readout_stages": 9}])
@pytest.mark.parametrize("name", ["resnet18", "airbench", "r3gan"])
def test_it_takes_the_largest_values_of_the_maps_of_the_last_stages(name, read):
    model = network(name, **read).eval()
    images, maps = torch.rand(3, *model.spec.shape) * 2 - 1, []
    for end in range(1, len(model.stages) - 1):
        maps.append(model.features(images, end))
    last = model.network.get_submodule(model.backbone.stages[model.stages[-2]][-1].removesuffix(".*"))
    last.register_forward_hook(lambda *call: maps.append(call[-1]))
    found = model.features(images)
    parts = [largest(each, read.get("readout_parts", 4)) for each in maps[-read.get("readout_stages", 9) :]]
    torch.testing.assert_close(found, torch.cat(parts, 1))
    assert found.shape[1] == model.feature_dim == model.head.in_features
    assert model.head.bias is not None
    torch.testing.assert_close(fold_batchnorm(model)(images), model(images), rtol=1e-4, atol=1e-5)
    assert model.training is False
    assert network(name, **read).training


def test_parts_of_maps_that_four_does_not_divide():
    for side, parts in ((28, 4), (14, 2), (7, 1), (2, 2), (1, 1)):
        maps = torch.randn(2, 3, side, 8)
        assert torch.equal(read_out(maps, 4), largest(maps))
        assert read_out(maps, 4).shape == (2, 3 * parts * 4)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Five images a class of the sample, and others without labels; at 16 px."""
    folder = tmp_path_factory.mktemp("few")
    for name, split, count in (("few", "train", 5), ("all", "train", 20), ("test", "test", 10)):
        images, labels, names = sample_images(split, count)
        pack_arrays(folder / f"{name}.lmdb", images, labels, names, source=name)
    return folder


def config_of(few: Any, **more: Any) -> Any:
    data = {"path": str(few / "few.lmdb"), "val_path": str(few / "test.lmdb")}
    tree = TREE | {"data": data, "batch_size": 10, "model": {"stem": "small-stride2", "head": "readout"}}
    return build_run_config(tree | more, [], "x")


@pytest.mark.slow
def test_a_run_of_it_is_evaluated_predicts_explains_and_is_exported(few, tmp_path, capsys):
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


def run_cli_of(script: Any, *arguments: Any, run: Any) -> int:
    return run_cli(script.main, ["--checkpoint", str(run), *map(str, arguments), "--device", "cpu"])


def model_label(model: Any, images: torch.Tensor, few: Any) -> str:
    with Dataset(few / "test.lmdb") as reader:
        return reader.classes[int(model(to_float(images)).argmax())]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model": {"head": "readout", "split": "auto"}}, "head readout takes the maps of stages"),
        ({"model": {"head": "readout", "name": "timm:test_resnet", "stem": None}}, "head readout takes the maps"),
        ({"unlabelled": {"path": "all.lmdb", "spread": 0.5}}, "set finetune.probe true"),
        ({"resizing": {"initial_scale": 0.5}}, "model.head readout has as many inputs as its maps have parts"),
    ],
)
def test_what_it_is_refused_for(few, more, text):
    assert_raises(UserError, text, config_of, few, **more)
