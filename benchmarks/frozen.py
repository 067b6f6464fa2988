"""An epoch of training a frozen network's head: what is frozen computed once, against computed in every step.

`python benchmarks/frozen.py [--json] [--model NAME] [--side PX] [--images N] [--unfreeze STAGE ...] [--repeats N]`. Two
trainings of the same recipe, with random weights and images of noise, take an epoch each in turn; all of a step counts.
`first_epoch_ratio` and `later_epoch_ratio`: uncached seconds over cached ones, in the first epoch, which fills the
cache, and the median of those that follow. `repaid_epochs`: after how many the cache has paid for itself.
"""

import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness import parser_of, show
from duetgan.data.packing.records import pack_arrays
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.run import prepare
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.machine import tune_malloc
from duetgan.utils.runlog.run_folder import RunFolder

BATCH = 32
MODES = {"uncached": 0.0, "cached": 16.0}  # finetune.cache, in GiB


def tree(images: Path, model: str, trained: list[str], cache: float, steps: int) -> dict[str, Any]:
    """A recipe: the head alone, and what else trains, on images that are mirrored at random."""
    return {
        "task": "classifier",
        "steps": steps,
        "batch_size": BATCH,
        "precision": "fp32",
        "data": {"path": str(images)},
        "model": {"name": model},
        "finetune": {"unfreeze": dict.fromkeys(["head", *trained], 0), "cache": cache},
        "optimizer": {"name": "adamw", "lr": 0.001},
        "augment": {"flip": True},
        "log": {"tensorboard": False, "samples_every": 0},
    }


def epoch(loop: Loop, steps: int) -> float:
    """Seconds of so many steps of the loop."""
    started, batches = time.perf_counter(), loop.batches()
    for _ in range(steps):
        loop.window.add(loop.task.step(batches, loop.step))
        loop.step += 1
    loop.window.take()  # waits for the device
    return time.perf_counter() - started


def measure(options: Any, folder: Path, device: torch.device) -> dict[str, float]:
    """Alternate the epochs of both trainings."""
    images, steps = folder / "images.lmdb", -(-options.images // BATCH)
    noise = np.random.default_rng(0).integers(0, 256, (options.images, 3, options.side, options.side), dtype=np.uint8)
    pack_arrays(images, noise, labels=np.arange(options.images) % 10, classes=[str(label) for label in range(10)])
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        loops = {}
        for mode, cache in MODES.items():
            recipe = tree(images, options.model, options.unfreeze, cache, (options.repeats + 1) * steps)
            run = RunFolder(folder / mode)
            loops[mode] = prepare(build_run_config(recipe, [], "benchmark"), run, device)
            run.open()
            stack.callback(run.close)
            stack.enter_context(closing(loops[mode].loader))
        for _ in range(options.repeats + 1):
            for mode, loop in loops.items():
                seconds[mode].append(epoch(loop, steps))
    plain, (first, *later) = statistics.median(seconds["uncached"][1:]), seconds["cached"]
    after = statistics.median(later)
    return {
        "uncached_epoch_s": plain,
        "first_cached_epoch_s": first,
        "later_cached_epoch_s": after,
        "first_epoch_ratio": plain / first,
        "later_epoch_ratio": plain / after,
        "repaid_epochs": (first - after) / (plain - after),
    }


def main(argv: list[str]) -> None:
    parser = parser_of("frozen", __doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--side", type=int, default=128, help="px of the images")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--unfreeze", nargs="*", default=[], help="stages that train besides the head, such as layer4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device")
    options = parser.parse_args(argv)
    device, load = choose_device(options.device), os.getloadavg()[0]
    if device.type == "cpu":
        tune_malloc()  # as training does
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = measure(options, Path(folder), device)
    result |= {"images": options.images, "device": str(device), "threads": torch.get_num_threads(), "load_before": load}
    show(result | {"model": options.model, "side": options.side}, as_json=options.json)


if __name__ == "__main__":
    sys.exit(run_cli(main))
