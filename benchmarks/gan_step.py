"""Images per second of a GAN's training step: the recipe's own setting against the same nets in plain fp32 NCHW.

`python benchmarks/gan_step.py [--json] [--config FILE]`. One run measures both, alternating; medians of the repeats.
Pictures are random: the time of a step does not depend on them.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from data.dataset import Dataset
from data.loader import InfiniteLoader
from data.sampler import GlobalSampler
from data.writer import pack_arrays
from training.gan import GanConfig, GanTask
from training.tasks import build_run_config
from utils.cli import Parser
from utils.config import read_yaml
from utils.errors import UserError, run_cli


class Timed:
    """A task with its loader; `run(n)` takes n steps and returns images per second."""

    def __init__(self, config: GanConfig, reader: Dataset, device: torch.device) -> None:
        self.config, self.device, self.step = config, device, 0
        self.task = GanTask(config, reader, None, device)
        sampler = GlobalSampler(len(reader), batch_size=config.batch_size, seed=0)
        self.loader = InfiniteLoader(reader, sampler, device=device, prefetch=0 if device.type == "cpu" else 2)

    def run(self, steps: int) -> float:
        self._synchronise()
        started = time.perf_counter()
        for _ in range(steps):
            self.task.step(self.loader, self.step)
            self.step += 1
        self._synchronise()
        return steps * self.config.batch_size / (time.perf_counter() - started)

    def _synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(config: GanConfig, device: torch.device, repeats: int, steps: int) -> dict[str, float | int | str]:
    """Medians over alternating repeats; a multiple of the R1 interval a repeat, so that each holds its share."""
    plain = dataclasses.replace(config, precision="fp32", channels_last=False)
    with tempfile.TemporaryDirectory() as folder:
        pictures = np.random.default_rng(0).integers(0, 256, (1024, 1, 32, 32), dtype=np.uint8)
        path = Path(folder) / "random.lmdb"
        pack_arrays(path, pictures, labels=np.arange(1024) % 10, classes=[str(c) for c in range(10)])
        with contextlib.closing(Dataset(path)) as reader:
            ours, baseline = Timed(config, reader, device), Timed(plain, reader, device)
            ours.run(4), baseline.run(4)
            pairs = [(ours.run(steps), baseline.run(steps)) for _ in range(repeats)]
    return {
        "images_per_second": statistics.median(a for a, _ in pairs),
        "fp32_nchw_images_per_second": statistics.median(b for _, b in pairs),
        "ours_vs_fp32_nchw_ratio": statistics.median(a / b for a, b in pairs),
        "precision": config.precision,
        "batch_size": config.batch_size,
        "generator_parameters": sum(p.numel() for p in ours.task.generator.parameters()),
        "discriminator_parameters": sum(p.numel() for p in ours.task.discriminator.parameters()),
        "repeats": repeats,
        "steps": steps,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "load_1min": os.getloadavg()[0],
    }


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/gan_step.py", description=__doc__)
    parser.add_argument("--config", default="configs/quickstart_gan.yaml")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="a repeat; a multiple of loss.r1_interval")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="the last line is one flat JSON object")
    options = parser.parse_args(argv)
    config = build_run_config(read_yaml(options.config), [], options.config)
    if not isinstance(config, GanConfig):
        raise UserError(f"{options.config}: not a recipe of task gan")
    result = measure(config, torch.device(options.device), options.repeats, options.steps)
    for name, value in result.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_cli(main))
