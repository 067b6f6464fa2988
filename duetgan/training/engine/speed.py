"""The precision and the number of threads of a run, and the speed of its steps.

What decides them, in order:

1. The config: `precision` and `threads`, if they are not auto.
2. The run folder: a resumed run keeps the values of its first start (`resolve_auto`).
3. The environment: DUET_PRECISION replaces precision auto; with OMP_NUM_THREADS, or several ranks
   on the machine, the number of threads is not searched.
4. `choose`, before the task is built. On accelerators precision auto is bf16 if that is native,
   else fp16. On CPUs it is the faster of fp32 and bf16, which a separate task measures, so that the
   run's networks, statistics and draws are not touched; and there is a thread for each core that
   other programs leave free (`fitting` in utils/machine.py), or fewer if that is faster.
5. During the run `ThreadCount` sets the threads before each step.

`prepare` (run.py) calls `resolve_auto` and `choose`, and stores their result in the config.
`Precision` (optim/updater.py) applies the precision: autocast, and for fp16 the loss scaler. Some
layers stay in fp32: the last ones of StyleGAN2's discriminator, and under fp16 those of the small
resolutions of both networks (models/layers/fp16.py). Training leaves torch's settings of TF32 as
they are. `use_threads` (utils/machine.py) applies the number of threads.
`forecast` predicts the duration of the training from the measured speed, for the plan.
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
from duetgan.training.base import data
from duetgan.training.base.config import RunConfig, Threads
from duetgan.training.base.monitors import State
from duetgan.training.base.task import Task
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.optim.updater import Precision
from duetgan.utils import machine
from duetgan.utils.config.yaml_files import Tree, read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.machine import Fixed, native_precision, ran_out
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import duration

FORCED = "DUET_PRECISION"  # environment variable: the precision of auto, without a measurement
FIRST_STEP_LIMIT = 3.0  # seconds after which the first step is aborted
# The first step in the second precision is aborted after this multiple of the first one's time.
GIVE_UP_RATIO = 3.0
TARGET_SECONDS = 0.2  # duration of a measured step, if the run's batch is large enough
LARGER_LIMIT = 2.5  # seconds of a step above which no larger batch is tried
ROUNDS = 3  # number of steps in each precision, of which the median counts
# training images below which the duration is not measured
MIN_FORECAST_IMAGES = 20_000
LONG = 24 * 3600.0  # seconds of a training above which the plan names shorter alternatives
MIN_THREADS_GAIN = 1.05  # factor by which half of the threads must be faster to be used


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


def resolve_auto(config: RunConfig, saved: Tree) -> RunConfig:
    """Replace settings of "auto" by those that an earlier start of the run has saved."""
    resolved = {}
    for key in ("precision", "threads"):
        if key in saved and getattr(config, key) == "auto":
            resolved[key] = saved[key]
    if isinstance(resolved.get("threads"), int):  # the earlier machine may have had more cores
        resolved["threads"] = min(resolved["threads"], machine.max_threads())
    return config.changed(**resolved)


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
    candidates: list[Fixed] = ["fp32", "bf16"]  # precisions to compare
    native = None if device.type == "cpu" else native_precision(device)
    text, warning = "", ""
    if config.precision != "auto":
        candidates = [config.precision]
        text = config.precision + " (kept: the run began in it)" * already_chosen
        if (config.precision, native) == ("bf16", "fp16"):
            warning = "bf16 is emulated by this accelerator; --precision fp16 is faster here"
    elif forced:
        candidates = [cast(Fixed, forced)]
        text = f"{forced} (auto: {FORCED} says so)"
    elif native:
        candidates = [native]
        text = f"{native} (auto: native here)"
    is_short = native or config.steps * config.batch_size < MIN_FORECAST_IMAGES
    if not always and (already_chosen or (is_short and len(candidates) == 1)):
        return Choice(candidates[0], text, warning=warning, threads=torch.get_num_threads())
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
    """Measure the speed in the precisions `candidates`, and choose the fastest."""
    world_size = collectives.world_size()
    timing: tuple[dict[Fixed, float], float | None, bool] = ({}, None, False)
    load = machine.ProgramLoad()
    tunes_threads = device.type == "cpu" and config.threads == "auto"
    tunes_threads = tunes_threads and machine.is_adjustable()
    with collectives.alone(), Bar(desc="measuring the speed of a step", unit="step", delay=1):
        try:
            timing = time_precisions(
                config, world_size, dataset, device, candidates, try_fewer_threads=tunes_threads
            )
        except (RuntimeError, MemoryError) as error:
            # If the run itself does not have enough memory either, it raises its own error.
            if not ran_out(error):
                raise
    gc.collect()  # Frees the measured tasks before the run's task is built.
    seconds, seconds_per_image, is_lower_bound = timing
    precision, ratio = candidates[0], None
    if len(seconds) > 1:
        precision = min(seconds, key=seconds.__getitem__)
        slower = max(seconds, key=seconds.__getitem__)
        ratio = seconds[slower] / seconds[precision]
        text = f"{precision} (auto: {times(ratio)} the speed of {slower})"
    elif len(candidates) > 1:
        text = f"{precision} (auto: a step is too large to measure)"
    busy, count = load.busy_cores(), torch.get_num_threads()
    if tunes_threads:  # Other programs' load may have changed during the measurement.
        count = min(count, machine.fitting(busy))
    return Choice(precision, text, ratio, "", seconds_per_image, is_lower_bound, count, busy)


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
    """Measure the steps of a task in each precision of `candidates`, with two batch sizes.

    With the second size a step takes about TARGET_SECONDS. The time that one more image adds to a
    step follows from both sizes, so that work that does not depend on the batch, such as the
    optimizer's, is counted once per step. The overhead of each further micro-batch is not included.

    Args:
        try_fewer_threads: True to halve torch's number of threads as long as that is faster.

    Returns: The seconds per image by precision, infinite for one whose step was too slow and was
    aborted, {} if the first one's was; the seconds per image of the run in the precision that it
    will use; True if those are only a lower bound.
    """
    micro, rank_batch = config.micro(world_size), config.rank_batch(world_size)
    smallest = min(config.smallest_batch, micro)
    trial = Trial(config, smallest, dataset, device)
    few: dict[Fixed, float] = {}  # seconds of a step of the smallest batch
    limit = FIRST_STEP_LIMIT
    for name in candidates:
        try:
            warm_up = trial.seconds(name, limit=limit)
            few[name] = min(warm_up, trial.seconds(name))
            limit = max(0.2, GIVE_UP_RATIO * warm_up)
        except TooSlow:
            if not few:  # Without a time of another precision nothing can be chosen.
                return {}, FIRST_STEP_LIMIT / smallest, True
            few[name] = math.inf
    measured = [name for name in candidates if few[name] < math.inf]
    size = _larger_size(smallest, micro, min(few.values()))
    del trial  # Frees its memory before the next one is built.
    trial = Trial(config, size, dataset, device)
    rounds = [{name: trial.seconds(name) for name in measured} for _ in range(ROUNDS)]
    many = {name: median_low(seconds[name] for seconds in rounds) for name in measured}
    image = {name: many.get(name, math.inf) / size for name in candidates}
    chosen = min(image, key=image.__getitem__)
    if chosen not in many:
        return image, GIVE_UP_RATIO * min(image.values()), True
    if try_fewer_threads:
        many[chosen] = _halve_threads(trial, chosen, many[chosen])
    mean = 0.0
    for number, fraction in trial.step_fractions.items():
        seconds = many[chosen]
        if number != next(iter(trial.step_fractions)):
            seconds = min(trial.seconds(chosen, number) for _ in range(2))
        mean += fraction * seconds
    growth = rank_batch / size
    if size > smallest:
        slope = max(0.0, many[chosen] - few[chosen]) / (size - smallest)
        growth = 1 + slope * (rank_batch - size) / many[chosen]
    return image, mean * growth / rank_batch, False


def _larger_size(smallest: int, largest: int, seconds: float) -> int:
    """Return a larger batch size to time, a multiple of `smallest` of at most `largest`.

    A step of `smallest` samples takes `seconds`; above LARGER_LIMIT `smallest` is returned.
    """
    if seconds > LARGER_LIMIT:
        return smallest
    # Most of the smallest step does not depend on the batch.
    size = max(4 * smallest, int(2 * TARGET_SECONDS / seconds * smallest))
    return smallest * min(largest // smallest, size // smallest)


def _halve_threads(trial: Trial, name: Fixed, seconds: float) -> float:
    """Halve torch's threads as long as that is faster; return the seconds of a step afterwards.

    `seconds` is the time of a step before.
    """
    while (count := torch.get_num_threads()) > 1:
        machine.use_threads(count // 2)
        halved = min(trial.seconds(name) for _ in range(2))
        if halved * MIN_THREADS_GAIN > seconds:
            machine.use_threads(count)
            break
        seconds = halved
    return seconds


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


class ThreadCount(Callback):
    """Sets torch's number of threads before each step, and records it.

    `setting` is a mapping from first step to number; any other setting stands for the number that
    this process already uses. `--threads '{0: 2, 120: 1}'` repeats a run in which it changed.
    """

    def __init__(self, setting: Threads, device: torch.device) -> None:
        current = torch.get_num_threads()
        self.by_step: dict[int, int] = {0: current}  # first step -> threads from it on
        # what this process requests
        self.requested = setting if isinstance(setting, dict) else {0: current}
        self.is_cpu = device.type == "cpu"

    def state_dict(self) -> State:
        return {"threads": dict(self.by_step)}

    def load_state_dict(self, state: State) -> None:
        step = state["step"]
        recorded = state.get("threads", {})  # Checkpoints of earlier versions lack it.
        recorded = {first: count for first, count in recorded.items() if first <= step}
        self.by_step = recorded or self.by_step
        self.record(step, _at(self.requested, step))

    def record(self, step: int, count: int) -> None:
        """Use `count` threads from update number `step` on."""
        if count != self.at(step):
            self.by_step[step] = count

    def at(self, step: int) -> int:
        return _at(self.by_step, step)

    def before_step(self, loop: Loop) -> None:
        if loop.step in self.requested:
            self.record(loop.step, self.requested[loop.step])
        count = self.at(loop.step)
        if self.is_cpu and torch.get_num_threads() != count:
            machine.use_threads(count)


def _at(by_step: Mapping[int, int], step: int) -> int:
    return by_step[max(first for first in by_step if first <= step)]
