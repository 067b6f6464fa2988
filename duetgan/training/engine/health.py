"""Checks during training: equal weights on all ranks, missing ranks, and causes of failed steps."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import shorten

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Stateful
from duetgan.training.engine.loop import BrokenWeights, Callback, Loop
from duetgan.training.engine.rollback import stop_broken
from duetgan.utils import seeding
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import Heartbeat, silent_ranks
from duetgan.utils.distributed.launch import LAUNCHED, REMEDY, under_launcher
from duetgan.utils.errors import Expected, TrainingHalted
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.machine import ran_out
from duetgan.utils.runlog.run_folder import RunFolder


def shared_tensors(registry: Mapping[str, Stateful]) -> dict[str, list[Tensor]]:
    """Return the tensors that must be equal on all ranks, by the name of their object.

    These are all tensors in the state dicts of the objects in `registry`, such as weights, averages
    and optimizer moments. Floats in a state dict become 0-d tensors. An object without tensors and
    floats is left out.
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
    """Raise TrainingHalted on all ranks unless the `shared_tensors` of all ranks are bit-identical.

    The message contains `step`, the number of updates made.
    """
    different = collectives.unequal_ranks(shared_tensors(registry), device)
    if not different:
        return
    parts = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in different.items()]
    raise TrainingHalted(
        f"the processes no longer hold the same numbers after step {step} ({'; '.join(parts)} "
        "differ from the others'); a fault of memory, of the network or of this program: start "
        "again from the last checkpoint, without that machine if it happens again"
    )


class EqualWeights(Callback):
    """A callback that calls `check_equal` every `interval` steps."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, loop: Loop, metrics: Mapping[str, object]) -> None:
        if loop.step % self.interval == 0:
            check_equal(loop.task.registry(), loop.step, loop.loader.device)


class FirstStep(Callback):
    """A callback that sets the timeout of collective operations after the first step.

    It is `distributed.start_timeout` during the first step, and `distributed.timeout` later.
    """

    def __init__(self) -> None:
        self.is_done = False

    def after_step(self, loop: Loop, metrics: Mapping[str, object]) -> None:
        if not self.is_done:
            collectives.set_timeout(loop.config.distributed.timeout)
        self.is_done = True


class Beat(Callback):
    """A callback that passes the number of each step to this process's heartbeat."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def before_step(self, loop: Loop) -> None:
        self.heartbeat.step = loop.step


@contextmanager
def explaining(loop: Loop) -> Iterator[None]:
    """Replace an error of the block by TrainingHalted with a remedy, if its cause is known."""
    try:
        yield
    except Expected:
        raise
    except BrokenWeights as error:
        raise stop_broken(loop, str(error)) from error
    except (RuntimeError, MemoryError, ValueError) as error:
        resolution = loop.task.shape["resolution"]
        reason = explain(error, loop.config, loop.step, resolution)
        if reason is None:
            raise
        raise TrainingHalted(reason, rank_specific=True) from error


def explain(
    error: BaseException, config: RunConfig, step: int, resolution: int | str
) -> str | None:
    """Return a text with the cause of a failed step and a remedy; None if the cause is unknown.

    `error` was raised in the step. `resolution` is that of the images.
    """
    if ran_out(error):
        spans = [span for span in config.spans(resolution) if span[0] <= step]
        _, side, batch_size = spans[-1]
        spec = ImageSpec.of(1, resolution).at(side)
        config = config.changed(batch_size=batch_size)
        world_size = collectives.world_size()
        processes = "process" if world_size == 1 else "processes"
        return (
            f"memory ran out at step {step}: batch_size {config.batch_size} over {world_size} "
            f"{processes}, at most {config.micro(world_size)} samples of {spec} a forward "
            f"pass, {config.precision}. What helps: a smaller --micro-batch (same global batch), "
            "--precision bf16, a network's activation_checkpointing, smaller networks or images; "
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


def lost_rank(folder: RunFolder, step: int, error: BaseException) -> TrainingHalted:
    """Return the exception to raise after a collective operation failed with `error`.

    The message names the missing ranks, if they are known. The lowest remaining rank writes the
    message into status.json, since rank 0 may be missing, and prints it. The message is not printed
    if the launcher itself reports the killed processes.
    """
    if under_launcher():
        # Otherwise torchrun would end this rank before it has reported the reason.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, world_size = collectives.rank(), collectives.world_size()
    missing = silent_ranks(folder.path, world_size, own_rank=rank)
    present = set(range(world_size)) - {silent.rank for silent in missing}
    reports = rank == min(present)
    reason = "; ".join(silent.reason for silent in missing[:4])
    reason = reason or "the ranks lost touch with each other"
    # gloo's messages begin with the location in its source, "[/.../pair.cc:545] ".
    detail = re.sub(r"^\[\S+\]\s*", "", str(error).strip().split("\n")[0])
    detail = shorten(detail, 120, placeholder=" ...")
    launcher_reports = LAUNCHED in os.environ and missing and all(s.gone for s in missing)
    quiet = not reports or bool(launcher_reports)
    halted = TrainingHalted(f"{reason} ({detail}); {REMEDY}", rank_specific=reports, quiet=quiet)
    if reports and (folder.path / "config.yaml").is_file():
        folder.write_status("failed", step, str(halted), halted.exit_code)
    return halted
