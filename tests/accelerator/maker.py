"""The device for `python -m benchmarks.gpu --small --maker tests.accelerator.maker`."""

from tests.accelerator import device
from tests.accelerator.cases import snapshots_take_the_cpus_tensors
from tests.accelerator.device import Mode, waits

__all__ = ["Mode", "install", "waits"]


def install() -> None:
    """With checkpoints, too."""
    device.install()
    snapshots_take_the_cpus_tensors()
