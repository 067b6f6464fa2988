"""A GAN's training step: images per second in bf16 and fp32 (channels_last) against fp32 NCHW, where the time goes, and
how near the step comes to its own convolutions run bare.

`python benchmarks/gan_step.py [--json] [--config FILE] [--repeats N] [--device D]`. The settings alternate in one run;
figures are medians of the repeats. Images are random: the time of a step does not depend on them. NAME_conv_share is
the bare time of all dense convolutions of the steps (same shapes, type and layout; each gradient as often as the steps
take it) over the time of the steps.
"""

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.gan.convolutions import Recorder, bare_seconds, flops
from benchmarks.harness import median_ratio, parser_of, show
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.training.base.phases import UNMARKED, PhaseClock, listening, phase
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.task import GanTask
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import tune_malloc

Result = dict[str, float | int | str]
MEMORY_STEPS = 2  # the first one takes every penalty


def settings(config: GanConfig) -> dict[str, GanConfig]:
    """What is compared, by name."""
    plain = {"bf16": ("bf16", True), "fp32": ("fp32", True), "fp32_nchw": ("fp32", False)}
    return {
        name: config.changed(precision=precision, channels_last=channels_last)
        for name, (precision, channels_last) in plain.items()
    }


class Timed:
    """A task with its loader, and what its steps took."""

    def __init__(self, config: GanConfig, reader: Dataset, device: torch.device) -> None:
        self.config, self.device, self.at = config, device, 0
        self.task = GanTask(config, reader, None, device)
        sampler = GlobalSampler(len(reader), batch_size=config.batch_size, seed=0)
        self.loader = InfiniteLoader(reader, sampler, device=device, prefetch=0 if device.type == "cpu" else 2)
        self.seconds: list[float] = []  # of a step, a repeat
        self.phases: list[dict[str, float]] = []  # name -> seconds of a step, a repeat
        self.bare: list[float] = []  # seconds of a step's convolutions, a repeat

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.task.step(self._batches(), self.at)
            self.at += 1
        self._wait()

    def record(self, count: int) -> None:
        """Note the convolutions of `count` steps."""
        recorder = Recorder(channels_last=self.config.channels_last)
        with recorder:
            self.steps(count)
        self.calls = {call: number / count for call, number in recorder.calls.items()}

    def repeat(self, count: int) -> None:
        """Time `count` steps, and the convolutions of one."""
        self._wait()
        # looking at the clock between phases costs an accelerator its queue, the CPU nothing
        apart = self.device.type != "cpu"
        if apart:
            started = time.perf_counter()
            self.steps(count)
            self.seconds.append((time.perf_counter() - started) / count)
        clock = PhaseClock(self._wait, time.perf_counter)
        with listening(clock), phase(UNMARKED):  # a phase around all of it: its end is on the clock
            self.steps(count)
        self.phases.append({name: seconds / count for name, seconds in clock.seconds.items()})
        if not apart:
            self.seconds.append(sum(self.phases[-1].values()))
        self.bare.append(bare_seconds(self.calls, self.device))

    def result(self, name: str) -> Result:
        """Medians, in names of the flat result."""
        flop = flops(self.calls)
        found: Result = {
            f"{name}_images_per_second": self.config.batch_size / statistics.median(self.seconds),
            f"{name}_conv_share": median_ratio(self.bare, self.seconds),
            f"{name}_gflops": flop / statistics.median(self.seconds) / 1e9,
            f"{name}_bare_gflops": flop / statistics.median(self.bare) / 1e9,
            f"{name}_bare_ms": 1000 * statistics.median(self.bare),
            f"{name}_step_ms": 1000 * statistics.median(self.seconds),
        }
        for part in sorted({part for run in self.phases for part in run}):
            seconds = statistics.median(run.get(part, 0.0) for run in self.phases)
            found[f"{name}_phase_{part.replace('/', '_')}_ms"] = 1000 * seconds
        return found

    def _batches(self) -> Iterator[Batch]:
        while True:
            with phase("data"):
                batch = next(self.loader)
            yield batch

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@contextlib.contextmanager
def random_images(size: int, channels: int, classes: int) -> Iterator[Dataset]:
    """1,024 packed images of random pixels."""
    with tempfile.TemporaryDirectory() as folder:
        images = np.random.default_rng(0).integers(0, 256, (1024, channels, size, size), dtype=np.uint8)
        labels = np.arange(1024) % classes if classes else None
        path = Path(folder) / "random.lmdb"
        pack_arrays(path, images, labels=labels, classes=[str(c) for c in range(classes)])
        with contextlib.closing(Dataset(path)) as reader:
            yield reader


