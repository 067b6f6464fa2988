"""What two ranks train, each on a device of its own or both on the CPU.

All run in the device's mode: torch writes some gradients in another form under any mode of Python's, which differs in
rounding.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from duetgan.models import batchnorm
from duetgan.utils.distributed import collectives
from tests.accelerator import device, graph_cases, streams, trainings
from tests.accelerator.cases import planted, snapshots_take_the_cpus_tensors
from tests.accelerator.ranks import group
from tests.slim import slim_down

FAST = {"GAN": trainings.gan(), "classifier": trainings.classifier()}
SLOW = {
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


def cpus_batchnorm(_: Any) -> Any:
    return batchnorm.CPUSyncBatchNorm2d


def trained(folder: Path, name: str, place: torch.device) -> dict[str, Any]:
    with planted(batchnorm, "SyncBatchNorm2d", cpus_batchnorm):
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


def replay_as_a_rank(out: Path, folder: Path, names: list[str]) -> None:
    """Compare trainings with and without graphs on devices."""
    with set_up(), joined("sim") as place, planted(batchnorm, "SyncBatchNorm2d", cpus_batchnorm):
        found = {name: graph_cases.compared(folder, TREES[name], graph_cases.FEW, str(place)) for name in names}
        rank = collectives.rank()
    torch.save(found, out.with_suffix(f".{rank}"))
