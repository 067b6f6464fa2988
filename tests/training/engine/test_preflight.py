"""What is told, and refused, before the first step."""

import json
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from duetgan.commands import train
from duetgan.data.lmdb.format import COMPLETE_KEY, META_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.training.base import data
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import FineTuneConfig
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine import preflight, speed
from duetgan.training.engine.preflight import check_disk, plan_rows, state_bytes
from duetgan.training.engine.run import prepare
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.gan.task import GanTask
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.data.conftest import change
from tests.end_to_end.helpers import train_in_process, write_config

CPU = torch.device("cpu")


def task_of(packed: Path, **options: Any) -> ClassifierTask:
    tree: dict[str, Any] = {
        "data": {"path": str(packed / "train.lmdb")},
        "batch_size": 8,
        "steps": 10,
        "model": {"stem": "small-stride2"},
        "optimizer": {"name": "sgd", "lr": 0.5, "weight_decay": 0.01},
    }
    return ClassifierTask(ClassifierConfig(**tree | options), Dataset(packed / "train.lmdb"), None, CPU)


def plan_of(task: ClassifierTask) -> dict[str, str]:
    return plan_rows(task.config, task, task.dataset, None, CPU, "fp32")


@pytest.mark.parametrize(("batch_size", "warned"), [(200, False), (201, True)])
def test_a_batch_larger_than_the_data_set_is_mentioned(packed, batch_size, warned):
    rows = plan_of(task_of(packed, batch_size=batch_size, steps=3))
    warning = "batch larger than the data set: each batch holds repeats"
    assert rows.get("warning") == (warning if warned else None)
    assert rows["length"] == f"3 steps = {3 * batch_size} images = {3 * batch_size / 200:.1f} epochs"


def test_every_row_of_the_plan(packed, monkeypatch):
    schedule = {"name": "sgd", "lr": 0.5, "lr_batch_size": 16, "warmup_steps": 3, "schedule": "cosine"}
    saving = {"every": 3, "keep": 5}
    task = task_of(packed, batch_size=24, steps=7, micro_batch=6, optimizer=schedule, checkpoint=saving)
    growth = {"start": 8, "batch_sizes": {8: 240}}
    tree = {"task": "gan", "batch_size": 24, "steps": 7, "progressive": growth, "checkpoint": saving}
    tree["schedule_kimg"] = 0.72  # 3 steps, as many as the warm-up
    gan: Any = build_run_config(tree, ["--generator_optimizer.warmup_steps=3"], "x")
    growing = GanTask(gan, task.dataset, None, CPU)
    adapting = task_of(packed, batch_size=24, micro_batch="auto")
    monkeypatch.setattr(preflight.collectives, "world_size", lambda: 2)
    auto = "24 global = 2 x 12, in micro-batches of 12, halved where memory runs out"
    assert plan_of(adapting)["batch"] == auto
    sizes = {name: sum(p.numel() for p in network.parameters()) for name, (network, _) in growing.networks().items()}
    with Dataset(packed / "test.lmdb") as held_out:
        rows = plan_rows(task.config, task, task.dataset, held_out, CPU, "bf16 (a reason)")
    grown = plan_rows(gan, growing, task.dataset, None, CPU, "fp32")
    same = {
        "device": "cpu x 2 processes, 1 thread",
        "training data": "200 images, 16 px, grey, 10 classes, raw",
        "length": "7 steps = 168 images = 0.8 epochs",
    }
    assert rows == same | {
        "task": "classifier",
        "precision": "bf16 (a reason)",
        "held-out data": "100 images, 16 px, grey, 10 classes, raw",
        "batch": "24 global = 2 x 12, in micro-batches of 6",
        "optimizer": "sgd, lr 0.75 (= 0.5 x batch 24 / 16) after 3 warm-up steps, cosine",
        "classifier parameters": f"{sum(p.numel() for p in task.model.parameters()):,}",
        "checkpoint": f"about {state_bytes(task) / 2**20:.1f} MiB, every 3 steps; the last 5 and the best are kept",
        **task.describe(),
    }
    assert grown == same | {
        "task": "gan",
        "precision": "fp32",
        "held-out data": "none (data.val_path is not set)",
        "warning": "batch larger than the data set: each batch holds repeats",
        "length": "7 steps = 1,680 images = 8.4 epochs",
        "generator optimizer": "adam, lr 0.0025 after 3 warm-up steps; warning: the run ends within the warm-up: "
        "make warmup_steps smaller, constant",
        "discriminator optimizer": "adam, lr 0.0025, constant",
        **{f"{name} parameters": f"{size:,}" for name, size in sizes.items()},
        "checkpoint": f"about {state_bytes(growing) / 2**20:.1f} MiB, every 3 steps; the last 5 and the best are kept",
        **growing.describe(),
    }


