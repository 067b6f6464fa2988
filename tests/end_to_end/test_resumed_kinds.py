"""Every kind of run resumes and rolls back to the same bits: a row each; another kind without a row fails."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.models.registry import ARCHITECTURES
from duetgan.models.restore import generator_from
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.lr_find import Sweep, search
from duetgan.training.engine.run import prepare
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.gan.losses import OBJECTIVES
from duetgan.training.gan.task import GanTask
from duetgan.training.optim.config import DECAYS
from duetgan.utils.checkpoint import forget_after, load, pointer
from duetgan.utils.config.build import to_tree
from duetgan.utils.config.model import hints, keys_of, section_of
from duetgan.utils.runlog.run_folder import RunFolder
from tests.conftest import sample_images
from tests.end_to_end.helpers import differing, rows
from tests.metrics.conftest import gan_run

STEPS, RESUMED = 6, 3
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"every": RESUMED, "keep": 9},
    "evaluation": {"every": 2, "n": 20},  # so that the best figure and the patience are of before and after
    "early_stopping": {"patience": 9},
    "log": {"every": 2, "tensorboard": False, "samples_every": 0},
}
GAN: dict[str, Any] = COMMON | {
    **{"task": "gan", "batch_size": 8, "watch": {"warmup_kimg": 0, "memorised": [1, 1], "patience": 1}},
    "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
    "discriminator": {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 2},
}
R3 = {"width": 8, "cardinality": 2, "blocks": 1}
CLASSIFIER: dict[str, Any] = COMMON | {
    **{"task": "classifier", "batch_size": 48, "model": {"stem": "small-stride2"}},  # an epoch has 4.2 of them
    "optimizer": {"name": "sgd", "lr": 0.02, "warmup_steps": 2, "schedule": "cosine"},
    "evaluation": {"every": 2, "batch_size": 50},
}
MUON = {"name": "muon", "lr": 0.1, "ns_steps": 3, "unit_filters": True, "schedule": "linear", "clip_norm": 9.0}
FREE = {"lr": 0.01, "schedule": "constant"}
MIXED = {"path": "test.lmdb", "share": 0.3, "until": 0.7}
SEVERAL = {"path": "several.lmdb", "val_path": "several.lmdb"}
KINDS: dict[str, dict[str, Any]] = {
    "stylegan2": GAN
    | {
        "loss": {
            **{"r1_interval": 2, "mismatch_weight": 0.5, "path_length_weight": 2, "path_length_interval": 2},
            **{"auxiliary_weight": 0.3, "feature_matching_weight": 0.1, "feature_matching_group": 2},
            "gradients_every": 2,
        },
        "ada": {"mode": "adaptive", "p": 0.5, "kimg": 0.2, "interval": 2},
        "ema": {"ema_kimg": 1, "ema_kimg_start": 0, "ema_rampup": None},
        "augment": {"flip": True, "shift": 1},
        "generator_optimizer": {"lr": 0.002, "beta2_final": 0.999, "schedule": "cosine", "warmup_steps": 2},
    },
    "in a fade": GAN | {"progressive": {"start": 8, "fade_kimg": 0.04, "stable_kimg": 0.016, "batch_sizes": {8: 16}}},
    "before a stage": GAN
    | {"progressive": {"start": 8, "fade_kimg": 0.008, "stable_kimg": 0.04}, "ada": {"mode": "fixed", "p": 0.5}},
    "without moments anew": GAN | {"progressive": {"start": 8, "stable_kimg": 0.032, "reset_optimizer": False}},
    "r3gan": GAN
    | {"architecture": "r3gan", "generator": R3 | {"z_dim": 8}, "discriminator": R3}
    | {"loss": {"gamma_final": 0.05}, "ada": {"mode": "scheduled", "p_final": 0.5}},
    "dcgan": GAN
    | {"architecture": "dcgan", "generator": {"z_dim": 8, "width": 4}, "discriminator": {"width": 4}}
    | {"precision": "fp16", "micro_batch": 4, "augment": {"flip": "alternating", "shift_edge": "reflect", "shift": 1}},
    "same pairs": GAN | {"loss": {"objective": "relativistic", "same_pairs": True}},
    "wasserstein": GAN
    | {"loss": {"objective": "wasserstein", "gradient_penalty_weight": 10, "r1_interval": 2}, "conditional": False},
    "muon-adam": GAN | {"generator_optimizer": {"name": "muon-adam", "schedule": "linear"}},
    "judged": GAN | {"loss": {"classifier": "taught/run"}},
    "several labels": GAN | {"data": SEVERAL, "loss": {"mismatch_weight": 0.5}},
    "mixed": GAN | {"data": {"synthetic": MIXED, "crop": "random"}, "loss": {"objective": "relativistic"}},
    "drawn": GAN | {"data": {"synthetic": MIXED | {"path": None, "checkpoint": "generator"}}},
    "cycle": CLASSIFIER
    | {
        "optimizer": {"name": "sgd", "schedule": "one-cycle", "cycle_momentum": [0.95, 0.8], "clip_adaptive": 0.05},
        "augment": {"flip": True, "shift": 1, "erase": 0.2, "trivial_augment": True, "mixup": 0.4, "cutmix": 1.0},
        **{"resizing": {"initial_scale": 0.5}, "micro_batch": 20, "loss": {"class_weights": "balanced"}},
        "data": {"sampling": "balanced"},
    },
    "airbench": CLASSIFIER
    | {
        **{"model": {"name": "airbench"}, "optimizer": MUON},
        "finetune": {"stage_lr": {"*.bias": 9.0}, "freeze_at": {"stem": 4}},
        "augment": {"flip": "alternating", "shift": 1, "shift_edge": "reflect"},
        "resizing": {"initial_scale": 0.75, "delay_fraction": 0.8},
    },
    "unfreezing": CLASSIFIER
    | {
        "finetune": {"freeze": ["stem"], "unfreeze": {"head": 0, "layer4": 1}, "unfreeze_by": "epoch"}
        | {"layer_decay": 0.7, "layer_decay_by": "stage"},
        "optimizer": {"name": "adamw", "schedule": "step", "step_every": 2, "beta2_final": 0.9},
    },
    "kept features": CLASSIFIER
    | {"finetune": {"unfreeze": {"head": 0}}, "augment": {"flip": "alternating"}}
    | {"steps": 10, "optimizer": {"name": "adam"}},
    "unlabelled": CLASSIFIER
    | {
        **{"augment": {"flip": True, "shift": 1}, "finetune": {"probe": True}},
        "unlabelled": {"path": "test.lmdb", "ratio": 1, "spread": 0.9, "threshold": 0.5},
    },
    "readout": CLASSIFIER
    | {"model": {"stem": "small-stride2", "head": "readout", "readout_parts": 1}}
    | {"optimizer": {"name": "muon-adam"}},
    "schedule-free": CLASSIFIER
    | {"optimizer": FREE | {"name": "schedulefree-adamw"}, "micro_batch": "auto", "precision": "bf16"}
    | {"loss": {"kind": "squared-error"}, "resizing": {"initial_scale": 0.5}},
    "schedule-free sgd": CLASSIFIER | {"optimizer": FREE | {"name": "schedulefree-sgd"}, "ema": {"decay": 0.5}},
    "taught": CLASSIFIER | {"loss": {"teacher": "taught/run", "logit_adjustment": 0.5}},
    "bce": CLASSIFIER
    | {"data": SEVERAL, "loss": {"kind": "bce"}, "evaluation": {"every": 1}}
    | {"early_stopping": {"patience": 9, "min_delta": 1}},  # waits from the second evaluation on
    "asymmetric": CLASSIFIER | {"data": SEVERAL, "loss": {"kind": "asymmetric"}},
    "filled up": CLASSIFIER
    | {"data": {"synthetic": {"path": "test.lmdb", "balance": "fill", "weight": 0.5}, "class_rates": {"Bag": 0.2}}},
}
SECTIONS = ("ada", "augment", "finetune", "loss", "optimizer", "generator_optimizer", "progressive", "resizing")
WITHOUT_ROW = {  # of a GAN: what a classifier's rows have, or a GAN refuses
    f"generator_optimizer.name={name}" for name in ("adamw", "sgd", "muon", "schedulefree-sgd", "schedulefree-adamw")
} | {f"architecture=stylegan3-{name}" for name in "tr"}  # tests/extras/stylegan3/test_training.py
SWEPT = ("cycle", "unlabelled", "schedule-free")  # a learning-rate search comes first and leaves nothing behind
UNMOVED = {  # parts of a checkpoint that are as they were before the first step, and where they are not
    "loader": {"count", "seed", "shuffle", "weights", "batch"},  # the data's; a step is whole
    "loop": {"roll_backs", "failing"},  # tests/faults, tests/training/base
    "micro_batch": {"size"},  # tests/training/classifier/test_micro_batch.py
    "scaler": {"growth_factor", "backoff_factor", "growth_interval"},
}


@pytest.fixture(scope="module")
def folder(packed, tmp_path_factory, slim_module):
    path = tmp_path_factory.mktemp("kinds")
    classes = sample_images("test", 1)[2]
    for name in ("train", "test"):
        (path / f"{name}.lmdb").symlink_to(packed / f"{name}.lmdb")
    images = np.random.default_rng(0).integers(0, 256, (70, 1, 16, 16), dtype=np.uint8)
    pack_arrays(path / "several.lmdb", images, np.arange(70) % 4, ["a", "b", "c"], label_sets=[[], [0], [0, 1, 2], [2]])
    gan_run(path / "generator", classes=classes, side=16)
    teacher = CLASSIFIER | {"steps": 1, "evaluation": {"every": 0}, "early_stopping": {}}
    run(build(teacher, path), path / "taught" / "run")
    return path


def build(tree: dict[str, Any], folder: Path) -> Any:
    """The config of a row, whose files lie in `folder`."""

    def placed(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: placed(part, name) for name, part in value.items()}
        is_file = isinstance(value, str) and key in ("path", "val_path", "checkpoint", "classifier", "teacher")
        return str(folder / value) if is_file else value

    files = {"path": "train.lmdb", "val_path": "test.lmdb"} | tree.get("data", {})
    return build_run_config(placed(tree | {"data": files}), [], "test")


def run(config: Any, folder: Path, *, sweeps: bool = False) -> tuple[Loop, dict[str, Any]]:
    """Train as train.py does: from the newest checkpoint, if there is one, to the end; and the state before that."""
    place = RunFolder(folder)
    loop = prepare(config, place, torch.device("cpu"))
    fresh = copy.deepcopy({name: part.state_dict() for name, part in loop.registry().items()})
    place.open()
    loop.resume()
    if sweeps:
        search(loop, Sweep(steps=10, first=1e-5, last=1e-2))
    place.save_config(to_tree(config), data=None)
    loop.run()
    place.close()
    return loop, fresh


def ends(folder: Path, steps: int) -> dict[str, Any]:
    """What a run has left: the last state, its log, and what its pointers name."""
    state = load(folder / "checkpoints" / f"step-{steps:08d}.pt")["state"]
    state.get("probe", {}).pop("seconds", None)
    names = {which: (pointer(folder / "checkpoints", which) or {}) for which in ("last", "best")}
    pointers = {which: {key: entry[key] for key in entry if key != "sha256"} for which, entry in names.items()}
    return {"state": state, "rows": rows(folder), "pointers": pointers}


def check_samples(task: GanTask, checkpoint: Path) -> None:
    """Compare a run's picture of samples with that of the generator that other programs restore."""
    shown = task.sample_grid(STEPS)
    assert shown is not None
    expected = task.evaluation.sample_grid(generator_from(load(checkpoint), several=True))
    np.testing.assert_allclose(shown.astype(int), expected, atol=1)  # memory formats differ


