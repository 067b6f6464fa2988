"""Measurement of the speed of training steps.

It decides `precision: auto` and `threads: auto`, and predicts the duration for the plan. On
accelerators auto is bf16 if that is native, else fp16. On CPUs it is the faster of fp32 and bf16.
The number of threads is that of the cores that other programs leave free, or half of it if that is
faster. A separate task is built for the measured steps, so that the run's networks, statistics and
draws are not touched.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median_low
from typing import NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.models.fast import Fixed, native
from duetgan.training.base import data
from duetgan.training.base.config import RunConfig, Threads
from duetgan.training.base.task import Task
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.optim.updater import Precision
from duetgan.utils import machine
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.machine import ran_out
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import duration

FORCED = "DUET_PRECISION"  # environment variable: the precision of auto, without a measurement
FIRST_STEP_LIMIT = 3.0  # seconds after which the first step is aborted
# The first step in the second precision is aborted after this multiple of the first one's time.
GIVE_UP_RATIO = 3.0
DECISIVE_RATIO = 3.0  # a precision slower by this factor is not compared any further
TARGET_SECONDS = 0.2  # duration of a step above which no larger batch is tried
# largest total seconds, one step of each kind, for a batch of four times the smallest
LARGER_LIMIT = 10.0
BUDGET = 0.6  # seconds for the comparison of precisions of similar speed
MAX_ROUNDS = 3  # largest number of rounds of this comparison
# training images below which the duration is not measured
MIN_FORECAST_IMAGES = 20_000
LONG = 24 * 3600.0  # seconds of a training above which the plan names shorter alternatives
MIN_THREADS_GAIN = 1.05  # factor by which half of the threads must be faster to be used
STOP_EARLY_RATIO = 1.5  # a precision faster by this factor in two rounds needs no third
WARNING_RATIO = 1.1  # smaller differences between precisions may be noise


class Choice(NamedTuple):
    """The precision and the number of threads of a run, and its speed."""

    precision: Fixed
    text: str  # description for the plan
    # speed divided by that of the other precision; infinite if the other was aborted
    ratio: float | None = None
    warning: str = ""
    # Seconds of one process; None if not measured. They include a GAN's penalties, averaged over
    # the steps, but not reading, compilation and evaluations.
    seconds_per_image: float | None = None
    is_lower_bound: bool = False  # True if even the smallest step was aborted
    threads: int = 0  # at the start of the run; 0: torch's default
    busy_cores: float = 0.0  # cores that other programs used during the measurement

    @property
    def images_per_second(self) -> float:
        """Images per second of one process, which must have been measured."""
        assert self.seconds_per_image is not None
        return 1 / self.seconds_per_image


class TooSlow(Exception):
    """Raised when a measured step is aborted."""


class Deadline(TorchDispatchMode):
    """A context that raises TooSlow at the first operation later than `seconds` after its start."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.end = time.perf_counter() + seconds

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if time.perf_counter() > self.end:
            raise TooSlow
        return func(*args, **(kwargs or {}))


