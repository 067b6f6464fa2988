"""What is checked and shown before the first step: memory, disk, the preflight's table and
`--dry-run`'s plan.
"""

import copy
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torchinfo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from duetgan.data.reading.dataset import Dataset, stages_text
from duetgan.training.base.config import RunConfig
from duetgan.training.base.data import data_text, mixture_text
from duetgan.training.base.task import Outline, Task
from duetgan.training.engine.speed import Choice, forecast
from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.memory import MIB, local_processes, total_bytes
from duetgan.utils.threads import ROOM, counted, others_text

GIB = 2**30


def state_bytes(task: Task) -> int:
    """Bytes of all tensors that a checkpoint holds."""
    leaves = tree_leaves([part.state_dict() for part in task.registry().values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def check_disk(folder: Path, task: Task, count: int) -> None:
    """Raise UserError when the disk cannot hold as many checkpoints."""
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    needed, free = state_bytes(task) * count, shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{existing}: {free / MIB:.0f} MiB free, checkpoints need {needed / MIB:.0f} MiB; free some space or "
            "choose another --run-dir"
        )


def check_memory(
    config: RunConfig,
    outline: Callable[[], Outline],  # makes the networks; called where tensors have shapes only
    shape: Mapping[str, Any],  # of the images: channels, resolution
    device: torch.device,
    images: int = sys.maxsize,  # in the data set: no larger batch is proposed
) -> None:
    """Raise UserError where weights and batches alone need more memory than there is."""
    world_size, processes = (
        collectives.world_size(),
        local_processes() if device.type == "cpu" else 1,
    )
    room = total_bytes(device, several=config.several_devices) // processes
    place = f"{'this machine' if device.type == 'cpu' else 'the GPU'} has {room / GIB:,.1f} GiB for a process"
    try:
        with torch.device("meta"):
            needs = {
                name: copies * sum(p.nbytes for p in network.parameters())
                for name, (network, copies) in outline().items()
            }
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 64 bits
        # a fault of the network
        if isinstance(error, RuntimeError) and "overflow" not in str(error).lower():
            raise
        raise UserError(
            f"no memory holds networks of this size: {_remedy(config, vars(config))}"
        ) from error
    weights = sum(needs.values())
    if weights > room:
        most = max(needs, key=lambda name: needs[name])
        raise UserError(
            f"{most}: its weights and what belongs to each need {weights / GIB:,.1f} GiB or more, but {place}: "
            f"{_remedy(config, [most])}"
        )
    for _, side, batch_size in config.spans(shape["resolution"]):
        share = max(1, batch_size // world_size)
        a_pass = 1 if config.micro_batch == "auto" else min(config.micro_limit or share, share)
        spec = ImageSpec.read(shape).at(side)
        need = (share + 4 * a_pass) * spec.values  # bytes; a pass has them as floats
        if weights + need > room:
            fits = min(images, int((room - weights) / need * share) * world_size)
            raise UserError(
                f"batch_size {batch_size}: {share} images of {spec} need {need / GIB:,.1f} GiB or more, but {place}"
                f"; a --batch-size of {fits} might be held, and training needs room besides"
            )


def _remedy(config: RunConfig, names: Iterable[str]) -> str:
    """The whole number in these sections that is most above its default."""
    numbers = [
        (value / default, f"make {name}.{key} {value} smaller")
        for name in names
        if hasattr(section := getattr(config, name), "__dict__")
        for key, default in vars(type(section)()).items()
        if isinstance(default, int)
        and default > 0
        and isinstance(value := getattr(section, key), int)
    ]
    return max(numbers, default=(0.0, "make it smaller"))[1]


def plan_rows(
    config: RunConfig,
    task: Task,
    reader: Dataset,
    val_reader: Dataset | None,
    reading: str,
    device: torch.device,
    choice: Choice,
) -> dict[str, str]:
    """The preflight's table: label -> value. `reading`: what was measured of it, in words."""
    world, images = collectives.world_size(), task.images_at(config.steps)
    rows = {
        "task": config.task,
        "device": f"{device} x {world} process{'es' * (world > 1)}, {counted(torch.get_num_threads())}"
        + f"; busy: {others_text(choice.others)}" * (choice.others > ROOM),
        "precision": choice.text or config.precision,
        "training data": data_text(reader),
        **({} if reader.synthetic is None else {"synthetic data": mixture_text(config, reader)}),
        "held-out data": data_text(val_reader) if val_reader else "none (data.val_path is not set)",
        "reading": reading,
    }
    spans = config.spans(reader.resolution)
    if len(spans) == 1:
        rows["batch"] = (
            f"{config.batch_size} global = {world} x {config.share(world)}, in micro-batches of {config.micro(world)}"
            + (", halved where memory runs out" if config.micro_batch == "auto" else "")
        )
    else:
        rows["levels"] = stages_text(reader, [side for _, side, _ in spans])
    if max(size for _, _, size in spans) > len(reader):
        unit = config.batch_unit(world)
        fits = max(unit, len(reader) // unit * unit)
        remedy = f"; make batch_size {fits}" if fits < config.batch_size else ""
        rows["warning"] = f"batch larger than the data set: each batch holds repeats{remedy}"
    rows["length"] = (
        f"{config.steps:,} steps = {images:,} images = {images / len(reader):.1f} epochs"
    )
    rows |= {"time": takes} if (takes := forecast(choice, images)) else {}
    for name, section in vars(config).items():
        if isinstance(section, OptimizerConfig):
            rows[name.replace("_", " ")] = schedule_text(
                section, config.schedule_steps, config.batch_size
            )
    rows |= task.describe()
    for name, (network, _) in task.networks().items():
        rows[f"{name} parameters"] = f"{sum(p.numel() for p in network.parameters()):,}"
    saving = config.checkpoint
    rows["checkpoint"] = (
        f"about {state_bytes(task) / MIB:.1f} MiB, every {saving.every} steps, {saving.keep} kept and the best"
        + (f", and every {saving.keep_every} for good" if saving.keep_every else "")
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
    if config.warmup_steps >= steps:
        text += f"; warning: the run of {steps} steps ends within the warm-up: make warmup_steps smaller"
    if config.schedule != "constant":
        shown = (steps // 4, steps // 2, 3 * steps // 4, steps - 1)
        text += f", {config.schedule}: " + ", ".join(
            f"{config.lr_at(step, steps):.2g} at {step}" for step in shown
        )
    for key, value in (
        ("norm", config.clip_norm),
        ("value", config.clip_value),
        ("ratio", config.clip_adaptive),
    ):
        text += f", clipped at {key} {value:g}" if value else ""
    return text


class PeakBytes(TorchDispatchMode):
    """Inside the block, counts the bytes of the tensors that are made there: `live` now, `peak` at
    most. Tensors that share a storage count once, those that share one of `known` not at all.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: WeakIdKeyDictionary = WeakIdKeyDictionary(
            {tensor.untyped_storage(): 0 for tensor in known}
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()) not in self._storages
            ):
                self._storages[storage] = size = storage.nbytes()
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def activation_bytes(network: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes at most of a forward and a backward pass, which are done, besides network, gradients
    and inputs.
    """
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    with PeakBytes([*network.parameters(), *network.buffers(), *inputs]) as bytes_:
        outputs = [
            x for x in tree_leaves(network(*inputs)) if isinstance(x, Tensor) and x.requires_grad
        ]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return bytes_.peak


def model_summary(task: Task, name: str, micro: int, *, layers: bool = True) -> str:
    """A network's memory in a training step of this micro-batch; `layers`: below each layer's shape
    and parameters.
    """
    network, inputs = task.networks()[name]
    clone = copy.deepcopy(network).train()  # a forward pass changes statistics
    for key, parameter in clone.named_parameters():
        parameter.requires_grad_(task.trains(name, key))
    # BatchNorm refuses one sample
    two = tuple(tensor.repeat(2, *[1] * (tensor.ndim - 1)) for tensor in inputs)
    activations = activation_bytes(clone, two) / len(two[0]) * micro
    weights = 5 * sum(p.nbytes for p in network.parameters())
    memory = (
        f"memory of its training step: about {(activations + weights) / GIB:.2f} GiB (activations "
        f"{activations / MIB:.0f} MiB in fp32 at {micro} samples; weights, gradients, moments and average "
        f"{weights / MIB:.0f} MiB)"
    )
    if not layers:
        return f"{name}: {memory}"
    table = task.layer_table(name) or _torchinfo(
        copy.deepcopy(network).requires_grad_(True), inputs
    )
    return f"{name}\n{table}\n{memory}"


def _torchinfo(network: nn.Module, inputs: tuple[Any, ...]) -> str:
    # torchinfo counts multiply-adds with deprecated calls
    with warnings.catch_warnings(action="ignore"):
        shown: Any = {"col_names": ("output_size", "num_params"), "row_settings": ("var_names",)}
        info = torchinfo.summary(network, input_data=list(inputs), depth=4, verbose=0, **shown)
    # it sees modules only, not the functional layers
    return str(info).split("Total mult-adds")[0].rstrip("=\n ")
