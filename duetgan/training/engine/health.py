"""Checks during training: equal weights on all ranks, missing ranks, and causes of failed steps.

`LayerLog` writes statistics of layers to TensorBoard (`log.layers`, `log.layers_every`).
"""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from duetgan.models.hooks import LayerStatistics, matching_layers, merge
from duetgan.training.base.config import LogConfig, RunConfig
from duetgan.training.base.task import Stateful
from duetgan.training.optim.updater import Precision
from duetgan.utils import seeding
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import silent_ranks
from duetgan.utils.distributed.launch import LAUNCHED, REMEDY, under_launcher
from duetgan.utils.errors import TrainingHalted, UserError, explained
from duetgan.utils.machine import ran_out
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Events
from duetgan.utils.text import listed


def shared_tensors(registry: Mapping[str, Stateful]) -> dict[str, list[Tensor]]:
    """Return the tensors by object of `registry` that must be equal on all ranks.

    They are weights, averages, optimizer moments and the strength of ADA.
    """
    result = {}
    for name, part in registry.items():
        tensors = []
        for leaf in tree_leaves(part.state_dict()):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif isinstance(leaf, float):
                tensors.append(torch.tensor(leaf, dtype=torch.float64))
        if tensors:
            result[name] = tensors
    return result


def check_equal(registry: Mapping[str, Stateful], step: int, device: torch.device) -> None:
    """Raise TrainingHalted on all ranks unless their `shared_tensors` are bit-identical."""
    different = collectives.unequal_ranks(shared_tensors(registry), device)
    if not different:
        return
    parts = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in different.items()]
    raise TrainingHalted(
        f"the processes no longer hold the same numbers after step {step} ({'; '.join(parts)} "
        "differ from the others'); a fault of memory, of the network or of this program: start "
        "again from the last checkpoint, without that machine if it happens again"
    )


def unused_parameters(registry: Mapping[str, Stateful]) -> str:
    """Return a warning of trainable parameters without a gradient in the first step, or ""."""
    lists = []
    for name, part in registry.items():
        if unused := getattr(part, "unused", None):
            lists.append(f"{name}: {listed(unused, 4)}")
    if not lists:
        return ""
    return (
        "no gradient reaches these parameters, so they stay as they are, but for weight decay "
        f"({'; '.join(lists)}); freeze them (finetune.freeze) or use them"
    )


def explain(
    error: BaseException, config: RunConfig, step: int, resolution: int | str
) -> str | None:
    """Return the cause of a failed step and a remedy, or None for an unknown error."""
    if ran_out(error):
        world_size = collectives.world_size()
        processes = "process" if world_size == 1 else "processes"
        return (
            f"memory ran out at step {step}: batch_size {config.batch_size} over {world_size} "
            f"{processes}, at most {config.micro(world_size)} samples of {resolution} px a forward "
            f"pass, {config.precision}. What helps: {', '.join(_memory_savers(config, world_size))}; "
            f"then {REMEDY}"
        )
    operation, no_kernel, _ = str(error).partition(seeding.NO_KERNEL)
    if no_kernel and isinstance(error, RuntimeError):
        return (
            f"deterministic true: {operation.strip()} has no deterministic form on this device; "
            "switch off what needs it (augmentations that turn or scale images do), or set "
            "deterministic false"
        )
    if "more than 1 value per channel" in str(error):
        return "BatchNorm needs more than one value a channel; give a larger micro_batch, or batch_size"
    return None


def remedy_for_broken(config: RunConfig, step: int | None) -> str:
    """Return a remedy for updates that are not finite.

    `step` is the step of the last healthy checkpoint, None if there is none.
    """
    keys = [name for name, section in vars(config).items() if hasattr(section, "clip_norm")]
    rates = " and ".join(f"{key}.lr" for key in keys) or "the learning rate"
    remedy = f"lower the learning rate ({rates})"
    if config.precision != "fp32":
        remedy += " or use --precision fp32"
    if step is None:
        return f"{remedy} and start in another --run-dir: no checkpoint is from before that"
    return (
        f"{remedy}; the same command then goes on from step {step}, the last checkpoint from "
        "before that"
    )


