"""What trains: freezing, gradual unfreezing, rates by stage and layer, on real steps of the classifier's task."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from duetgan.commands import train
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.training.base.config import DataConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import FineTuneConfig, FineTuning
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.optim.optimizers import parameter_groups
from duetgan.training.optim.updater import OptimizerConfig, Precision, Updater
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network():
    with forked(0, "init", "test trained"):
        return Classifier(ModelConfig(stem="small-stride2"), channels=1, classes=10, resolution=16)


def trained_of(network, **options):
    return FineTuning(network, FineTuneConfig(**options), steps_per_epoch=1.0)


def task_of(packed: Path, *, finetune: dict[str, Any], **options: Any) -> ClassifierTask:
    config = ClassifierConfig(
        data=DataConfig(path=str(packed / "train.lmdb")),
        batch_size=8,
        steps=10,
        finetune=FineTuneConfig(**finetune),
        **options,
    )
    config.model.stem = "small-stride2"
    return ClassifierTask(config, Dataset(packed / "train.lmdb"), None, CPU)


def run(task: ClassifierTask, first: int, last: int) -> None:
    """Updates `first` to `last` - 1, each on images of its own."""
    for step in range(first, last):
        batch = read_batch(task.dataset, torch.arange(8 * step, 8 * step + 8).numpy() % 200)
        task.step(iter([Batch(batch.images, batch.labels)]), step)


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], module: torch.nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    ("part", "name", "fits"),
    [
        ("stem", "network.bn1.weight", True),
        ("stem", "network.layer1.0.bn1.weight", False),
        ("layer1", "network.layer1.0.bn1.weight", True),
        ("head", "network.fc.weight", True),
        ("backbone", "network.fc.weight", False),
        ("backbone", "network.conv1.weight", True),
        ("layer?.*.bn*", "network.layer4.1.bn2.bias", True),
        ("network.fc.bias", "network.fc.bias", True),
        ("*.bias", "network.fc.weight", False),
        ("FC.*", "network.fc.weight", False),
    ],
)
def test_parts(part, name, fits, network):
    assert trained_of(network).matches(part, name) == fits


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"freeze": ["layer5"]},
            r"finetune\.freeze: 'layer5' is neither a stage nor .*\(did you mean 'layer\d'\?\); stages are stem",
        ),
        ({"unfreeze": {"head": 0, "haed": 3}}, r"finetune\.unfreeze: 'haed' .*did you mean 'head'"),
        ({"freeze_at": {"haed": 3}}, r"finetune\.freeze_at: 'haed' .*did you mean 'head'"),
        ({"stage_lr": {"fc.wieght": 0.1}}, r"finetune\.stage_lr: 'fc\.wieght' .*did you mean 'fc\.weight'"),
        ({"freeze": ["backbone", "head"]}, r"nothing trains at step 0; leave a part, such as head, out"),
        ({"unfreeze": {"head": 3}}, r"nothing trains at step 0; .* let it begin at 0"),
        ({"unfreeze": {"head": -1}}, r"^unfreeze\.head -1: must be greater than or equal to 0"),
        ({"freeze": ["backbone"], "freeze_at": {"head": 5}}, r"nothing trains at step 5"),
        ({"stage_lr": {"head": 0.0}}, r"^stage_lr\.head 0\.0: must be greater than 0"),
        ({"stage_lr": {"head": float("nan")}}, r"^stage_lr\.head nan"),
        ({"layer_decay": 1.5}, r"^layer_decay 1\.5"),
        ({"layer_decay": 0.0}, r"^layer_decay 0\.0"),
    ],
)
def test_what_is_refused(options, told, network):
    with pytest.raises(UserError, match=told):
        trained_of(network, **options)


def names_of(group):
    return [name for name, _ in group["params"]]


def test_everything_at_one_rate_is_as_it_ever_was(network):
    trained = trained_of(network)
    assert trained.groups(0.1) is None
    assert trained.describe() == []
    frozen = copy.deepcopy(network)
    frozen.network.fc.requires_grad_(False)
    FineTuning(frozen, FineTuneConfig(), steps_per_epoch=1.0).at(0)
    assert not frozen.network.fc.weight.requires_grad  # and others' settings are left alone


def test_a_stage_stops_training_though_everything_else_is_as_usual(network):
    tuning = trained_of(copy.deepcopy(network), freeze_at={"stem": 3})
    assert tuning.groups(0.1) is None
    for step, is_trained in ((2, True), (3, False)):
        tuning.at(step)
        stem = tuning.model.network.bn1
        assert (stem.weight.requires_grad, stem.training) == (is_trained, is_trained)


def test_groups_hold_what_ever_trains_once_with_decay_first(network):
    unfreeze = {"backbone": 5, "head": 0, "layer1": 0}
    trained = trained_of(network, freeze=["stem"], unfreeze=unfreeze, stage_lr={"head": 10.0})
    groups = trained.groups(0.3)
    expected = [(1.0, 0.3), (1.0, 0.0), (1.0, 0.3), (1.0, 0.0), (10.0, 0.3), (10.0, 0.0)]
    assert [(g["lr_scale"], g["weight_decay"]) for g in groups] == expected
    # who begins later is in a group of its own: schedule-free optimizers count a group's updates
    assert [{trained.begins[name] for name in names_of(g)} for g in groups] == [{0}, {0}, {5}, {5}, {0}, {0}]


@pytest.mark.parametrize("name", ["sgd", "adamw", "schedulefree-adamw"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resume_is_exact_before_at_and_after_a_beginning(packed, slim, name, stop):
    options: dict[str, Any] = {
        "finetune": {"unfreeze": {"head": 0, "layer4": 2}, "layer_decay": 0.8},
        "optimizer": OptimizerConfig(name=name, lr=0.01, weight_decay=0.1),
    }
    straight = task_of(packed, **options)
    run(straight, 0, 4)
    first, second = task_of(packed, **options), task_of(packed, **options)
    run(first, 0, stop)
    for key, part in first.registry().items():
        second.registry()[key].load_state_dict(copy.deepcopy(part.state_dict()))
    run(second, stop, 4)
    assert not changed(snapshot(straight.model), second.model)
    assert not changed(snapshot(straight.ema.model), second.ema.model)


def build(groups=None, model=None, **config):
    model = model or torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return model, Updater(model, OptimizerConfig(**config), Precision("fp32", CPU), 10, groups=groups)


def scaled(model, factors):
    return [
        {"params": [(f"{i}.{n}", p) for n, p in layer.named_parameters()], "weight_decay": 0.0, "lr_scale": factor}
        for (i, layer), factor in zip(enumerate(model), factors, strict=True)
    ]


def test_a_state_of_other_groups_is_refused_and_a_changed_factor_taken():
    model, usual = build(name="adamw")
    _, other = build(scaled(model, [0.5, 2.0]), model, name="adamw")
    _, swapped = build(scaled(model, [0.5, 2.0])[::-1], model, name="adamw")
    for one, two in ((usual, other), (other, usual), (other, swapped)):
        with pytest.raises(UserError, match=r"other groups of parameters: the finetune section was changed"):
            one.load_state_dict(two.state_dict())
    other.load_state_dict(other.state_dict())
    usual.load_state_dict(usual.state_dict())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    _, before = build(scaled(model, [0.5, 2.0]), model, name="sgd", lr=1.0)
    _, after = build(scaled(model, [0.25, 2.0]), model, name="sgd", lr=1.0)
    after.load_state_dict(before.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    after.step(0)
    assert [group["lr"] for group in after.optimizer.param_groups] == [0.25, 2.0]


def test_the_usual_groups_have_no_names():
    """Checkpoints of before fit."""
    model, updater = build(name="sgd")
    groups = updater.state_dict()["param_groups"]
    assert all("param_names" not in group and "lr_scale" not in group for group in groups)
    assert [group["params"] for group in groups] == [[0, 1], [2, 3]]
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [2, 2]


@pytest.mark.parametrize(
    ("weights", "started", "cached", "expected", "lines"),
    [
        ("IMAGENET1K_V2", {}, False, None, 1),
        ("IMAGENET1K_V2", {}, True, "IMAGENET1K_V2", 0),
        ("IMAGENET1K_V2", {"model": {"weights": None}}, True, None, 0),  # a resume goes on as the run began
        ("IMAGENET1K_V2", {"model": {"weights": "IMAGENET1K_V2"}}, False, "IMAGENET1K_V2", 0),
        ("IMAGENET1K_V2", {"model": {"name": "resnet50"}}, False, "IMAGENET1K_V2", 0),
        ("weights.pth", {}, False, "weights.pth", 0),
        (None, {}, False, None, 0),
    ],
)
def test_without_a_network_a_recipe_trains_from_scratch(
    tmp_path, monkeypatch, capsys, weights, started, cached, expected, lines
):
    """U5: said once, with the file's address and place; nothing stays frozen that was never trained."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    url = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.url
    file = tmp_path / "checkpoints" / Path(url).name
    if cached:
        file.parent.mkdir()
        file.touch()
    frozen = FineTuneConfig(freeze=["backbone"])
    config = ClassifierConfig(
        data=DataConfig(path="x.lmdb"), model=ModelConfig(name="resnet50", weights=weights), finetune=frozen
    )
    found = config.with_weights_at_hand(started)
    assert found.model.weights == expected
    assert found.finetune == (frozen if expected == weights else FineTuneConfig())
    said = capsys.readouterr().err
    assert said.count("\n") == lines
    if lines:
        assert said.startswith("warning: training from scratch, because ")
        assert f"resnet50's weights {weights}: is not at {file}" in said
        assert f"fetch {url} on a machine with a network and put it there, or give --model.weights FILE" in said


def test_weights_that_were_asked_for_are_not_left_out(packed, tmp_path, slim, refused, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    options = ["--config=finetune_resnet50", f"--data.path={packed / 'train.lmdb'}", f"--run-dir={tmp_path / 'run'}"]
    error = refused(train.main, *options, "--model.weights=IMAGENET1K_V2", "--precision=fp32", "--dry-run")
    assert "cannot be downloaded (DUET_OFFLINE is set)" in error
