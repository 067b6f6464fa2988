"""What two ranks train, each on a device of its own or both on the CPU; and faults of theirs.

All run in the device's mode: torch writes some gradients in another form under any mode of Python's, which differs in
rounding.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from duetgan.models import batchnorm
from duetgan.training.engine import health
from duetgan.training.gan.task import GanTask
from duetgan.utils.distributed import collectives
from tests.accelerator import device, streams, trainings
from tests.accelerator.cases import planted, refused, snapshots_take_the_cpus_tensors
from tests.accelerator.ranks import group
from tests.end_to_end.helpers import train_in_process
from tests.slim import slim_down

# on the device with torch's SyncBatchNorm, in float64: its sums have another order than those of the CPU's
TORCHS = "classifier, torch's SyncBatchNorm"
FAST = {"GAN": trainings.gan(), TORCHS: trainings.classifier()}
SLOW = {
    "classifier": trainings.classifier(),
    "GAN, every loss, bf16": trainings.gan("gan-losses", precision="bf16"),
    "GAN, adaptive augmentation, fp16": trainings.gan("gan-ada", precision="fp16"),
    "GAN, gradients of each loss": trainings.gan("gan-apart"),
    "GAN, growing": trainings.gan("gan-growing"),
    "GAN, compressed": trainings.gan(distributed={"compress": "bf16"}),
    "R3GAN": trainings.gan("gan-r3gan"),
    "DCGAN": trainings.gan("gan-dcgan"),
    "classifier, bf16": trainings.classifier(px=32, precision="bf16"),
    "classifier, each rank's own statistics": trainings.classifier(sync_bn="off", micro_batch=2),
    "classifier, compressed": trainings.classifier(distributed={"compress": "bf16"}),
    "classifier, unfrozen by and by": trainings.classifier(finetune={"unfreeze": {"layer4": 1, "head": 0}}),
}
TREES = FAST | SLOW
synchronise = batchnorm.synchronise_batchnorm


@contextmanager
def set_up() -> Iterator[None]:
    """This process, with the device."""
    slim_down()
    device.install()
    group.install()
    snapshots_take_the_cpus_tensors()
    with device.Mode(), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def joined(where: str) -> Iterator[torch.device]:
    """This process's device, and its place in the group; the next group meets elsewhere."""
    place = collectives.choose_device(where)
    collectives.start(place)
    yield place
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = collectives.broadcast_object(probe.getsockname()[1])
    collectives.stop()
    os.environ["MASTER_PORT"] = str(port)


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def cpus_batchnorm(convert: Any) -> Any:
    return lambda model: synchronise(model, torch.device("cpu"))


def trained(folder: Path, name: str, place: torch.device) -> dict[str, Any]:
    if name == TORCHS:
        with in_float64():
            return trainings.run(folder, TREES[name], str(place))
    with planted(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", cpus_batchnorm):
        return trainings.run(folder, TREES[name], str(place))


def be_a_rank(out: Path, folder: Path, names: list[str]) -> None:
    """Trainings on the CPU and on a device."""
    found: dict[str, Any] = {}
    with set_up():
        for where in ("cpu", "sim"):
            with joined(where) as place:
                found[where] = {name: trained(folder, name, place) for name in names}
                rank = collectives.rank()
        found["place"], found["bytes"] = str(place), [memory.peak for memory in device.memory]
        found["chosen"] = sorted(streams.chosen)
    torch.save(found, out.with_suffix(f".{rank}"))


def not_copied_back(add: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, **more: add(tensor.cpu(), group=collectives._control, **more)


def on_the_cpu(add: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor: add(tensor.cpu())


def not_waited_for(add: Callable[..., Any]) -> Callable[..., Any]:
    def begun(tensor: Any, **more: Any) -> Any:
        work = add(tensor, **more)
        if work is not None:
            work.wait = work.work.wait
        return work

    return begun


def asked_for(add: Callable[..., Any]) -> Callable[..., Any]:
    def known(tensor: Any) -> Any:
        add(tensor).sum().item()
        return tensor

    return known


SAME = "a rank that takes the first device"
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a sum on the CPU that is not copied back": (dist, "all_reduce", not_copied_back),
    "an .item() of a sum over the ranks": (collectives, "all_reduce_sum_", asked_for),
    "a CPU tensor in the devices' group": (collectives, "all_reduce_sum_", on_the_cpu),
    "gradients that are not waited for": (dist, "all_reduce", not_waited_for),
}


def checked(step: Any) -> Any:
    """A step, and whether the ranks hold the same after it."""

    def run(self: GanTask, batches: Any, number: int) -> Any:
        found = step(self, batches, number)
        health.check_equal(self.registry(), number, self.device)
        return found

    return run


def noticed(folder: Path, fault: str, place: torch.device) -> str:
    """What is seen of a fault in two steps; empty: nothing."""
    try:
        with planted(*FAULTS[fault]):
            return "; ".join(*trainings.run(folder, trainings.gan("gan-ada"), str(place), 2)["waits"])
    except Exception as error:
        return str(error)


def at_fault(out: Path, folder: Path) -> None:
    """Faults, the first of which is a rank that does not look at LOCAL_RANK."""
    with set_up():
        with joined("sim:0") as place:
            found = {SAME: refused(dist.all_reduce, torch.ones(1, device=place))}
        with joined("sim") as place, planted(GanTask, "step", checked):
            found |= {fault: noticed(folder, fault, place) for fault in FAULTS}
            rank = collectives.rank()
    torch.save(found, out.with_suffix(f".{rank}"))


def train(run: Path, config: Path, where: str, *more: str) -> int:
    """`train.py`, which joins and leaves the group itself."""
    with set_up(), planted(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", cpus_batchnorm):
        return train_in_process(config, run, "--device", where, *more)
