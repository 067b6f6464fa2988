"""The classifier's step with its settings on: resume to the bit, and what reaches what."""

import re
import sys
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import numpy as np
import pytest
import torch

from duetgan.data.augment.transforms import draw_and_apply, draw_mixing
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.models.classifier import Classifier
from duetgan.training.base import graphs
from duetgan.training.base.data import make_loader
from duetgan.training.classifier import replica
from duetgan.training.classifier.network import PLACEMENTS
from duetgan.training.classifier.probe import ProbeSummary
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.seeding import forked
from tests.conftest import REPOSITORY, assert_raises
from tests.end_to_end.helpers import differing
from tests.training.classifier.test_frozen import train

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")
TREE: dict[str, Any] = {
    "task": "classifier",
    "steps": 5,
    "batch_size": 48,  # five of them are more than an epoch of 200
    "model": {"stem": "small-stride2"},
    "augment": {"flip": True, "shift": 1, "erase": 0.2, "trivial_augment": True, "mixup": 0.4, "cutmix": 1.0},
    "loss": {"class_weights": "balanced"},
    "evaluation": {"every": 3},
    "checkpoint": {"every": 100},  # they are large: besides the evaluations only where a run ends
    "log": {"every": 4, "tensorboard": False, "samples_every": 0},
}
FREE: dict[str, Any] = {
    "optimizer": {"name": "schedulefree-adamw", "lr": 0.01, "schedule": "constant", "clip_value": 0.1},
    "resizing": {"initial_scale": 0.5},
    "micro_batch": "auto",
    "precision": "bf16",
    "loss": {"kind": "squared-error"},
}


def config_of(packed: Path, *overrides: str, **more: Any) -> Any:
    data = {"path": str(packed / "train.lmdb"), "val_path": str(packed / "test.lmdb")}
    return build_run_config(TREE | {"data": data} | more, list(overrides), "x")


def test_a_run_that_had_a_number_and_no_probe_can_go_on_with_auto_and_one(packed, tmp_path):
    train(config_of(packed), tmp_path / "run", max_steps=1)
    config = config_of(packed, micro_batch="auto", finetune={"probe": True})
    _, state = train(config, tmp_path / "run", max_steps=2)
    assert state["micro_batch"] == {"size": 48}
    assert state["probe"] == ProbeSummary().state_dict()


def task_of(packed: Path, *overrides: str, **more: Any) -> Any:
    return ClassifierTask(config_of(packed, *overrides, **more), Dataset(packed / "train.lmdb"), None, CPU)


def test_early_stopping_needs_validation_images(packed):
    message = "early_stopping.patience needs validation images; give data.val_path"
    assert_raises(UserError, message, task_of, packed, early_stopping={"patience": 1})


def test_an_epoch_of_unfreezing_is_one_of_the_global_batch(packed, monkeypatch):
    """A process of two computes half of each batch of 24. An epoch has 8 1/3; 15 have 125, to floats a bit more."""
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 2)
    finetune = {"unfreeze": {"head": 0, "layer3": 1, "layer4": 15}, "freeze_at": {"head": 2, "layer3": 15}}
    tuning = task_of(packed, "--batch_size", "24", finetune=finetune | {"unfreeze_by": "epoch"}).finetuning
    for stage, expected in (("fc", (0, 17)), ("layer3", (9, 125)), ("layer4", (125, None)), ("layer2", (None, None))):
        names = [name for name in tuning.parameters if name.startswith(f"network.{stage}.")]
        assert {(tuning.begins[name], tuning.ends[name]) for name in names} == {expected}


def test_the_evaluated_network_of_a_schedule_free_training_is_x(packed):
    task = task_of(packed, **FREE)
    loader = make_loader(task.config, task.dataset, CPU)
    for step in range(3):
        assert {value.dtype for value in task.step(loader, step).values()} == {torch.float32}
    x = task.updater.average(task.model.parameters())
    for found, expected, y in zip(task.ema.model.parameters(), x, task.model.parameters(), strict=True):
        assert torch.equal(found, expected)
        assert not torch.equal(found, y)
    ours, theirs = task.ema.state_dict(), task.model.state_dict()
    name = "network.bn1.running_mean"
    assert not torch.equal(ours[name], theirs[name])  # these are averaged as ever