def test_the_plan_says_what_trains_with_which_statistics(packed):
    def told(**train: Any) -> str | None:
        return plan_of(task_of(packed, finetune=FineTuneConfig(**train))).get("what trains")

    assert told() is None
    assert told(unfreeze={"head": 0, "layer4": 7}) == (
        "from step 0: head (5,130 parameters); from step 7: layer4 (8,393,728 parameters); "
        "never: stem, layer1, layer2, layer3 (2,773,952 parameters)"
    )


def test_the_disk_must_hold_all_checkpoints_that_are_kept(tmp_path, monkeypatch):
    part = nn.Linear(100, 100)  # 40,400 bytes
    task: Any = SimpleNamespace(registry=lambda: {"model": part, "model_ema": part})
    free = {tmp_path: 30 * 2 * 40_400}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[path]))
    check_disk(tmp_path / "run" / "inner", task, 30)
    free[tmp_path] -= 2**20
    with pytest.raises(UserError, match=f"^{tmp_path}: 1 MiB free, checkpoints need 2 MiB; free some space"):
        check_disk(tmp_path / "run" / "inner", task, 30)
    free[tmp_path] += 2**20 - 1
    with pytest.raises(UserError, match="free some space"):
        check_disk(tmp_path, task, 30)


@pytest.mark.parametrize(
    ("name", "layer", "duration", "options"),
    [
        # two steps of 32 images, then six of 16
        ("gan", "ModulatedConv2d", "20 min", ["--progressive={start: 8, stable_kimg: 0.064, batch_sizes: {8: 32}}"]),
        ("classifier", "BatchNorm2d", "20 min", []),
    ],
)
def test_a_dry_run_prints_the_time_and_the_table(tmp_path, packed, capsys, name, layer, duration, options, monkeypatch):
    recipe = write_config(tmp_path / "recipe.yaml", name, packed)
    monkeypatch.setattr(speed, "seconds_per_image", lambda *_: 7.5)
    assert train_in_process(recipe, tmp_path / "run", *options, "--dry-run", "--layers") == 0
    text, plan = capsys.readouterr()
    time = f"time: about {duration} here, 0.133 images/s"
    end = "dry run: everything up to the first step is in order; nothing was written"
    assert (text.startswith(f"{time}\n"), text.endswith(f"\n{end}\n")) == (True, True)
    assert re.search(rf"{layer} \(\w+\)", text)
    columns = re.search(rf"(?m)^(  task +){name}$\n(  device +)cpu x 1 process, ", plan)
    assert columns is not None
    assert len(columns[1]) == len(columns[2])
    assert train_in_process(recipe, tmp_path / "run", *options, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [time, "--layers prints every layer", end]
    assert re.search(r"Total params: [1-9][\d,]+\n", text)
    assert "Trainable" not in text


@pytest.mark.parametrize("name", ["gan", "classifier"])
def test_the_plans_checkpoint_size_is_that_on_the_disk(tmp_path, packed, name, capsys):
    """U17: it said 170.5 MiB of one that has 128.0."""
    recipe = write_config(tmp_path / "recipe.yaml", name, packed)
    config = build_run_config(read_yaml(str(recipe)), [], "x")
    reader = Dataset(packed / "train.lmdb")
    planned = state_bytes(TASKS[config.task].task(config, reader, None, torch.device("cpu")))
    options = ["--max-steps", "1", "--checkpoint.every", "7", "--checkpoint.keep", "5"]
    assert train_in_process(recipe, tmp_path / "run", *options) == 0
    size = f"{planned / 2**20:.1f} MiB"
    assert f" about {size}, every 7 steps; the last 5 and the best are kept\n" in capsys.readouterr().err
    (path,) = (tmp_path / "run" / "checkpoints").glob("*.pt")
    content = torch.load(path, weights_only=True)
    parts = [part for key, part in content["state"].items() if key not in ("loader", "window", "loop")]
    held = sum(x.numel() * x.element_size() for x in tree_leaves(parts) if isinstance(x, torch.Tensor))
    assert planned == pytest.approx(held, rel=0.01)


def test_every_check_is_of_the_runs_own_parts(packed, tmp_path, monkeypatch, slim):
    calls: dict[str, tuple[Any, ...]] = {}

    def observe(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def check(*arguments: Any) -> Any:
            calls[name] = arguments
            return function(*arguments)

        monkeypatch.setattr(owner, name, check)

    for name in ("check_data", "check_same_images"):
        observe(data, name)
    for name in ("check_memory", "check_disk"):
        observe(preflight, name)
    observe(speed, "faster_precision")
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    config = build_run_config(read_yaml(recipe), ["--precision=fp32", "--checkpoint.keep=7"], "x")
    loop = prepare(config, RunFolder(tmp_path / "run"), CPU)
    config, training, held_out = loop.config, loop.loader.dataset, loop.task.val_dataset
    of_memory, outline, device = calls.pop("check_memory")
    assert (of_memory, outline.args, device) == (config, (config, config.shape(training)), CPU)
    assert outline.func is ClassifierTask.outline
    assert calls == {
        "check_data": (config, training, held_out),
        "check_same_images": (config.data, training, held_out),
        "check_disk": (tmp_path / "run", loop.task, config.checkpoint.max_on_disk(config.steps)),
        "faster_precision": (config, "fp32", training, CPU),
    }


@pytest.fixture
def start(tmp_path, packed, refused):
    """Starts a training that is refused; returns the line, after a look that nothing was written."""

    def starts(*options: str | Path) -> str:
        recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
        line = refused(train.main, "--config", recipe, "--run-dir", tmp_path / "run", *options)
        assert not (tmp_path / "run").exists()
        return line

    return starts


def pack(path: Path, labels: list[int], classes: str) -> Path:
    pack_arrays(path, np.zeros((len(labels), 1, 8, 8), np.uint8), labels, classes.split())
    return path


@pytest.mark.parametrize("classes", ["cat", ""])
def test_a_classifier_needs_two_classes(start, tmp_path, classes):
    file, count = pack(tmp_path / "train.lmdb", [0], classes), len(classes.split())
    told = f"train.lmdb: a classifier needs two classes or more, this file has {count}; pack a folder of class fol"
    assert told in start("--data.path", file, "--data.val-path", file)
    gap = pack(tmp_path / "gap.lmdb", [0, 2], "cat dog emu")
    assert "gap.lmdb: class 'dog' has no image; remove it" in start("--data.path", gap, "--data.val-path", gap)


def empty_meta(path: Path) -> None:
    """A file that says, with checksums that fit, that it holds no image: data.pack writes none, others may."""
    with LMDBReader(path) as reader:
        meta = json.loads(reader.meta.to_json())
    record = json.dumps(meta | {"count": 0, "histogram": [0] * len(meta["classes"])}).encode()
    change(path, META_KEY, record)
    complete = {"content_hash": meta["content_hash"], "count": 0, "meta_checksum": zlib.crc32(record)}
    change(path, COMPLETE_KEY, json.dumps(complete).encode())


def test_no_held_out_images(start, tmp_path):
    empty_meta(pack(tmp_path / "zero.lmdb", [0, 1, 2, 0], "cat dog emu"))
    line = start("--data.val-path", tmp_path / "zero.lmdb")
    problem = r"zero\.lmdb: its metadata record .* read \(count 0: must be greater .* 1\); copy or pack"
    assert re.search(problem, line)
