"""Measure the speed of training steps on this machine."""

import math
import time
from collections.abc import Sequence
from statistics import median_low

import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.training.base import data
from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Task
from duetgan.training.engine.hardware import NATIVE, settle
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.optim.updater import Precision
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.machine import Fixed, ran_out

TARGET_SECONDS = 0.2  # duration of a measured step, if the run's batch is large enough
LARGER_LIMIT = 2.5  # seconds of a step above which no larger batch is tried
ROUNDS = 3  # number of steps of which the median counts


class Trial:
    """A task that is built only to measure the duration of its steps, on one artificial batch.

    The batch has `samples` images. The task's random draws have their own seeds, so it does not
    change any other random state.
    """

    def __init__(
        self,
        config: RunConfig,
        samples: int,
        dataset: Dataset,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.samples = samples
        self.device = device
        trial = config.for_trial(samples).changed(compile="on" if compiled else "off")
        self.task: Task = TASKS[config.task].task(trial, dataset, None, device)
        self.precision = next(
            part for part in self.task.registry().values() if isinstance(part, Precision)
        )
        # step number -> fraction of all steps, the most frequent kind first
        self.step_fractions = self.task.typical_steps(config.steps)
        shape = (samples, *dataset.spec.shape)
        images = (torch.arange(math.prod(shape)) % 251).to(torch.uint8).view(shape)
        batch = Batch(images, torch.arange(samples) % max(1, dataset.meta.labels)).to(device)
        self.batch = self.task.as_read(batch, next(iter(self.step_fractions)))

    def seconds(self, precision: Fixed, step: int | None = None) -> float:
        """Make one update in `precision`, and return its duration in seconds.

        `step` is the number of the update, which decides what the update computes: for example,
        only some updates of a GAN include penalties. If it is None, the update is of the kind that
        is most frequent in a training.
        """
        if self.precision.name != precision:
            self.precision.switch(precision)
        step = next(iter(self.step_fractions)) if step is None else step
        started = time.perf_counter()
        self.task.step(iter([self.batch] * 2), step)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - started


def faster_precision(
    config: RunConfig, text: str, dataset: Dataset, device: torch.device
) -> tuple[RunConfig, str]:
    """Measure whether bf16 or fp32 is faster on this CPU; return the config with the faster one.

    `text` is the row about the precision in the printed plan. The text that is returned replaces
    it, and names the faster precision and how many times as fast it is. Steps are measured only if
    `text` says that bf16 was chosen because the CPU has instructions for it. If nothing is
    measured, or if memory runs out, `config` and `text` are returned unchanged. Rank 0 measures for
    all ranks.
    """
    if device.type != "cpu" or text != f"bf16{NATIVE}":
        return config, text
    smallest = min(config.smallest_batch, config.micro(collectives.world_size()))

    def measure() -> dict[Fixed, float]:
        """Return a dict from precision to the median seconds of a step, measured alternately."""
        names: tuple[Fixed, Fixed] = ("fp32", "bf16")
        with collectives.alone():
            trial = Trial(config, smallest, dataset, device)
            few = min(trial.seconds(name) for name in names)
            size = _larger_size(smallest, config.micro(1), few)
            trial = Trial(config, size, dataset, device)
            rounds = [{name: trial.seconds(name) for name in names} for _ in range(ROUNDS)]
        return {name: median_low(seconds[name] for seconds in rounds) for name in names}

    try:
        seconds = collectives.from_main_process(measure)
    except (RuntimeError, MemoryError) as error:
        # If the run does not have enough memory either, it raises its own error.
        if not ran_out(error):
            raise
        return config, text
    faster = min(seconds, key=seconds.__getitem__)
    slower = max(seconds, key=seconds.__getitem__)
    ratio = seconds[slower] / seconds[faster]
    text = f"{faster} (auto: {ratio:.3g} times as fast as {slower})"
    return config.changed(precision=faster), text


def measure_recipe(
    config_file: str, overrides: Sequence[str], *, device: str | None = None
) -> tuple[Fixed, float]:
    """Return the precision in which a recipe trains on this machine, and the images per second.

    `overrides` are options of train.py that replace values of the recipe. Its images must exist.
    Raises UserError for errors of the recipe, and if memory runs out.
    """
    config = build_run_config(read_yaml(config_file), list(overrides), config_file)
    torch_device = collectives.choose_device(device)
    config, text = settle(config, {}, torch_device)
    with data.open_training(config.data) as dataset:
        config, _ = faster_precision(config, text, dataset, torch_device)
        assert config.precision != "auto"
        try:
            seconds = seconds_per_image(config, dataset, torch_device)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            raise UserError(
                f"{config_file}: memory runs out in a step; take a smaller --micro-batch or smaller "
                "networks"
            ) from error
    return config.precision, 1 / seconds


def seconds_per_image(config: RunConfig, dataset: Dataset, device: torch.device) -> float:
    """Return the training time of one process per image, in seconds.

    Steps are measured with two batch sizes; with the larger one a step takes about TARGET_SECONDS.
    The difference between the two durations gives the time of each additional image. With it, the
    duration of a step of `batch_size` images is extrapolated, and divided by their number. So work
    that does not depend on the batch size, such as the optimizer's, is counted once per step.

    The result includes a GAN's penalties, averaged over the steps. It does not include reading,
    compilation, evaluations, or the overhead of further micro-batches.
    """
    precision = Precision(config.precision, device).name
    micro = config.micro(1)
    smallest = min(config.smallest_batch, micro)
    trial = Trial(config, smallest, dataset, device)
    few = min(trial.seconds(precision) for _ in range(2))
    size = _larger_size(smallest, micro, few)
    del trial  # Frees its memory before the next one is built.
    trial = Trial(config, size, dataset, device)
    many = median_low(trial.seconds(precision) for _ in range(ROUNDS))
    mean = 0.0
    for number, fraction in trial.step_fractions.items():
        seconds = many
        if number != next(iter(trial.step_fractions)):
            seconds = min(trial.seconds(precision, number) for _ in range(2))
        mean += fraction * seconds
    slope = many / size
    if size > smallest:
        slope = max(0.0, many - few) / (size - smallest)
    growth = 1 + slope * (config.batch_size - size) / many
    return mean * growth / config.batch_size


def _larger_size(smallest: int, largest: int, seconds: float) -> int:
    """Return the larger one of the two batch sizes that are measured.

    It is a multiple of `smallest` and at most `largest`. `seconds` is the duration of a step with
    `smallest` samples. If it is above LARGER_LIMIT, `smallest` is returned.
    """
    if seconds > LARGER_LIMIT:
        return smallest
    # Most of the smallest step does not depend on the batch.
    size = max(4 * smallest, int(2 * TARGET_SECONDS / seconds * smallest))
    return smallest * min(largest // smallest, size // smallest)
