"""Training a classifier over several devices: what is told and refused, the update, the same bits, going on."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duetgan.commands import train
from duetgan.extras.model_parallel import placement as split
from duetgan.models.hooks import LayerStatistics
from duetgan.models.restore import classifier_from
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import OptimizerConfig, Precision, Updater
from duetgan.utils.checkpoint import load
from duetgan.utils.distributed import collectives, gradients
from duetgan.utils.distributed.collectives import Snapshot
from duetgan.utils.distributed.launch import launch
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config
from tests.extras.model_parallel.test_placement import build, cut_at_layer3
from tests.extras.model_parallel.test_placement import faked as fake_tensors

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]  # faked: their tensors have no values
# faked tensors cannot run these; it is enough to have seen where their arguments lie
UNKNOWN = (
    torch.ops.aten._fused_sgd_.default,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
    torch.ops.aten._amp_update_scale_.default,
)
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of more than one device, as a GPU's fast ones do; faked tensors bear some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {str(x.device) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if len(devices) > 1 and func not in COPIES:
            raise RuntimeError(f"{func} on {' and '.join(sorted(devices))}")
        if func in UNKNOWN:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def faked() -> Iterator[None]:
    with fake_tensors(), OneDevice():
        yield


@pytest.mark.parametrize(
    ("options", "frozen"),  # frozen: the first gradient is not on the first device
    [
        ({"name": "adam"}, False),
        ({"name": "adamw", "clip_norm": 1.0, "weight_decay": 0.1}, True),
        ({"name": "sgd", "clip_adaptive": 0.01}, False),
        ({"name": "adam", "scaled": True}, False),
        ({"name": "schedulefree-adamw", "scaled": True, "weight_decay": 0.1}, False),
    ],
)
def test_an_update_is_made_on_each_device(options, frozen, slim, monkeypatch):
    model = build(16, split="auto")
    cut_at_layer3(monkeypatch, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "layer3" not in name and "fc" not in name))
    with faked():
        split.place(model, GPUS, samples=4)
        mixed = Precision("fp32", GPUS[0])
        if options.get("scaled"):
            mixed.scaler = torch.amp.GradScaler("cpu")  # one for GPUs is off here; its scale lies where it is used
        options = {key: value for key, value in options.items() if key != "scaled"}
        updater = Updater(model, OptimizerConfig(**options), mixed, 10, head=model.network.fc.parameters())
        average = EMA(model, buffers="average")
        assert {str(p.device) for p in updater.parameters} == {"cuda:1"} | ({"cuda:0"} if not frozen else set())
        for step in range(2):
            for parameter in updater.parameters:
                parameter.grad = torch.empty_like(parameter)
            before = Snapshot(model.buffers())
            mixed.scale()
            update = updater.step(step)
            before.restore(update.applied)
            mixed.update_scale()
            average.update(model, 0.9, update.skipped, updater.average(model.parameters()))
            assert [figure.device for figure in update] == [GPUS[0]] * 4
        for parameter in updater.parameters:
            for key, value in updater.optimizer.state[parameter].items():
                assert value.device == parameter.device, key
        for ours, theirs in zip(average.model.state_dict().values(), model.state_dict().values(), strict=True):
            assert ours.device == theirs.device


def test_what_does_not_go_with_it_is_refused():
    tree = {"task": "classifier", "data": {"path": "x.lmdb"}, "compile": "on"}
    build_run_config(tree | {"model": {"split": "off"}}, [], "recipe")
    with pytest.raises(UserError, match="compile on cannot be combined with"):
        build_run_config(tree | {"model": {"split": "auto"}}, [], "recipe")


def test_gradients_are_added_up_in_buckets_of_one_device(monkeypatch):
    sent: list[tuple[str, int]] = []

    class Work:
        def wait(self) -> None: ...

    def all_reduce(flat: Tensor, async_op: bool) -> Work:
        assert async_op
        sent.append((str(flat.device), flat.numel()))
        return Work()

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 100)
    with faked():
        parameters = [
            torch.empty(size, device=GPUS[device]).requires_grad_()
            for size, device in [(30, 0), (60, 1), (20, 0), (50, 1), (40, 0), (60, 0), (7, 1), (5, 0)]
        ]
        for parameter in parameters[1:]:  # the first has none: it is sent as zeros
            parameter.grad = torch.empty_like(parameter)
        gradients.GradientExchange(parameters, missing="zeros", compress="off").finish()
        assert parameters[0].grad.device == GPUS[0]
    assert sent == [("cuda:0", 105), ("cuda:1", 117), ("cuda:0", 50)]


def test_layers_on_both_devices_are_watched(monkeypatch):
    model = build(16, split="auto")
    cut_at_layer3(monkeypatch, model)
    watched = {name: model.get_submodule(f"network.{name}") for name in ("layer1.0.bn2", "layer3.0.bn2")}
    statistics = LayerStatistics(watched)
    cpus = [torch.device("cpu", 1), torch.device("cpu", 2)]  # devices to faked tensors
    with faked():
        split.place(model, cpus, samples=4)
        with statistics.watching(torch.ones(1, device=cpus[0])):
            model(torch.empty(4, 3, 16, 16, device=cpus[0])).sum().backward()
        assert (statistics.packed().device, statistics.packed().shape) == (cpus[0], (2, 2, 6))


@pytest.mark.parametrize(
    ("visible", "processes", "rank", "expected"),
    [(4, 2, 0, [0, 1]), (4, 2, 1, [2, 3]), (5, 2, 1, [2, 3]), (4, 1, 0, [0, 1, 2, 3]), (2, 2, 1, [1])],
)
def test_each_process_has_as_many_devices(monkeypatch, visible, processes, rank, expected):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", str(rank + processes))  # of the second of two machines
    monkeypatch.setenv("WORLD_SIZE", str(2 * processes))
    device = collectives.choose_device(None, several=True)
    assert [d.index for d in collectives.own_devices(device)] == expected
    assert device.index == expected[0]
    assert collectives.choose_device("cuda").index == rank  # a network on one device takes its process's number
    if processes == 1:
        assert [d.index for d in collectives.own_devices(torch.device("cuda", 3))] == [3]
    assert collectives.own_devices(CPU) == [CPU]


@pytest.fixture
def two_cpus(monkeypatch, slim):
    """The CPU counts as two devices, and the networks are slim."""
    monkeypatch.setattr(collectives, "own_devices", lambda device: [device, device])


def test_a_split_run_is_the_whole_one_to_the_bit_and_goes_on(packed, tmp_path, two_cpus, capsys):
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    one, two = ((recipe, tmp_path / name, "--steps", "3", "--max-steps") for name in ("one", "two"))
    assert train_in_process(*one, "3") == 0
    assert train_in_process(*two, "1", "--model.split", "auto") == 0
    assert "  split  " in capsys.readouterr().err
    assert train_in_process(*two, "2", "--model.split", "auto") == 0
    assert "cpu: stem to " in capsys.readouterr().err
    whole = classifier_from(load(tmp_path / "two" / "checkpoints" / "step-00000002.pt"))
    assert whole.config.split == "auto"
    assert not whole._forward_hooks  # who uses the network has it on one device
    assert train_in_process(*two, "3") == 0
    assert "  split  " not in capsys.readouterr().err
    assert differing(state_of(tmp_path / "one", 3), state_of(tmp_path / "two", 3)) == []


def test_one_device_is_not_enough(packed, tmp_path, refused):
    run = ["--config", write_config(tmp_path / "recipe.yaml", "classifier", packed), "--run-dir", tmp_path / "run"]
    line = refused(train.main, *run, "--device", "cpu", "--model.split", "auto")
    assert line.startswith("error: model.split auto: needs two devices or more, but this process ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_with_two_devices_each(packed, tmp_path):
    recipe = str(write_config(tmp_path / "recipe.yaml", "classifier", packed))
    for module, setting in (("train", "off"), (__name__, "auto")):
        arguments = ["--config", recipe, "--run-dir", str(tmp_path / module), "--device", "cpu", "--max-steps", "2"]
        assert launch(["-m", module, *arguments, "--model.split", setting], 2, resumes=True) == 0
    assert differing(state_of(tmp_path / "train", 2), state_of(tmp_path / __name__, 2)) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="fewer than two accelerators")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_accelerators_train_what_one_does(packed, tmp_path, precision):
    recipe, states = write_config(tmp_path / "recipe.yaml", "classifier", packed), {}
    for name, setting in (("one", "off"), ("two", "auto")):
        more = ["--model.split", setting, "--compile", "off", "--precision", precision]
        assert train_in_process(recipe, tmp_path / name, *more) == 0
        states[name] = state_of(tmp_path / name, 8)
    for network in ("model", "model_ema"):
        for key, value in states["two"][network].items():
            difference = (value.double() - states["one"][network][key].double()).norm()
            assert difference <= 0.02 * value.double().norm() + 1e-6, f"{network} {key}"
    assert math.isfinite(states["two"]["loop"]["best"]["accuracy"])
    at_first = torch.load(tmp_path / "two" / "checkpoints" / "step-00000008.pt", weights_only=True, map_location="cpu")
    assert all(value.device.type == "cpu" for value in at_first["state"]["model"].values())


if __name__ == "__main__":  # one of several processes, to which the CPU is two devices
    setattr(collectives, "own_devices", lambda device: [device, device])  # noqa: B010
    sys.exit(run_cli(train.main))