def peak_memory(config: GanConfig, size: int, channels: int, classes: int, device: str) -> tuple[float, float]:
    """MiB that a process of its own holds at most in its first steps: in all, and above what it held before them."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # not forked: memory of this process would count
        return pool.apply(_peak_memory, (config, size, channels, classes, device))


def _peak_memory(config: GanConfig, size: int, channels: int, classes: int, name: str) -> tuple[float, float]:
    device = torch.device(name)
    if device.type == "cpu":
        tune_malloc()
    with random_images(size, channels, classes) as reader:
        timed = Timed(config, reader, device)
        if device.type != "cpu":
            before = torch.accelerator.memory_allocated(device)
            timed.steps(MEMORY_STEPS)
            peak = torch.accelerator.max_memory_allocated(device)
            return peak / 2**20, (peak - before) / 2**20
        before = resident("VmRSS")
        timed.steps(MEMORY_STEPS)
        peak = resident("VmHWM")
        return peak / 2**20, (peak - before) / 2**20


def resident(name: str) -> int:
    """Bytes of this process in main memory: VmRSS now, VmHWM at most so far (proc(5)); 0 where that is not told."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def measure(config: GanConfig, reader: Dataset, device: torch.device, repeats: int, steps: int) -> Result:
    """Medians over alternating repeats of `steps` steps, a multiple of the penalties' intervals: each has its share."""
    timed = {name: Timed(each, reader, device) for name, each in settings(config).items()}
    for each in timed.values():
        each.steps(1)
        each.at = 0
        each.record(steps)
    for _ in range(repeats):
        for each in timed.values():
            each.repeat(steps)
    found: Result = {}
    for name, each in timed.items():
        found |= each.result(name)
    baseline = timed["fp32_nchw"].seconds
    for name in ("bf16", "fp32"):
        found[f"{name}_vs_fp32_nchw_ratio"] = median_ratio(baseline, timed[name].seconds)
    task = timed["bf16"].task
    return found | {
        "generator_parameters": sum(p.numel() for p in task.generator.parameters()),
        "discriminator_parameters": sum(p.numel() for p in task.discriminator.parameters()),
    }


def main(argv: list[str]) -> None:
    parser = parser_of("gan_step", __doc__)
    parser.add_argument("--config", default="configs/bench_gan_step.yaml")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="a repeat; a multiple of the penalties' intervals")
    parser.add_argument("--size", type=int, default=32, help="px of the random images")
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--classes", type=int, default=0, help="of the random images; 0: unconditional")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    config = build_run_config(read_yaml(options.config), [], options.config)
    if not isinstance(config, GanConfig):
        raise UserError(f"{options.config}: not a recipe of task gan")
    check_steps(config, options.steps)
    device = torch.device(options.device)
    images = (options.size, options.channels, options.classes)
    if device.type == "cpu":
        tune_malloc()  # as training does
    with random_images(*images) as reader:
        result = measure(config, reader, device, options.repeats, options.steps)
    for name, each in settings(config).items():
        peak, above = peak_memory(each, *images, options.device)
        result |= {f"{name}_peak_mib": peak, f"{name}_step_peak_mib": above}
    result |= {
        "batch_size": config.batch_size,
        "repeats": options.repeats,
        "steps": options.steps,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "load_1min": os.getloadavg()[0],
    }
    show(result, as_json=options.json)


def check_steps(config: GanConfig, steps: int) -> None:
    """Raise UserError unless a repeat of `steps` steps holds each penalty as often as training does."""
    loss = config.loss
    intervals = {
        "loss.r1_interval": loss.r1_interval if loss.r1_gamma > 0 or loss.r2_gamma > 0 else 0,
        "loss.path_length_interval": loss.path_length_interval if loss.path_length_weight > 0 else 0,
    }
    for name, interval in intervals.items():
        if steps < 1 or (interval and steps % interval):
            raise UserError(f"--steps {steps} is not a multiple of {name} {interval}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