SAVED: dict[str, set[str]] = {}  # part of a checkpoint -> its keys, in all kinds so far
CHANGED: dict[str, set[str]] = {}  # those that training has changed where a run is resumed
TRAINED: set[str] = set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_goes_on_to_the_bit(kind, folder, tmp_path):
    """From a checkpoint in another process's place, and after going back to it in the process that has trained on."""
    config, straight, resumed = build(KINDS[kind], folder), tmp_path / "straight", tmp_path / "resumed"
    run(config, straight)
    shutil.copytree(straight, resumed)
    assert forget_after(resumed / "checkpoints", RESUMED)
    loop, fresh = run(config, resumed, sweeps=kind in SWEPT)
    expected = ends(straight, config.steps)
    assert differing(expected, ends(resumed, config.steps)) == []
    assert loop.manager.restore(loop.registry(), up_to=RESUMED) is not None
    assert loop.step == RESUMED
    loop.run()
    assert differing(expected, ends(resumed, config.steps)) == []
    if isinstance(loop.task, GanTask):
        check_samples(loop.task, straight / "checkpoints" / f"step-{config.steps:08d}.pt")
    for part, state in load(straight / "checkpoints" / f"step-{RESUMED:08d}.pt")["state"].items():
        changed = {key for key, value in state.items() if differing(fresh[part].get(key), value)}
        CHANGED.setdefault(part, set()).update(changed)
        SAVED.setdefault(part, set()).update(state)
    TRAINED.add(kind)


