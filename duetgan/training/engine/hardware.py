"""The precision and the number of threads of a run.

What decides them, in order:

1. The config: `precision` and `threads`, if they are not auto.
2. The run folder: a resumed run keeps the values of its first start.
3. The environment: DUET_PRECISION replaces precision auto; OMP_NUM_THREADS is kept.
4. The device (utils/machine.py): `native_precision` is the fastest precision for which it has
   instructions, and `fitting` is a thread for each core that other programs leave free. If a CPU has
   instructions for bf16, `faster_precision` (speed.py) compares it with fp32.

`prepare` (run.py) calls `settle`, whose result is saved in the run's config. `Precision`
(optim/updater.py) applies the precision: autocast, and for fp16 the loss scaler. Some layers stay
in fp32: the last ones of StyleGAN2's discriminator, and under fp16 those of the small resolutions
of both networks (models/layers/fp16.py). Training leaves torch's settings of TF32 as they are.
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
    """Set torch's threads, and return the config with the precision and the number of threads.

    Args:
        saved: Config of the run's first start; empty for a new run.

    Returns: The config, the same on all ranks, and the precision with its reason, for the plan.
    """
    precision, reason = collectives.from_main_process(lambda: _precision(config, saved, device))
    threads = collectives.from_main_process(lambda: _threads(config, saved, device))
    machine.use_threads(threads)
    config = config.changed(precision=precision)
    if device.type == "cpu":
        config = config.changed(threads=threads)
    return config, precision + reason


def _precision(config: RunConfig, saved: Tree, device: torch.device) -> tuple[str, str]:
    """Return the precision, and the reason if the config does not set it."""
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
