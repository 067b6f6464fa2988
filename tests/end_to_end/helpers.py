"""Tiny runs of both tasks through the command line."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from duetgan.commands import train
from duetgan.utils.distributed.process import run_cli

GAN = """
task: gan
steps: 8
batch_size: 16
generator: {z_dim: 8, w_dim: 8, mapping_layers: 2, channel_base: 128, channel_max: 16}
discriminator: {channel_base: 128, channel_max: 16}
loss: {r1_interval: 3}
"""
CLASSIFIER = """
task: classifier
steps: 8
batch_size: 20
model: {stem: small-stride2}
optimizer: {lr: 0.02, warmup_steps: 2}
augment: {flip: true, shift: 1}
"""
COMMON = """
log: {{every: 3, samples_every: 4, tensorboard: {tensorboard}}}
checkpoint: {{every: 2}}
evaluation: {{every: 4, n: 40}}
data: {{path: {folder}/train.lmdb, val_path: {folder}/test.lmdb}}
"""
TIMING = ("images_per_second", "data_wait", "memory_mib")  # of a row in metrics.jsonl
TASKS = {"gan": GAN, "classifier": CLASSIFIER}


def write_config(path: Path, task: str, packed: Path, *, tensorboard: bool = False) -> Path:
    """A recipe that takes seconds."""
    path.write_text(TASKS[task] + COMMON.format(folder=packed, tensorboard=str(tensorboard).lower()))
    return path


def events_of(run: Path) -> Any:
    """A run's own TensorBoard events: an EventAccumulator."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def graph_scopes(run: Path) -> set[str]:
    """The names of all modules in a run's graph, whose nodes are called `Type[name]/Type[name]/...`."""
    return {name for node in events_of(run).Graph().node for name in re.findall(r"\[(\w+)\]", node.name)}


def state_of(run: Path, step: int) -> dict[str, Any]:
    """Everything that a run's checkpoint of `step` restores."""
    return torch.load(run / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)["state"]


def differing(a: Any, b: Any, where: str = "") -> list[str]:
    """Names of what is not equal to the bit in two states."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where}: other keys"]
        return [found for key in a for found in differing(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: other length"]
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differing(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return [] if alike and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) else [where]
    nan = a != a and b != b  # of a step that was masked, in the log window
    return [] if nan or (type(a) is type(b) and a == b) else [where]


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without the figures that are times or memory."""
    return [{key: value for key, value in row.items() if key not in TIMING} for row in log_of(run)]


def log_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def status(run: Path, *names: str) -> Any:
    """A run's status.json, or what it says of these names."""
    found = json.loads((run / "status.json").read_text())
    return tuple(found[name] for name in names) if names else found


def last(run: Path) -> int:
    """The step of the checkpoint that a run would resume from."""
    return json.loads((run / "checkpoints" / "last.json").read_text())["step"]


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files of a run, but for its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def check_same(one: Path, other: Path, step: int) -> None:
    """Two runs have the same state after `step`, to the bit, and the same rows in their logs."""
    assert differing(state_of(one, step), state_of(other, step)) == []
    assert rows(one) == rows(other)


def train_in_process(config: Path, run: Path, *more: str) -> int:
    """`train.py` on this process's thread; its exit code."""
    return run_cli(train.main, ["--config", str(config), "--run-dir", str(run), *more])