@pytest.mark.parametrize("seed", [3, 4])
def test_the_first_weights_are_those_of_the_seed_and_lie_in_memory_as_the_images(packed, seed):
    task = task_of(packed, seed=seed, channels_last=seed == 4, augment={})
    with forked(seed, "init", "classifier"):
        expected = Classifier(task.config.model, channels=1, classes=10, resolution=16)
    assert differing(task.model.state_dict(), expected.state_dict()) == []
    weight = task.model.network.layer1[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == task.config.channels_last
    orders: list[bool] = []

    def to_float(images: torch.Tensor, channels_last: bool = False) -> torch.Tensor:
        orders.append(channels_last)
        return images.float()

    batch = read_batch(task.dataset, np.arange(48))
    for deep in (False, True):
        task.inputs.spec = SimpleNamespace(deep=deep, to_float=to_float)
        list(task.inputs.micro_batches(task.samples(batch, 0)))
    assert orders == [task.config.channels_last] * 2


@pytest.mark.parametrize(
    ("images", "batch_size", "mixup", "shown"), [(200, 48, 0.4, 48), (200, 80, 0.0, 64), (21, 48, 0.4, 20)]
)
def test_the_first_images_of_a_batch_are_shown_in_whole_pairs(packed, tmp_path, images, batch_size, mixup, shown):
    config = config_of(packed, batch_size=batch_size, augment={"mixup": mixup, "mix_prob": 1e-12})
    with Dataset(packed / "train.lmdb") as dataset:
        first, labels = dataset.read(range(images))
        labels[:10] = range(10)
        pack_arrays(tmp_path / "first.lmdb", first, labels, dataset.classes)
    with Dataset(tmp_path / "first.lmdb") as dataset:
        task = ClassifierTask(config, dataset, None, CPU)
        expected = grid(torch.from_numpy(first[:shown]), spec=dataset.spec)
        np.testing.assert_array_equal(task.sample_grid(0), expected)
    assert task.sample_grid(1) is None
    ((network, (image,)),) = task.networks().values()
    assert network is task.ema.model
    assert image.shape == (1, 1, 16, 16)


def test_images_of_16_bits_are_scaled_before_they_are_augmented(tmp_path, packed):
    images = np.random.default_rng(0).integers(0, 4096, (12, 1, 16, 16), np.uint16)
    pack_arrays(tmp_path / "deep.lmdb", images, np.arange(12) % 3, [*"abc"])
    config = config_of(packed, batch_size=12, augment={"shift": 1})
    with Dataset(tmp_path / "deep.lmdb") as dataset:
        task = ClassifierTask(config, dataset, None, CPU)
        samples = task.samples(read_batch(dataset, np.arange(12)), 0)
    scaled = torch.from_numpy(images / 4095 * 2 - 1).float()
    expected = draw_and_apply(scaled, config.augment, seed=0, step=0, start=0, global_batch=12)
    torch.testing.assert_close(samples.images, expected)


@pytest.mark.parametrize("compress", ["off", "bf16"])
def test_ranks_send_what_the_config_says(packed, monkeypatch, compress):
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 2)
    monkeypatch.setattr(replica, "DistributedDataParallel", ddp := MagicMock())
    task = task_of(packed, sync_bn="off", distributed={"compress": compress})
    task.set_up(0)
    hooks = [call(None, replica.bf16_compress_hook)] if compress == "bf16" else []
    assert ddp.return_value.register_comm_hook.call_args_list == hooks
    assert ddp.call_args.kwargs == {"gradient_as_bucket_view": True, "init_sync": True}
    assert ddp.return_value.broadcast_buffers is False  # statistics of rank 0 would replace those of the others
    averaged: list[Any] = []
    monkeypatch.setattr("duetgan.utils.distributed.collectives.average_", averaged.extend)
    task.replica.average_statistics()
    statistics = [value for key, value in task.model.named_buffers() if "running" in key]
    assert list(map(id, averaged)) == list(map(id, statistics))
    # steps that are captured send without DDP
    ddp.reset_mock()
    monkeypatch.setattr(replica, "GradientExchange", exchange := MagicMock())
    monkeypatch.setitem(graphs.DEVICES, "cpu", lambda _: None)
    task = task_of(packed, distributed={"compress": compress})
    task.set_up(0)
    parameters, how = exchange.call_args
    assert list(map(id, *parameters)) == list(map(id, task.model.parameters()))
    assert (how, ddp.called) == ({"missing": "zeros", "compress": compress}, False)


def test_steps_of_other_kernels_have_other_graphs(packed, monkeypatch):
    monkeypatch.setitem(graphs.DEVICES, "cpu", lambda _: None)
    monkeypatch.setitem(PLACEMENTS, "split", lambda *_: None)
    task = task_of(packed, log=TREE["log"] | {"tensorboard": True, "layers": ["conv1"], "layers_every": 3})
    assert [task.kind(step) for step in range(6)] == ["update", "update", None] * 2
    assert task.graphs.describe(["update"]).startswith("CUDA graph")
    split = task_of(packed, model=TREE["model"] | {"split": "auto"})
    assert split.graphs.describe(["update"]) == "eager, because model.split uses several devices"
    off = task_of(packed, graphs="off")
    assert off.graphs.describe(["update"]) == "eager, because graphs is off"
    monkeypatch.setattr(replica, "Compiled", compiled := MagicMock())
    for other, setting in ((split, "off"), (off, "auto")):
        other.set_up(0)
        assert compiled.call_args.kwargs["setting"] == setting
    task.set_up(0)
    structures = [task.structure(0)]
    assert task.structure(1) == structures[0]
    for change in (
        lambda: setattr(task.model, "side", 8),
        lambda: setattr(task.inputs.micro, "size", 24),
        lambda: setattr(task.frozen, "begin", 1),
        task.model.network.bn1.eval,
        lambda: task.model.network.conv1.requires_grad_(False),
        lambda: task.precision.switch("fp16"),
        task.updater.reset,
    ):
        change()
        structures.append(task.structure(0))
    assert len(set(structures)) == len(structures) == 8