def test_the_kinds_change_every_part_of_a_checkpoint():
    """An equal state that never changes says nothing: it needs a kind that changes it."""
    if len(TRAINED) < len(KINDS):
        pytest.skip("some kinds were not trained")
    networks = {"generator", "discriminator", "generator_ema", "model", "model_ema"}
    unmoved = {part: keys - CHANGED[part] for part, keys in SAVED.items() if part not in networks}
    assert {part: keys for part, keys in unmoved.items() if keys} == UNMOVED


def options(model: Any, prefix: str = "") -> Iterator[str]:
    """key=value of every choice that a configuration offers."""
    for name, hint in hints(model).items():
        if section := section_of(hint):
            yield from options(section, f"{prefix}{name}.")
        for part in [hint, *get_args(hint)]:
            if get_origin(part) is Literal:
                yield from (f"{prefix}{name}={value}" for value in get_args(part))


@pytest.mark.parametrize("task", TASKS)
def test_every_choice_has_a_kind(task, folder):
    choices = set(options(TASKS[task].config()))
    registries: dict[str, Any] = {"architecture": ARCHITECTURES, "loss.objective": OBJECTIVES} if task == "gan" else {}
    schedule = "generator_optimizer.schedule" if task == "gan" else "optimizer.schedule"
    registries[schedule] = {} if task == "gan" else dict.fromkeys(["constant", *DECAYS, "step", "one-cycle"])
    choices |= {f"{key}={value}" for key, registry in registries.items() for value in registry}
    choices = {choice for choice in choices if choice.startswith((*(f"{name}." for name in SECTIONS), "architecture"))}
    taken = set()
    for tree in KINDS.values():
        if tree["task"] == task:
            config = build(tree, folder)
            for key in keys_of(type(config)):
                value: Any = config
                for name in key.split("."):
                    value = getattr(value, name)
                taken.add(f"{key}={value}")
    assert sorted(choices - taken - WITHOUT_ROW) == []
