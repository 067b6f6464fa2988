"""The precision and the number of threads of a run.

Four sources are asked in this order. The first that has a value decides:

1. The config: `precision` and `threads`, if they are not auto.
2. The run folder: a resumed run keeps the values of its first start.
3. The environment variables DUET_PRECISION (a precision) and OMP_NUM_THREADS.
4. The device (utils/machine.py): `native_precision` returns the fastest precision for which the
   device has instructions. `fitting` returns one thread for each core that other programs leave
   free.

If the device decides and a CPU has instructions for bf16, `faster_precision` (speed.py) then
compares bf16 with fp32.

`prepare` (run.py) calls `settle`, whose result is saved in the run's config. `Precision`
(optim/updater.py) applies the precision: autocast, and for fp16 the loss scaler. Some layers stay
in fp32: the last ones of StyleGAN2's discriminator, and under fp16 those of the small resolutions
of both networks (models/layers/fp16.py). Training does not change torch's settings of TF32.
"""

import os

import torch

from duetgan.training.base.config import RunConfig
from duetgan.utils import machine
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.distributed import collectives

FORCED = "DUET_PRECISION"  # environment variable: the precision of auto
NATIVE = " (auto: native here)"  # reason of a precision that nothing but the device decided


def settle(config: RunConfig, saved: Tree, device: torch.device) -> tuple[RunConfig, str]:
    """Choose the precision and the number of threads, and set the number of threads of torch.

    Args:
        saved: Config of the run's first start; empty for a new run.

    Returns: The config with the precision and, on a CPU, the number of threads, the same on all
    ranks; and the precision with the reason for it, a text for the printed plan.
    """
    precision, reason = collectives.from_main_process(lambda: _precision(config, saved, device))
    threads = collectives.from_main_process(lambda: _threads(config, saved, device))
    machine.use_threads(threads)
    config = config.changed(precision=precision)
    if device.type == "cpu":
        config = config.changed(threads=threads)
    return config, precision + reason


def _precision(config: RunConfig, saved: Tree, device: torch.device) -> tuple[str, str]:
    """Return the precision, and a text with the reason; it is empty if the config sets it."""
    if config.precision != "auto":
        return config.precision, ""
    if saved.get("precision", "auto") != "auto":
        return str(saved["precision"]), " (kept: the run began in it)"
    if FORCED in os.environ:
        return os.environ[FORCED], f" (auto: {FORCED} says so)"
    return machine.native_precision(device), NATIVE


def _threads(config: RunConfig, saved: Tree, device: torch.device) -> int:
    if config.threads != "auto":
        return config.threads
    if isinstance(saved.get("threads"), int):  # The earlier machine may have had more cores.
        return min(int(saved["threads"]), machine.max_threads())
    # Runs of earlier versions recorded no number and used torch's default.
    if saved or device.type != "cpu":
        return machine.max_threads()
    return machine.fitting(machine.busy_since_start())
