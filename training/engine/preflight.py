"""What is checked and shown before the first step: the preflight's table and `--dry-run`'s plan."""

import copy
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
import torchinfo
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from data.dataset import Dataset
from data.progressive_loader import levels_text
from models.backbones.base import in_turn
from models.classifier import Classifier
from models.model_parallel import Placement
from training.base.config import RunConfig
from training.base.data import data_text
from training.base.task import Task
from training.classifier.finetune import FineTuning, plain
from training.optim.updater import OptimizerConfig, Updater
from utils.distributed import collectives
from utils.errors import UserError
from utils.text import columns

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
    world = collectives.world_size()
    slow = config.precision == "fp16" and device.type == "cpu"
    images = task.images_at(config.steps)
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
            + (", halved where memory runs out" if config.micro_batch == "auto" else "")
        )
    else:
        rows["levels"] = levels_text(reader, [side for _, side, _ in spans])
    rows |= {f"growth {number}": text for number, text in enumerate(task.describe(), 1)}
    if max(size for _, _, size in spans) > len(reader):
        rows["warning"] = (
            f"batch larger than the data set: each batch holds repeats; make batch_size at most {len(reader)}"
        )
    rows["length"] = f"{config.steps:,} steps = {images:,} images = {images / len(reader):.1f} epochs"
    for name, section in vars(config).items():
        if isinstance(section, OptimizerConfig):
            rows[name.replace("_", " ")] = schedule_text(section, config.schedule_steps, config.batch_size)
    placement = getattr(task, "placement", None)
    if isinstance(placement, Placement):
        rows["split"] = placement.text()
    trained = getattr(task, "trained", None)
    if isinstance(trained, FineTuning) and trained.describe():
        rows["what trains"] = "; ".join(trained.describe())
    for name, (network, _) in task.networks().items():
        rows[f"{name} parameters"] = f"{sum(p.numel() for p in network.parameters()):,}"
    saving = config.checkpoint
    for_good = f", and every {saving.keep_every} for good" if saving.keep_every else ""
    rows["checkpoint"] = (
        f"about {state_bytes(task) / MIB:.1f} MiB, every {saving.every} steps, {saving.keep} kept and the best"
        f"{for_good}"
    )
    return rows


