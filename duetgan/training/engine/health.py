"""What is checked while a run trains: that no rank is missing or holds other numbers; why a step
failed; and statistics of named layers to TensorBoard: `log.layers` and `log.layers_every`.
"""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from duetgan.models.hooks import LayerStatistics, matching_layers, merge
from duetgan.training.base.config import LogConfig, RunConfig
from duetgan.training.optim.updater import Precision
from duetgan.utils import seeding
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import silent_ranks
from duetgan.utils.distributed.launch import LAUNCHED, REMEDY, under_launcher
from duetgan.utils.errors import TrainingHalted, UserError, explained
from duetgan.utils.memory import ran_out
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Events
from duetgan.utils.text import listed


def shared_tensors(registry: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Part of the registry -> its tensors that are the same on all ranks: weights, averages,
    moments, strengths.
    """
    result = {}
    for name, part in registry.items():
        if leaves := [
            leaf for leaf in tree_leaves(part.state_dict()) if isinstance(leaf, (Tensor, float))
        ]:
            result[name] = [
                x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in leaves
            ]
    return result


def check_equal(registry: Mapping[str, Any], step: int, device: torch.device) -> None:
    """Raise TrainingHalted on all ranks if a shared tensor's bits are not the same on all of them."""
    if different := collectives.unequal_ranks(shared_tensors(registry), device):
        where = "; ".join(
            f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in different.items()
        )
        raise TrainingHalted(
            f"the processes no longer hold the same numbers after step {step} ({where} differ from the others'); "
            "a fault of memory, of the network or of this program: start again from the last checkpoint, without that "
            "machine if it happens again"
        )


def unused_parameters(registry: Mapping[str, Any]) -> str:
    """What to say of parameters that train but got no gradient in the first step; empty if there
    are none.
    """
    unused = {name: getattr(part, "unused", None) for name, part in registry.items()}
    lists = "; ".join(f"{name}: {listed(names, 4)}" for name, names in unused.items() if names)
    return lists and (
        f"no gradient reaches these parameters, so they stay as they are, but for weight decay ({lists}); freeze them "
        "(finetune.freeze) or use them"
    )


def explain(
    error: BaseException, config: RunConfig, step: int, resolution: int | str
) -> str | None:
    """Why a step failed and what to do, for failures that have nothing to do with the program; else
    None.
    """
    if ran_out(error):
        world = collectives.world_size()
        return (
            f"memory ran out at step {step}: batch_size {config.batch_size} over {world} process{'es' * (world > 1)}, "
            f"at most {config.micro(world)} samples of {resolution} px a forward pass, {config.precision}. What helps: "
            f"{', '.join(_savers(config, world))}; then {REMEDY}"
        )
    operation, lacks, _ = str(error).partition(seeding.NO_KERNEL)
    if lacks and isinstance(error, RuntimeError):
        return (
            f"deterministic true: {operation.strip()} has no deterministic form on this device; switch off what needs "
            "it (augmentations that turn or scale images do), or set deterministic false"
        )
    if "more than 1 value per channel" in str(error):
        return "BatchNorm needs more than one value a channel; give a larger micro_batch, or batch_size"
    return None


def remedy_for_broken(config: RunConfig, step: int | None) -> str:
    """Return what to do where updates are not finite. `step`: of the last sound checkpoint, None
    without one.
    """
    keys = [name for name, section in vars(config).items() if hasattr(section, "clip_norm")]
    rates = " and ".join(f"{key}.lr" for key in keys) or "the learning rate"
    calmer = f"lower the learning rate ({rates})"
    calmer += " or use --precision fp32" if config.precision != "fp32" else ""
    if step is None:
        return f"{calmer} and start in another --run-dir: no checkpoint is from before that"
    return f"{calmer}; the same command then goes on from step {step}, the last checkpoint from before that"


def _savers(config: RunConfig, world_size: int) -> list[str]:
    auto = "; auto finds one" if config.can_halve and config.micro_batch != "auto" else ""
    savers = (
        [f"a smaller --micro-batch (same global batch{auto})"]
        if config.micro(world_size) > 1
        else []
    )
    savers += ["--precision bf16"] if config.precision == "fp32" else []
    for name, section in vars(config).items():
        if getattr(section, "activation_checkpointing", True):  # on, or no network that has it
            continue
        with suppress(UserError):  # not for this backbone
            section.changed(activation_checkpointing=True)
            savers.append(f"--{name}.activation_checkpointing true")
    return savers or ["smaller networks or images"]


def lost_rank(folder: RunFolder, step: int, error: BaseException) -> TrainingHalted:
    """What to raise where a collective operation failed with `error`: it names the ranks that are
    missing, and so does status.json, for rank 0 may be one of them.

    Only the lowest rank that is left says so, and none does where the launcher reports the killed
    processes itself.
    """
    if under_launcher():
        # torchrun's, which comes before this rank has said why
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, world = collectives.rank(), collectives.world_size()
    missing = silent_ranks(folder.path, world, own=rank)
    speaks = rank == min(set(range(world)) - {silent.rank for silent in missing})
    reason = (
        "; ".join(silent.reason for silent in missing[:4]) or "the ranks lost touch with each other"
    )
    reason += f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
    # gloo begins with the place in its source, "[/.../pair.cc:545] "
    detail = shorten(
        re.sub(r"^\[\S+\]\s*", "", str(error).strip().split("\n")[0]), 120, placeholder=" ..."
    )
    quiet = not speaks or (
        LAUNCHED in os.environ and bool(missing) and all(silent.gone for silent in missing)
    )
    halted = TrainingHalted(f"{reason} ({detail}); {REMEDY}", rank_specific=speaks, quiet=quiet)
    if speaks and (folder.path / "config.yaml").is_file():
        folder.write_status("failed", step, str(halted), halted.exit_code)
    return halted


FOLDER = "layers"  # in RUN/tensorboard: TensorBoard shows it as a run of its own


class LayerLog:
    """Watches the layers that `log.layers` names, `NETWORK.LAYER`, in every `log.layers_every`-th
    step; between these there is no hook. Raises UserError for a pattern that fits no layer, before
    the first step.
    """

    def __init__(self, config: LogConfig, registry: Mapping[str, Any], folder: Path) -> None:
        self._every = config.layers_every
        self._folder = folder / "tensorboard" / FOLDER
        self._events: Events | None = None
        self._precision = next(
            (part for part in registry.values() if isinstance(part, Precision)), None
        )
        self._statistics: LayerStatistics | None = None
        if config.layers:
            networks = {
                name: part for name, part in registry.items() if isinstance(part, nn.Module)
            }
            with explained(UserError, lambda why: f"log.layers: {why}"):
                self._statistics = LayerStatistics(
                    matching_layers(nn.ModuleDict(networks), config.layers)
                )

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the step that makes `step` updates complete: at the cadence its layers are watched
        and written down.

        Waits for the device then, and only then. What torch.compile has compiled runs uncompiled in
        such a step.
        """
        if self._statistics is None or step % self._every:
            yield
            return
        scale = 1.0 if self._precision is None else self._precision.scale()
        with torch.compiler.set_stance("force_eager"), self._statistics.watching(scale):
            yield
        values = self._statistics.collect(over_ranks(self._statistics.packed()))
        if collectives.is_main():
            # what a run that died wrote beyond
            self._events = self._events or Events(self._folder, purge_step=step)
            self._events.scalars(step, values)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def over_ranks(packed: Tensor) -> Tensor:
    """The moments [layers, 2, 6] of all ranks together, on the CPU."""
    return reduce(merge, collectives.gather_objects(packed.cpu(), patient=False))
