"""The classifier's task equals the reference: every key of loss, ema, finetune and the optimizer away from neutral."""

from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.training.base.data import make_loader, open_training
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import TASKS, build_run_config
from tests.distributed.test_oracle import untrained_classifier
from tests.oracle.classifier import ClassifierReference
from tests.oracle.ranks import assert_close, of_two_ranks, whole

CPU, STEPS = torch.device("cpu"), 4
State = dict[str, torch.Tensor]
SGD = {
    **{"name": "sgd", "lr": 0.05, "lr_batch_size": 16, "momentum": 0.7, "weight_decay": 0.02, "clip_norm": 0.5},
    **{"warmup_steps": 1, "schedule": "cosine", "hold": 0.1, "final_lr": 0.2},
}
ADAMW = {
    **{"name": "adamw", "lr": 0.01, "betas": [0.8, 0.95], "beta2_final": 0.9, "eps": 1e-3, "weight_decay": 0.1},
    **{"clip_adaptive": 0.02, "schedule": "step", "step_every": 2, "gamma": 0.3},
    "warmup_steps": 0,
}
CYCLE = {
    **{"name": "adam", "lr": 0.02, "betas": [0.9, 0.99], "eps": 1e-3, "clip_value": 0.05, "weight_decay": 0.01},
    **{"schedule": "one-cycle", "pct_start": 0.25, "cycle_start": 0.2, "final_lr": 0.1, "cycle_momentum": [0.9, 0.4]},
    "warmup_steps": 2,
}
COMMON: dict[str, Any] = {
    **{"task": "classifier", "batch_size": 8, "steps": 12, "seed": 5, "model": {"stem": "small-stride2"}},
    **{"ema": {"decay": 0.15}, "optimizer": SGD, "loss": {"label_smoothing": 0.2, "class_weights": {"b": 3.0}}},
}
UNFREEZE = {
    **{"freeze": ["layer1.*bn1.weight"], "unfreeze": {"head": 0, "backbone": 2, "layer4": 1}, "freeze_at": {"head": 3}},
    **{"stage_lr": {"backbone": 0.3, "layer4": 0.5}, "layer_decay": 0.7},
}
STOP = {"freeze_at": {"head": 1}}
CONVNEXT = {"name": "convnext_tiny", "input_size": 32}  # of more than one block a stage
UNLABELLED = {"path": "synthetic.lmdb"}
TREES: dict[str, dict[str, Any]] = {
    "plain": COMMON,
    "fine-tuning": COMMON | {"finetune": UNFREEZE, "optimizer": ADAMW},
    "epochs": COMMON
    | {"finetune": {"unfreeze": {"head": 0, "backbone": 1}, "unfreeze_by": "epoch", "layer_decay": 0.5} | STOP}
    | {"optimizer": CYCLE, "batch_size": 24, "loss": {"class_weights": "balanced"}},  # 2.08 updates an epoch
    "lengths": COMMON | {"optimizer": SGD | {"warmup_steps": "0.25ep"}, "steps": "1.9ep"},  # 1.56 and 11.9 updates
    "milestones": COMMON | {"optimizer": ADAMW | {"step_every": None, "milestones": ["0.2ep", "0.45ep"]}},
    "every": COMMON | {"optimizer": ADAMW | {"step_every": "0.25ep"}},
    "defaults": {key: COMMON[key] for key in ("task", "batch_size", "steps", "seed", "model")},
    "still": COMMON | {"finetune": {"freeze": ["stem"], "freeze_bn": True}, "optimizer": CYCLE},
    "blocks": COMMON | {"model": CONVNEXT, "finetune": {"layer_decay": 0.6, "layer_decay_by": "block"}},
    "stages": COMMON | {"model": CONVNEXT, "finetune": {"layer_decay": 0.6, "layer_decay_by": "stage"}},
    "squared-error": COMMON
    | {"loss": {"kind": "squared-error", "label_smoothing": 0.1, "class_weights": {"a": 2.0}}, "optimizer": ADAMW},
    "mixed": COMMON
    | {"augment": {"mixup": 0.7, "cutmix": 1.0}}
    | {"data": {"synthetic": {"path": "synthetic.lmdb", "share": 0.4, "weight": 0.3}}},
    "unlabelled": COMMON
    | {"augment": {"flip": True, "shift": 2, "shift_edge": "reflect"}, "finetune": {"probe": True}}
    | {"unlabelled": UNLABELLED | {"ratio": 3, "spread": 0.3, "weight": 0.7, "threshold": 0.9}},
    "sure": COMMON | {"unlabelled": UNLABELLED | {"ratio": 1, "threshold": 0.34, "adaptive": False}},
    "taught": COMMON
    | {
        "loss": COMMON["loss"]
        | {"teacher": "teacher", "teacher_share": 0.7, "temperature": 3.0, "logit_adjustment": 0.6}
    }
    | {"augment": {"mixup": 0.7}, "data": {"synthetic": {"path": "synthetic.lmdb", "share": 0.4, "weight": 0.3}}},
    "focal": COMMON
    | {"loss": COMMON["loss"] | {"kind": "focal", "focal_gamma": 1.5, "label_smoothing_final": 0.0}}
    | {"augment": {"mixup": 0.7}},
    "gce": COMMON
    | {"loss": {"kind": "generalised-cross-entropy", "gce_q": 0.4, "label_smoothing_final": 0.3}}
    | {"augment": {"cutmix": 0.7}},
    "weighed": COMMON | {"data": {"synthetic": {"path": "synthetic.lmdb", "share": 0.4, "weight": 0.3}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, slim_module):
    """50 random grey images of 16 px in three classes of different sizes, and 27 others."""
    path, rng = tmp_path_factory.mktemp("oracle"), np.random.default_rng(0)
    for name, count in (("data", 50), ("synthetic", 27)):
        images = rng.integers(0, 256, (count, 1, 16, 16), dtype=np.uint8)
        labels = np.array([0, 0, 1, 2, 0, 1, 0] * 8)[:count]
        pack_arrays(path / f"{name}.lmdb", images, labels=labels, classes=["a", "b", "c"])
    untrained_classifier(path / "teacher")
    torch.set_default_dtype(torch.float64)
    yield path
    torch.set_default_dtype(torch.float32)


def made(folder: Any, tree: dict[str, Any]) -> tuple[ClassifierTask, Any, dict[str, Any]]:
    """The task, its loader, and the tree with its files."""
    data = dict(tree.get("data", {})) | {"path": str(folder / "data.lmdb")}
    if "synthetic" in data:
        data["synthetic"] = data["synthetic"] | {"path": str(folder / "synthetic.lmdb")}
    tree = tree | {"data": data}
    if "unlabelled" in tree:
        tree = tree | {"unlabelled": tree["unlabelled"] | {"path": str(folder / "synthetic.lmdb")}}
    if tree.get("loss", {}).get("teacher"):
        tree = tree | {"loss": tree["loss"] | {"teacher": str(folder / "teacher")}}
    config: Any = build_run_config(tree, [], "test")
    task = TASKS["classifier"].task(config, open_training(config.data), None, CPU)
    if task.unlabelled is not None and config.unlabelled.spread:
        task.unlabelled.propagated_labels = torch.rand(27, 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    return task, make_loader(config, task.dataset, CPU), tree


def state(task: ClassifierTask) -> State:
    """A copy of what a step changes: weights, statistics, and the averages of both."""
    networks = {"model": task.model, "average": task.ema.model}
    return {f"{n}.{key}": value.clone() for n, part in networks.items() for key, value in part.state_dict().items()}


def trained(folder: Any, tree: dict[str, Any]) -> list[State]:
    """The task's state before its first step and after each."""
    task, loader, _ = made(folder, tree)
    states = [state(task)]
    for step in range(STEPS):
        metrics = task.step(loader, step)
        states.append(state(task) | whole(metrics))
    return states


def assert_equal(folder: Any, tree: dict[str, Any], states: list[State]) -> None:
    """The states are the reference's, to 1e-10; and something trains."""
    task, batches, tree = made(folder, tree)
    reference = ClassifierReference(task, tree)
    for step in range(STEPS):
        reference.step(next(batches), step)
        assert_close(states[step + 1], reference.state(), f"step {step}")
    assert any(not torch.equal(reference.state()[name], value) for name, value in states[0].items())


@pytest.mark.parametrize("name", TREES)
def test_a_step_is_plain_arithmetic(folder, name):
    assert_equal(folder, TREES[name], trained(folder, TREES[name]))


@pytest.mark.parametrize("name", ["still", "blocks"])  # where no statistics are a micro-batch's own
def test_micro_batches_are_the_whole_batch(folder, name):
    assert_equal(folder, TREES[name], trained(folder, TREES[name] | {"micro_batch": 4}))


def test_two_ranks_are_one(folder):
    found = of_two_ranks(folder, "tests.oracle.test_classifier", list(TREES))
    for name, states in found.items():
        assert_equal(folder, TREES[name], states)


def test_what_is_evaluated(folder, monkeypatch):
    """The average, on the held-out images."""
    task, loader, _ = made(folder, TREES["plain"] | {"evaluation": {"batch_size": 7}})
    task.val_dataset = held_out = open_training(task.config.data)
    task.step(loader, 0)
    asked: list[Any] = []

    def evaluate(*arguments: Any, **how: Any) -> dict[str, Any]:
        asked.extend([*arguments, how])
        return {"accuracy": 0.5, "ece": 0.1}

    monkeypatch.setattr("duetgan.training.classifier.task.evaluate_classifier", evaluate)
    assert task.evaluate() == {"accuracy": 0.5, "ece": 0.1}
    assert asked[0] is task.ema.model
    assert asked[1] is held_out
    assert asked[2] == {"batch_size": 7, "details": False}
