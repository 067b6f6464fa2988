"""Checks of memory and disk before the first step, and the plan that a run prints."""

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torchinfo
from torch import Tensor
from torch.utils._pytree import tree_leaves

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.config import RunConfig
from duetgan.training.base.data import data_text, mixture_text
from duetgan.training.base.task import Outline, Task
from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.machine import MIB, local_processes, total_bytes
from duetgan.utils.text import counted

GIB = 2**30


def state_bytes(task: Task) -> int:
    """Return the bytes of all tensors in a checkpoint of `task`."""
    leaves = tree_leaves([part.state_dict() for part in task.registry().values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def check_disk(folder: Path, task: Task, count: int) -> None:
    """Raise UserError if the disk of `folder` has too little space for `count` more checkpoints."""
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    needed, free = state_bytes(task) * count, shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{existing}: {free / MIB:.0f} MiB free, checkpoints need {needed / MIB:.0f} MiB; free some space or "
            "choose another --run-dir"
        )


def check_memory(
    config: RunConfig,
    outline: Callable[[], Outline],  # builds the networks; called on the meta device
    device: torch.device,
) -> None:
    """Raise UserError if the memory is too small for the weights and all tensors of their size.

    These tensors are, for example, gradients and optimizer moments. Activations are not counted.
    """
    processes = local_processes() if device.type == "cpu" else 1
    room = total_bytes(device, several=config.several_devices) // processes
    machine = "this machine" if device.type == "cpu" else "the GPU"
    needs = {}  # bytes of each network's weights and their copies, by section of the config
    with torch.device("meta"):
        for name, (network, copies) in outline().items():
            needs[name] = copies * sum(p.nbytes for p in network.parameters())
    weights = sum(needs.values())
    if weights > room:
        largest = max(needs, key=lambda name: needs[name])
        raise UserError(
            f"{largest}: its weights and what belongs to each need {weights / GIB:,.1f} GiB or more, "
            f"but {machine} has {room / GIB:,.1f} GiB for a process: make the sizes in this section "
            "of the config smaller"
        )


def plan_rows(
    config: RunConfig,
    task: Task,
    dataset: Dataset,
    val_dataset: Dataset | None,
    device: torch.device,
    precision: str,
) -> dict[str, str]:
    """Return the rows of the printed plan, as a dict from label to text.

    `precision` is the row about the precision, with the reason for its choice.
    """
    world_size, images = collectives.world_size(), task.images_at(config.steps)
    processes = "process" if world_size == 1 else "processes"
    place = f"{device} x {world_size} {processes}, {counted(torch.get_num_threads(), 'thread')}"
    rows = {
        "task": config.task,
        "device": place,
        "precision": precision,
        "training data": data_text(dataset),
    }
    if dataset.synthetic is not None:
        rows["synthetic data"] = mixture_text(config, dataset)
    rows["held-out data"] = "none (data.val_path is not set)"
    if val_dataset:
        rows["held-out data"] = data_text(val_dataset)
    rows |= _batch_rows(config, dataset)
    epochs = images / len(dataset)
    rows["length"] = f"{config.steps:,} steps = {images:,} images = {epochs:.1f} epochs"
    for name, section in vars(config).items():
        if isinstance(section, OptimizerConfig):
            rows[name.replace("_", " ")] = schedule_text(
                section, config.schedule_steps(dataset.resolution), config.batch_size
            )
    rows |= task.describe()
    for name, (network, _) in task.networks().items():
        rows[f"{name} parameters"] = f"{sum(p.numel() for p in network.parameters()):,}"
    saving = config.checkpoint
    rows["checkpoint"] = (
        f"about {state_bytes(task) / MIB:.1f} MiB, every {saving.every} steps; "
        f"the last {saving.keep} and the best are kept"
    )
    return rows


def _batch_rows(config: RunConfig, dataset: Dataset) -> dict[str, str]:
    rows = {}
    world_size, spans = collectives.world_size(), config.spans(dataset.resolution)
    if len(spans) == 1:
        rows["batch"] = (
            f"{config.batch_size} global = {world_size} x {config.rank_batch(world_size)}, "
            f"in micro-batches of {config.micro(world_size)}"
        )
        if config.micro_batch == "auto":
            rows["batch"] += ", halved where memory runs out"
    if max(size for _, _, size in spans) > len(dataset):
        rows["warning"] = "batch larger than the data set: each batch holds repeats"
    return rows


def schedule_text(config: OptimizerConfig, steps: int, batch_size: int) -> str:
    """Return the plan's row about an optimizer: name, learning rate, warm-up and schedule.

    `steps` is the length of the schedule, and `batch_size` that of the global batch.
    """
    configured, config = config, config.for_batch(batch_size)
    text = f"{config.name}, lr {config.lr:g}"
    if configured.lr_batch_size is not None:
        text += f" (= {configured.lr:g} x batch {batch_size} / {configured.lr_batch_size})"
    if config.warmup_steps:
        text += f" after {config.warmup_steps} warm-up steps"
    if config.warmup_steps >= steps:
        text += "; warning: the run ends within the warm-up: make warmup_steps smaller"
    return f"{text}, {config.schedule}"


def layers_text(task: Task, name: str) -> str:
    """Return a text table of the layers of a network, with output shapes and parameters.

    `name` is the network's key in `task.networks()`.
    """
    network, inputs = task.networks()[name]
    # torchinfo counts multiply-adds with deprecated calls, which print warnings.
    with warnings.catch_warnings(action="ignore"):
        info = torchinfo.summary(
            copy.deepcopy(network).requires_grad_(True),
            input_data=list(inputs),
            depth=4,
            verbose=0,
            col_names=("output_size", "num_params"),
            row_settings=("var_names",),
        )
    # torchinfo's other totals miss frozen and functional layers.
    table = str(info).split("Trainable params")[0].rstrip("=\n ")
    return f"{name}\n{table}"