def _memory_savers(config: RunConfig, world_size: int) -> list[str]:
    savers = []
    if config.micro(world_size) > 1:
        auto = "; auto finds one" if config.can_halve and config.micro_batch != "auto" else ""
        savers.append(f"a smaller --micro-batch (same global batch{auto})")
    if config.precision == "fp32":
        savers.append("--precision bf16")
    for name, section in vars(config).items():
        # It is on already, or the section has no such key.
        if getattr(section, "activation_checkpointing", True):
            continue
        with suppress(UserError):  # raised if the backbone does not support it
            section.changed(activation_checkpointing=True)
            savers.append(f"--{name}.activation_checkpointing true")
    return savers or ["smaller networks or images"]


def lost_rank(folder: RunFolder, step: int, error: BaseException) -> TrainingHalted:
    """Return the exception to raise after a collective operation failed with `error`.

    The exception names the ranks that are missing, and so does status.json, since rank 0 may be one
    of them. Only the lowest remaining rank reports them; none does if the launcher reports the
    killed processes itself.
    """
    if under_launcher():
        # Otherwise torchrun would end this rank before it has reported the reason.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, world_size = collectives.rank(), collectives.world_size()
    missing = silent_ranks(folder.path, world_size, own_rank=rank)
    present = set(range(world_size)) - {silent.rank for silent in missing}
    reports = rank == min(present)
    reasons = [silent.reason for silent in missing[:4]]
    reason = "; ".join(reasons) or "the ranks lost touch with each other"
    if len(missing) > 4:
        reason += f"; and {len(missing) - 4} more"
    # gloo's messages begin with the location in its source, "[/.../pair.cc:545] ".
    detail = re.sub(r"^\[\S+\]\s*", "", str(error).strip().split("\n")[0])
    detail = shorten(detail, 120, placeholder=" ...")
    launcher_reports = LAUNCHED in os.environ and missing and all(s.gone for s in missing)
    quiet = not reports or bool(launcher_reports)
    halted = TrainingHalted(f"{reason} ({detail}); {REMEDY}", rank_specific=reports, quiet=quiet)
    if reports and (folder.path / "config.yaml").is_file():
        folder.write_status("failed", step, str(halted), halted.exit_code)
    return halted


FOLDER = "layers"  # in RUN/tensorboard; TensorBoard shows it as a separate run


class LayerLog:
    """A log of statistics of the layers that `log.layers` names, as `NETWORK.LAYER`.

    The statistics are computed in every `log.layers_every`-th step; other steps have no hooks.
    Raises UserError before the first step for a pattern that matches no layer.
    """

    def __init__(self, config: LogConfig, registry: Mapping[str, Stateful], folder: Path) -> None:
        self._interval = config.layers_every
        self._folder = folder / "tensorboard" / FOLDER
        self._events: Events | None = None
        self._precision = next(
            (part for part in registry.values() if isinstance(part, Precision)), None
        )
        self._statistics: LayerStatistics | None = None
        if config.layers:
            networks = nn.ModuleDict(
                {name: part for name, part in registry.items() if isinstance(part, nn.Module)}
            )
            with explained(UserError, lambda reason: f"log.layers: {reason}"):
                layers = matching_layers(networks, config.layers)
                self._statistics = LayerStatistics(layers)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Log the layers' statistics of the step inside the block if they are due at `step`.

        Only such a step waits for the device, and runs compiled functions uncompiled.
        """
        if self._statistics is None or step % self._interval:
            yield
            return
        scale = 1.0 if self._precision is None else self._precision.scale()
        with torch.compiler.set_stance("force_eager"), self._statistics.watching(scale):
            yield
        values = self._statistics.collect(over_ranks(self._statistics.packed()))
        if collectives.is_main():
            # `purge_step` removes later steps of a run that was killed.
            self._events = self._events or Events(self._folder, purge_step=step)
            self._events.scalars(step, values)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def over_ranks(packed: Tensor) -> Tensor:
    """Merge the layers' moments [layers, 2, 6] of all ranks, on the CPU."""
    return reduce(merge, collectives.gather_objects(packed.cpu(), patient=False))