def schedule_text(config: OptimizerConfig, steps: int, batch_size: int) -> str:
    """An optimizer's rates at a glance, and what the global batch made of them."""
    given, config = config, config.for_batch(batch_size)
    text = f"{config.name}, lr {config.lr:g}"
    if given.lr_batch_size is not None:
        text += f" (= {given.lr:g} x batch {batch_size} / {given.lr_batch_size})"
    if config.warmup_steps:
        text += f" after {config.warmup_steps} warm-up steps"
    if config.schedule != "constant":
        marks = ", ".join(
            f"{config.lr_at(step, steps):.2g} at {step}" for step in (steps // 4, steps // 2, 3 * steps // 4, steps - 1)
        )
        text += f", {config.schedule}: {marks}"
    for key, value in (("norm", config.clip_norm), ("value", config.clip_value), ("ratio", config.clip_adaptive)):
        text += f", clipped at {key} {value:g}" if value else ""
    return text


def table(rows: Mapping[str, str]) -> str:
    """Two aligned columns."""
    return indent(columns(rows.items(), "<"), "  ")


def saved_bytes(network: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes that autograd keeps for the backward pass of `network(*inputs)`, its parameters not counted; under
    activation checkpointing the stages' inputs, and the stage that needs most when it is computed again.
    """
    parameters = {p.data_ptr() for p in network.parameters()}
    if not (isinstance(network, Classifier) and network.config.activation_checkpointing):
        return _kept_by(lambda: network(*inputs), parameters)
    given, again = [0], [0]

    def stage(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        found: list[Tensor] = []
        again.append(_kept_by(lambda: found.append(in_turn(modules, x)), parameters))
        if found[0].requires_grad:
            given.append(x.numel() * x.element_size())
        return found[0]

    network._stage = stage  # type: ignore[method-assign]
    head = _kept_by(lambda: network(*inputs), parameters)  # the stages' own tensors go to the inner count
    return head + sum(given) + max(again)


def _kept_by(forward: Callable[[], object], parameters: set[int]) -> int:
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward()
    del output
    return sum(kept.values())


def model_summary(
    name: str, network: nn.Module, inputs: tuple[Any, ...], micro: int, *, task: Task | None = None
) -> str:
    """Layers with output shapes and parameters, and the memory of a training step at this micro-batch; of a task that
    says what trains, also how.
    """
    trained, updater = getattr(task, "trained", None), getattr(task, "updater", None)
    clone = copy.deepcopy(network)  # a forward pass in training mode would change statistics
    if isinstance(trained, FineTuning) and isinstance(updater, Updater):
        layers = layer_table(network, inputs, trained, updater.config)
        for key, parameter in clone.named_parameters():
            parameter.requires_grad_(trained.begins[key] is not None)
    else:
        layers = _torchinfo(clone.requires_grad_(True), inputs)
    activations = saved_bytes(clone, inputs) / inputs[0].shape[0] * micro
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    total = activations + 5 * weights
    memory = (
        f"memory of its training step: about {total / GIB:.2f} GiB (kept for the backward pass {activations / MIB:.0f} "
        f"MiB in fp32 at {micro} samples; weights, gradients, moments and average {5 * weights / MIB:.0f} MiB)"
    )
    return f"{name}\n{layers}\n{memory}"


def _torchinfo(network: nn.Module, inputs: tuple[Any, ...]) -> str:
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
    return str(info).split("Total mult-adds")[0].rstrip("=\n ")  # it sees modules only, not the functional layers


HEADINGS = ("layer", "kind", "output", "parameters", "peak lr", "weight decay", "trains")


def layer_table(network: nn.Module, inputs: tuple[Any, ...], trained: FineTuning, config: OptimizerConfig) -> str:
    """Every layer in the order of the forward pass: output shape, parameters, rate at the peak, weight decay, and from
    which update it trains. `network` is in evaluation mode, its parameters named as those of `trained`.
    """
    shapes: dict[str, str] = {}
    modules = {prefix: module for prefix, module in network.named_modules() if not any(True for _ in module.children())}

    def note(prefix: str, output: Tensor) -> None:
        shapes.setdefault(prefix, " x ".join(map(str, output.shape)))

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, prefix=prefix: note(prefix, output))
        for prefix, module in modules.items()
    ]
    with torch.no_grad():
        network(*inputs)
    for hook in hooks:
        hook.remove()
    rows = [_layer_row(prefix, shapes[prefix], modules[prefix], trained, config) for prefix in shapes]
    ever = sum(p.numel() for name, p in trained.parameters.items() if trained.begins[name] is not None)
    total = sum(p.numel() for p in trained.parameters.values())
    totals = (("Total", total), ("Trainable", ever), ("Non-trainable", total - ever))
    layers = columns([HEADINGS, *rows], "<")
    return "\n".join([layers, *(f"{label} params: {count:,}" for label, count in totals)])


def _layer_row(
    prefix: str, shape: str, module: nn.Module, trained: FineTuning, config: OptimizerConfig
) -> tuple[str, ...]:
    """Values that differ between a layer's parameters are told of each, in their order."""
    names = {f"{prefix}.{name}": p for name, p in module.named_parameters(recurse=False)}
    kind = type(module).__name__
    if not names:
        return plain(prefix), kind, shape, "", "", "", ""
    begins = [trained.begins[name] for name in names]
    rates = [f"{config.lr * trained.factors[name]:.3g}" if trained.begins[name] is not None else "-" for name in names]
    decays = [
        "-" if trained.begins[name] is None else f"{config.weight_decay if p.ndim > 1 else 0:g}"
        for name, p in names.items()
    ]
    trains = ["no" if begin is None else f"from step {begin}" if begin else "yes" for begin in begins]
    if trained.config.freeze_bn and isinstance(module, _BatchNorm):
        trains = [f"{text}, statistics kept" for text in trains]
    count = f"{sum(p.numel() for p in names.values()):,}"
    return plain(prefix), kind, shape, count, *("/".join(dict.fromkeys(cells)) for cells in (rates, decays, trains))
