"""What is checked and shown before the first step: the preflight's table and `--dry-run`'s plan."""

import copy
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchinfo

from data.dataset import Dataset
from data.staged import levels_text
from training.config import RunConfig
from training.data import data_text
from training.loop import Task
from training.optim import OptimizerConfig
from utils import distributed
from utils.errors import UserError

GIB = 2**30
MIB = 2**20


def state_bytes(task: Task) -> int:
    """Bytes of all tensors that a checkpoint will hold (Adam's two moments counted before they exist)."""
    networks = [part for part in task.registry().values() if isinstance(part, torch.nn.Module)]
    return sum(4 * p.numel() * p.element_size() for network in networks for p in network.parameters())


def check_disk(folder: Path, task: Task, keep: int) -> None:
    """Raise UserError when the disk cannot hold the checkpoints that will be kept."""
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    needed, free = state_bytes(task) * (keep + 2), shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{existing}: {free / MIB:.0f} MiB free, checkpoints need {needed / MIB:.0f} MiB; free some space or "
            "choose another --run-dir"
        )


def plan_rows(
    config: RunConfig, task: Task, reader: Dataset, val_reader: Dataset | None, reading: str, device: torch.device
) -> dict[str, str]:
    """The preflight's table: label -> value."""
    world = distributed.world_size()
    slow = config.precision == "fp16" and device.type == "cpu"
    pictures = task.images_at(config.steps)
    rows = {
        "task": config.task,
        "device": f"{device} x {world} process{'es' * (world > 1)}, {torch.get_num_threads()} threads, "
        f"{config.precision}" + (" (slow on CPUs: bf16 is faster)" if slow else ""),
    }
    rows["training data"] = data_text(reader)
    rows["held-out data"] = data_text(val_reader) if val_reader else "none (data.val_path is not set)"
    rows["reading"] = reading
    spans = config.spans(reader.resolution)
    if len(spans) == 1:
        rows["batch"] = (
            f"{config.batch_size} global = {world} x {config.share(world)}, in micro-batches of {config.micro(world)}"
        )
    else:
        rows["levels"] = levels_text(reader, [side for _, side, _ in spans])
    rows |= {f"growth {number}": text for number, text in enumerate(task.describe(), 1)}
    if max(size for _, _, size in spans) > len(reader):
        rows["warning"] = (
            f"batch larger than the data set: each batch holds repeats; make batch_size at most {len(reader)}"
        )
    rows["length"] = f"{config.steps:,} steps = {pictures:,} pictures = {pictures / len(reader):.1f} epochs"
    for name, section in vars(config).items():
        if isinstance(section, OptimizerConfig):
            rows[name.replace("_", " ")] = schedule_text(section, config.schedule_steps)
    for name, (network, _) in task.networks().items():
        rows[f"{name} parameters"] = f"{sum(p.numel() for p in network.parameters()):,}"
    rows["checkpoint"] = (
        f"about {state_bytes(task) / MIB:.1f} MiB, every {config.checkpoint.every} steps, {config.checkpoint.keep} "
        "kept and the best"
    )
    return rows


def schedule_text(config: OptimizerConfig, steps: int) -> str:
    """An optimizer's rates at a glance."""
    text = f"{config.name}, lr {config.lr:g}"
    if config.warmup_steps:
        text += f" after {config.warmup_steps} warm-up steps"
    if config.schedule != "constant":
        marks = ", ".join(
            f"{config.lr_at(step, steps):.2g} at {step}" for step in (steps // 4, steps // 2, 3 * steps // 4, steps - 1)
        )
        text += f", {config.schedule}: {marks}"
    return text + (f", clipped at norm {config.clip_norm:g}" if config.clip_norm else "")


def table(rows: Mapping[str, str]) -> str:
    """Two aligned columns."""
    width = max(map(len, rows))
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows.items())


def saved_bytes(network: torch.nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes that autograd keeps for the backward pass of `network(*inputs)`, its parameters not counted."""
    parameters = {p.data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = network(*inputs)
    del output
    return sum(kept.values())


def model_summary(name: str, network: torch.nn.Module, inputs: tuple[Any, ...], micro: int) -> str:
    """Layers with output shapes and parameters (torchinfo), and the memory of a training step at this micro-batch."""
    network = copy.deepcopy(network).requires_grad_(True)  # a forward pass in training mode would change statistics
    activations = saved_bytes(network, inputs) / inputs[0].shape[0] * micro
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchinfo counts multiply-adds with deprecated calls
        info = torchinfo.summary(
            network,
            input_data=list(inputs),
            depth=4,
            verbose=0,
            col_names=("output_size", "num_params"),
            row_settings=("var_names",),
        )
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    layers = str(info).split("Total mult-adds")[0].rstrip("=\n ")  # it sees modules only, not the functional layers
    total = activations + 5 * weights
    memory = (
        f"memory of its training step: about {total / GIB:.2f} GiB (kept for the backward pass {activations / MIB:.0f} "
        f"MiB in fp32 at {micro} samples; weights, gradients, moments and average {5 * weights / MIB:.0f} MiB)"
    )
    return f"{name}\n{layers}\n{memory}"