def test_images_that_are_no_squares_are_cut_in_their_own_size(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (12, 1, 24, 16), np.uint8)
    pack_arrays(tmp_path / "tall.lmdb", images, np.arange(12) % 3, [*"abc"])
    tree = TREE | {"data": {"path": str(tmp_path / "tall.lmdb")}, "batch_size": 12, "augment": {"cutmix": 1.0}}
    config: Any = build_run_config(tree, ["--seed", "3"], "x")
    with Dataset(tmp_path / "tall.lmdb") as dataset:
        task = ClassifierTask(config, dataset, None, CPU)
        mixing: Any = task.samples(read_batch(dataset, np.arange(12)), 2).mixing
    expected = draw_mixing(
        config.augment, seed=3, step=2, start=0, count=12, global_batch=12, size=(24, 16), device=CPU
    )
    torch.testing.assert_close(tuple(mixing), tuple(expected))


def test_balances_do_not_add_up_and_the_first_images_are_shown_mixed(packed):
    task = task_of(packed, data={"path": str(packed / "train.lmdb"), "class_rates": {"Sandal": 4.0}})
    place = list(task.dataset.classes).index("Sandal")
    weights: Any = task.criterion.weights
    assert (weights[place] * 4 / weights[place - 1]).item() == pytest.approx(1.0)
    mixed, plain = (task_of(packed, augment=augment).sample_grid(0) for augment in ({"mixup": 8.0}, {}))
    assert mixed.shape == plain.shape
    assert (mixed != plain).mean() > 0.2


def test_the_step_is_that_of_the_documentation(packed):
    text = (REPOSITORY / "docs/architecture.md").read_text().partition("The classifier's step")[2]
    lines = re.findall(r"^( *)([A-Z]\w+\.\w+)", text.split("```")[1], re.MULTILINE)
    expected = []
    for is_repeated, group in groupby(lines, key=lambda line: bool(line[0])):
        expected += [name for _, name in group] * (2 if is_repeated else 1)
    task, calls = task_of(packed, micro_batch=24), []
    loader = make_loader(task.config, task.dataset, CPU)

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_qualname in expected:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        task.step(loader, 0)
    finally:
        sys.setprofile(None)
    assert calls == expected


@pytest.mark.parametrize("more", [{}, {"finetune": {"freeze": ["stem", "layer2"]}}, {"model": {"head": "hidden"}}])
def test_weights_that_are_cast_together_give_the_bits_of_autocast(packed, more):
    task = task_of(packed, "--batch_size", "4", precision="bf16", **more)
    task.set_up(0)
    images = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    results = []
    for network in (task.replica, task.model):
        task.updater.zero_grad()
        with task.precision.autocast():
            logits = network(images)
        logits.float().square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in task.model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for together, alone in zip(*results, strict=True):
        assert together.dtype == alone.dtype
        assert torch.equal(together, alone)
    assert not any(vars(module).keys() & module._parameters.keys() for module in task.model.modules())  # all are back
    assert any(module._forward_pre_hooks for module in task.model.modules())  # of widen_narrow_maps


def test_batches_are_counted_once_a_pass_unless_the_update_is_masked(packed):
    task = task_of(packed, "--batch_size", "4", micro_batch=2, augment={})
    counter = task.model.network.bn1.num_batches_tracked
    loader = make_loader(task.config, task.dataset, CPU)
    with patch.object(torch, "_foreach_add_", wraps=torch._foreach_add_) as added:
        metrics = task.step(loader, 0)
    assert not any(value.requires_grad for value in metrics.values())  # no graph is held
    counted = [call.args for call in added.call_args_list if any(part is counter for part in call.args[0])]
    assert [number.dtype for _, number in counted] == [torch.int64]  # of another dtype it would be slow on CUDA
    assert (counter, task.ema.model.network.bn1.num_batches_tracked) == (2, 2)
    before = deepcopy([task.model.state_dict(), task.ema.state_dict(), task.updater.state_dict()["state"]])
    with patch.object(task.criterion, "smoothing", torch.tensor(float("nan"))):
        assert task.step(loader, 1)["skipped_updates/classifier"] == 1
    after = [task.model.state_dict(), task.ema.state_dict(), task.updater.state_dict()["state"]]
    assert differing(before, after) == []
    assert counter == 2
    task.model(torch.zeros(2, 1, 32, 32))  # outside of a step the layer counts
    assert counter == 3