class Trial:
    """A task for measured steps only.

    All its random draws have keys, so that it does not change any random state.
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

    def seconds(
        self, precision: Fixed, step: int | None = None, *, limit: float = math.inf
    ) -> float:
        """Return the seconds of a step; None stands for the most frequent kind of step.

        Raises TooSlow beyond `limit` seconds.
        """
        if self.precision.name != precision:
            self.precision.switch(precision)
        step = next(iter(self.step_fractions)) if step is None else step
        started = time.perf_counter()
        with Deadline(limit) if limit < math.inf else nullcontext():
            self.task.step(iter([self.batch] * 2), step)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - started


def choose(
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    *,
    already_chosen: bool = False,
    always: bool = False,
) -> Choice:
    """Choose the run's precision and number of threads, set torch's threads, and measure the speed.

    Rank 0 measures if that is needed. The result is the same on all ranks.

    Args:
        already_chosen: True if an earlier start of the run chose the config's precision.
        always: True to measure short trainings and accelerators too.
    """
    _set_threads(config.threads, device, already_chosen=already_chosen)
    forced = os.environ.get(FORCED)
    if forced not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"{FORCED}={forced}: must be fp32, bf16 or fp16")
    candidates: list[Fixed]  # precisions to compare; without a measurement the last one is used
    native_precision = None if device.type == "cpu" else native(device)
    text, warning = "", ""
    if config.precision != "auto":
        precision = config.precision
        text = f"{precision} (kept: the run began in it)" if already_chosen else precision
        candidates = [precision]
        if not (forced or native_precision or precision == "fp32"):
            candidates = ["fp32", precision]
        if (precision, native_precision) == ("bf16", "fp16"):
            warning = "bf16 is emulated by this accelerator; --precision fp16 is faster here"
    elif forced:
        candidates = [cast(Fixed, forced)]
        text = f"{forced} (auto: {FORCED} says so)"
    elif native_precision:
        candidates = [native_precision]
        text = f"{native_precision} (auto: native here)"
    else:
        candidates = ["fp32", "bf16"]
    is_short = native_precision or config.steps * config.batch_size < MIN_FORECAST_IMAGES
    if not always and (already_chosen or (is_short and len(candidates) == 1)):
        return Choice(candidates[-1], text, warning=warning, threads=torch.get_num_threads())
    choice = collectives.from_main_process(
        lambda: _measure(config, dataset, device, candidates, text)
    )
    machine.use_threads(choice.threads)
    return choice


def _set_threads(setting: Threads, device: torch.device, *, already_chosen: bool) -> None:
    if isinstance(setting, dict):
        setting = setting[min(setting)]
    if isinstance(setting, int):
        machine.use_threads(setting)
    # Runs of earlier versions recorded no number and used torch's default.
    elif already_chosen or device.type != "cpu":
        machine.use_threads(machine.max_threads())
    else:
        machine.use_threads(machine.fitting(machine.busy_since_start()))


def _measure(
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    candidates: Sequence[Fixed],
    text: str,
) -> Choice:
    """Measure the speed in the precisions `candidates`, and choose the fastest if it is auto."""
    world_size, requested = collectives.world_size(), config.precision
    method = ""
    seconds_per_image: float | None = None
    load = machine.ProgramLoad()
    count = torch.get_num_threads()
    tunes_threads = device.type == "cpu" and config.threads in ("auto", "adapt")
    tunes_threads = tunes_threads and machine.is_adjustable()
    with collectives.alone(), Bar(desc="measuring the speed of a step", unit="step", delay=1):
        try:
            seconds, seconds_per_image, is_lower_bound = time_precisions(
                config, world_size, dataset, device, candidates, try_fewer_threads=tunes_threads
            )
        except (TooSlow, RuntimeError, MemoryError) as error:
            is_lower_bound = isinstance(error, TooSlow)
            if not (is_lower_bound or ran_out(error)):
                raise
            # If the run itself does not have enough memory either, it raises its own error.
            seconds = {name: convolution_seconds(name, device) for name in candidates}
            method = ", by a convolution"
            if is_lower_bound:
                smallest = min(config.smallest_batch, config.micro(world_size))
                seconds_per_image = FIRST_STEP_LIMIT / smallest
    gc.collect()  # Frees the measured tasks before the run's task is built.
    best = min(seconds, key=seconds.__getitem__)
    slower = max(seconds, key=seconds.__getitem__)
    ratio, warning = None, ""
    if len(candidates) > 1:
        ratio = seconds[slower] / seconds[best]
    if ratio and requested == "auto":
        text = f"{best} (auto: {times(ratio)} the speed of {slower}{method})"
    elif ratio and requested != best:
        if ratio > WARNING_RATIO:
            warning = (
                f"fp32 trains at {times(ratio)} the speed of {requested} on this CPU{method}; take "
                "--precision auto"
            )
        ratio = 1 / ratio
    busy, measured_count = load.busy_cores(), torch.get_num_threads()
    if tunes_threads:  # Other programs' load may have changed during the measurement.
        fitting = machine.fitting(busy)
        count = fitting if measured_count == count else min(measured_count, fitting)
    precision = best if requested == "auto" else candidates[-1]
    return Choice(precision, text, ratio, warning, seconds_per_image, is_lower_bound, count, busy)


def times(ratio: float) -> str:
    """Describe a ratio of speeds as "1.3 times", or "more than 3 times" if a step was aborted."""
    return f"more than {GIVE_UP_RATIO:g} times" if math.isinf(ratio) else f"{ratio:.3g} times"


def time_precisions(
    config: RunConfig,
    world_size: int,
    dataset: Dataset,
    device: torch.device,
    candidates: Sequence[Fixed],
    *,
    try_fewer_threads: bool = False,
) -> tuple[dict[Fixed, float], float, bool]:
    """Measure the steps of a task in each precision of `candidates`.

    The smallest batch is measured first, then larger ones, up to steps of about TARGET_SECONDS.
    Thereby work that does not depend on the batch, such as the optimizer's, is counted once per
    step. The overhead of each further micro-batch is not included.

    Args:
        try_fewer_threads: True to halve torch's number of threads as long as that is faster.

    Returns: The seconds per image by precision, infinite if a step was aborted; the seconds per
    image of the run in the precision that it will use; True if that is only a lower bound.

    Raises TooSlow if the smallest step takes more than FIRST_STEP_LIMIT in the first precision.
    """
    micro, rank_batch = config.micro(world_size), config.rank_batch(world_size)
    smallest = size = min(config.smallest_batch, micro)
    trial = Trial(config, size, dataset, device)
    step: dict[Fixed, float] = {}  # seconds of a step
    limit = FIRST_STEP_LIMIT
    for name in candidates:
        try:
            warm_up = trial.seconds(name, limit=limit)
            step[name] = min(warm_up, trial.seconds(name))
            limit = max(0.2, GIVE_UP_RATIO * warm_up)
        except TooSlow:
            if not step:  # Without a time of another precision nothing can be chosen.
                raise
            step[name] = math.inf
    image = {name: seconds / size for name, seconds in step.items()}  # seconds per image
    slope = dict.fromkeys(candidates, 0.0)  # seconds that one more image adds to a step
    best = min(image, key=image.__getitem__)
    kinds = len(trial.step_fractions)
    while (larger := _larger_size(size, smallest, micro, step[best], slope[best], kinds)) > size:
        close = [name for name in step if image[name] < DECISIVE_RATIO * image[best]]
        del trial  # Frees its memory before the next one is built.
        trial = Trial(config, larger, dataset, device)
        previous, step = step, _alternating(trial, close)
        for name in close:
            slope[name] = max(0.0, step[name] - previous[name]) / (larger - size)
        size = larger
        image |= {name: seconds / size for name, seconds in step.items()}
        best = min(step, key=step.__getitem__)
    chosen = best if config.precision == "auto" else candidates[-1]
    if chosen not in step or math.isinf(step[chosen]):
        return image, min(GIVE_UP_RATIO * min(image.values()), image[chosen]), True
    if try_fewer_threads:
        step[chosen] = _halve_threads(trial, chosen, step[chosen])
    tries = 2 if step[chosen] < TARGET_SECONDS else 1
    (_, fraction), *rare_steps = trial.step_fractions.items()
    mean = fraction * step[chosen]
    rare = 0.0
    for number, fraction in rare_steps:
        rare += fraction * min(trial.seconds(chosen, number) for _ in range(tries))
    growth = 1 + slope[chosen] * (rank_batch - size) / step[chosen]
    return image, (mean + rare) * growth / rank_batch, False


def _alternating(trial: Trial, candidates: Sequence[Fixed]) -> dict[Fixed, float]:
    """Return the seconds of a step in each precision, the median of a few rounds.

    Two rounds are enough if one precision was clearly the fastest in both.
    """
    rounds: list[dict[Fixed, float]] = []
    started, is_clear = time.perf_counter(), False
    while len(rounds) < 2 or (
        len(rounds) < MAX_ROUNDS and time.perf_counter() - started < BUDGET and not is_clear
    ):
        rounds.append({name: trial.seconds(name) for name in candidates})
        best = min(candidates, key=rounds[0].__getitem__)
        slower = [name for name in candidates if name != best]
        is_clear = True
        for seconds in rounds:
            limit = STOP_EARLY_RATIO * seconds[best]
            is_clear = is_clear and all(seconds[name] > limit for name in slower)
    return {name: median_low(seconds[name] for seconds in rounds) for name in candidates}


def _halve_threads(trial: Trial, name: Fixed, seconds: float) -> float:
    """Halve torch's threads as long as a step gets faster than `seconds`; return its seconds then."""
    while (count := torch.get_num_threads()) > 1:
        machine.use_threads(count // 2)
        halved = trial.seconds(name)
        if halved < STOP_EARLY_RATIO * seconds:  # Otherwise a second try would change nothing.
            halved = min(halved, trial.seconds(name))
        if halved * MIN_THREADS_GAIN > seconds:
            machine.use_threads(count)
            break
        seconds = halved
    return seconds


def _larger_size(
    size: int, smallest: int, largest: int, seconds: float, slope: float, kinds: int
) -> int:
    """Return the number of samples of the next measured steps, `size` or less for none.

    They surely take TARGET_SECONDS at most, or have a few times as many samples as before.
    """
    safe, few = TARGET_SECONDS / seconds * size, 4.0 * size
    if size > smallest:
        few = min(2 * few, TARGET_SECONDS / max(slope, 1e-9)) if seconds < TARGET_SECONDS else 0
    else:
        safe *= 2  # Most of the smallest step does not depend on the batch.
        few = few if few * seconds / size * kinds <= LARGER_LIMIT else 0
    return smallest * min(largest // smallest, int(max(safe, few) / smallest + 1e-9))


def convolution_seconds(name: Fixed, device: torch.device) -> float:
    """Return the seconds of a 3x3 convolution, forward and backward, in the precision `name`.

    It stands for networks whose steps are too slow, or need too much memory, to be measured.
    """
    layer = torch.nn.utils.skip_init(torch.nn.Conv2d, 64, 64, 3, padding=1, device=device)
    torch.nn.init.constant_(layer.weight, 0.01)
    torch.nn.init.zeros_(layer.bias)
    images = torch.ones(4, 64, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    images.requires_grad_(True)
    seconds = []
    for _ in range(6):  # The first pass is a warm-up.
        started = time.perf_counter()
        with Precision(name, device).autocast():
            layer(images).sum().backward()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def forecast(choice: Choice, images: int) -> str:
    """Describe the duration of a training on `images` images for the plan; "" if not measured."""
    if choice.seconds_per_image is None or images < MIN_FORECAST_IMAGES:
        return ""
    rate = collectives.world_size() * choice.images_per_second
    if choice.is_lower_bound:
        text = f"more than {duration(images / rate)} here, at most {rate:,.3g} images/s"
    else:
        text = f"about {duration(images / rate)} here, {rate:,.3g} images/s"
    if images / rate > LONG:
        text += "; that is long: recipes named cpu are smaller (train.py --list), and "
        text += "`python quickstart.py FOLDER --minutes N` chooses what fits"
    return text


def measure_recipe(
    config_file: str, overrides: Sequence[str] = (), *, device: str | None = None
) -> Choice:
    """Measure how fast a recipe trains on this machine, and in which precision.

    `overrides` are options of train.py. The packed images must exist. Raises UserError for errors
    of the recipe, and if memory runs out.
    """
    config = build_run_config(read_yaml(config_file), list(overrides), config_file)
    with data.open_training(config.data) as dataset:
        choice = choose(config, dataset, collectives.choose_device(device), always=True)
    if choice.seconds_per_image is None:
        raise UserError(
            f"{config_file}: memory runs out in a step; take a smaller --micro-batch or smaller "
            "networks"
        )
    return choice
