"""How fast a task trains here, and therefore what `precision: auto` and `threads: auto` mean and
how long a run takes.

On accelerators auto is bf16 where that is native, else fp16. On CPUs it is the faster of fp32 and
bf16, in as many threads as other programs leave cores for, or in half as many where that is faster;
measured in a few steps of a task that is made for this alone: the run's networks, statistics and
draws are not touched.
"""

import gc
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.models.fast import Fixed, native
from duetgan.training.base import data
from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Task
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.optim.updater import Precision
from duetgan.utils import threads
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.memory import ran_out
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import duration

FORCED = "DUET_PRECISION"  # environment variable: what auto means, without a measurement
FIRST = 3.0  # seconds that the first step may take, with the fewest samples
GIVEN_UP = 3.0  # times of the first candidate's after which the second one's first step is given up
CLEAR = 3.0  # so many times as slow: decided
STEP = 0.2  # seconds; batches are cut where a step would take longer
# seconds in which steps of all kinds may take four times the fewest images, whatever STEP says
LARGER = 10.0
BUDGET = 0.6  # seconds in which candidates that are close are compared
ROUNDS = 3  # of that, at most
# images of a training below which it is short, and how long it takes is not measured
FORECAST = 20_000
LONG = 24 * 3600.0  # seconds of a training above which the plan says what to take instead
FEWER = 1.05  # half of the threads are taken where a step is so many times as fast in them
PLAIN = 1.5  # times; what is so much faster in one try after another needs no further one
SLOWER = 1.1  # a precision given by hand is called slower from here on: less may be noise


class Choice(NamedTuple):
    """A run's precision, and its speed."""

    precision: Fixed
    text: str  # for the plan
    # its speed over the other candidate's; infinite: the other was given up
    ratio: float | None = None
    warning: str = ""
    # of an image, in one process and whole steps, a GAN's lazy penalties by their share; without
    # reading, compiling, evaluations. None: not measured
    seconds: float | None = None
    more: bool = False  # it takes more than that: even the smallest step was given up
    threads: int = 0  # that it begins with; 0: torch's own
    others: float = 0.0  # cores that other programs took meanwhile

    @property
    def images_per_second(self) -> float:
        """Of one process, where it was measured."""
        assert self.seconds is not None
        return 1 / self.seconds


class TooSlow(Exception):
    """A step was given up."""


class Deadline(TorchDispatchMode):
    """Raises TooSlow at the first operation that begins `seconds` after the block."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.end = time.perf_counter() + seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.perf_counter() > self.end:
            raise TooSlow
        return func(*args, **(kwargs or {}))


class Trial:
    """A task of its own for the steps that are measured: it draws by key, so nothing random is used
    up.
    """

    def __init__(
        self,
        config: RunConfig,
        samples: int,
        reader: Dataset,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.samples, self.device = samples, device
        trial = config.for_trial(samples).changed(compile="on" if compiled else "off")
        self.task: Task = TASKS[config.task].task(trial, reader, None, device)
        self.precision = next(
            part for part in self.task.registry().values() if isinstance(part, Precision)
        )
        self.shares = self.task.typical_steps(config.steps)
        shape = (samples, *reader.spec.shape)
        images = (torch.arange(math.prod(shape)) % 251).to(torch.uint8).view(shape)
        batch = Batch(images, torch.arange(samples) % max(1, reader.meta.labels)).to(device)
        self.batch = self.task.as_read(batch, next(iter(self.shares)))

    def seconds(
        self, precision: Fixed, step: int | None = None, *, limit: float = math.inf
    ) -> float:
        """What a step takes (None: the most frequent kind). Raises TooSlow beyond `limit`."""
        if self.precision.name != precision:
            self.precision.switch(precision)
        step = next(iter(self.shares)) if step is None else step
        begun = time.perf_counter()
        with Deadline(limit) if limit < math.inf else nullcontext():
            self.task.step(iter([self.batch] * 2), step)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - begun


def choose(
    config: RunConfig,
    reader: Dataset,
    device: torch.device,
    *,
    kept: bool = False,
    always: bool = False,
) -> Choice:
    """What the run trains in, and how fast: rank 0 measures where that is needed, all ranks agree.
    `kept`: an earlier start of the run has chosen. `always`: measure short trainings and
    accelerators too. Sets torch's threads.
    """
    _set_threads(config.threads, device, kept=kept)
    given, forced = config.precision, os.environ.get(FORCED)
    if forced not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"{FORCED}={forced}: must be fp32, bf16 or fp16")
    names: list[Any] = ["fp32", "bf16"]  # the candidates; the last is what is not measured
    text, warning, best = "", "", None if device.type == "cpu" else native(device)
    if given != "auto":
        text = f"{given} (kept: the run began in it)" if kept else given
        names = [given] if forced or best or given == "fp32" else ["fp32", given]
        if (given, best) == ("bf16", "fp16"):
            warning = "bf16 is emulated by this accelerator; --precision fp16 is faster here"
    elif forced or best:
        names = [forced or best]
        text = f"{names[0]} (auto: {f'{FORCED} says so' if forced else 'native here'})"
    short = best or config.steps * config.batch_size < FORECAST
    if not always and (kept or (short and len(names) == 1)):
        return Choice(names[-1], text, warning=warning, threads=torch.get_num_threads())
    choice = collectives.from_main_process(lambda: _measured(config, reader, device, names, text))
    torch.set_num_threads(choice.threads)
    return choice


def _set_threads(setting: Any, device: torch.device, *, kept: bool) -> None:
    """The threads that the run begins in, where they are given or nothing is measured."""
    if isinstance(setting, dict):
        setting = setting[min(setting)]
    # an earlier version's run had torch's own number
    if isinstance(setting, int) or kept or device.type != "cpu":
        torch.set_num_threads(setting if isinstance(setting, int) else threads.most())
    else:
        torch.set_num_threads(threads.fitting(threads.seen()))


def _measured(
    config: RunConfig, reader: Dataset, device: torch.device, names: Sequence[Fixed], text: str
) -> Choice:
    """The faster of `names`, or the one that the config gives."""
    by, world, given = "", collectives.world_size(), config.precision
    seconds: float | None = None
    load, count = threads.Load(), torch.get_num_threads()
    free = threads.free() and device.type == "cpu" and config.threads in ("auto", "adapt")
    with collectives.alone(), Bar(desc="measuring the speed of a step", unit="step", delay=1):
        try:
            each, seconds, more = race(config, world, reader, device, names, fewer=free)
        except (TooSlow, RuntimeError, MemoryError) as error:
            more = isinstance(error, TooSlow)
            if not (more or ran_out(error)):  # if the run has too little as well, it says so
                raise
            each, by = (
                {name: convolution_seconds(name, device) for name in names},
                ", by a convolution",
            )
            seconds = FIRST / min(config.smallest_batch, config.micro(world)) if more else None
    gc.collect()  # the tasks are gone before the run's is built
    best, slower = min(each, key=each.__getitem__), max(each, key=each.__getitem__)
    ratio, warning = None if len(names) == 1 else each[slower] / each[best], ""
    if ratio and given == "auto":
        text = f"{best} (auto: {times(ratio)} the speed of {slower}{by})"
    elif ratio and given != best:
        if ratio > SLOWER:
            warning = f"fp32 trains at {times(ratio)} the speed of {given} on this CPU{by}; take --precision auto"
        ratio = 1 / ratio
    others, faster = load.others(), torch.get_num_threads()
    if free:  # who came or left meanwhile
        count = threads.fitting(others) if faster == count else min(faster, threads.fitting(others))
    return Choice(
        best if given == "auto" else names[-1], text, ratio, warning, seconds, more, count, others
    )


def times(ratio: float) -> str:
    """A ratio in words: "1.3 times", and "more than 3 times" for one that was not measured to the
    end.
    """
    return f"more than {GIVEN_UP:g} times" if math.isinf(ratio) else f"{ratio:.3g} times"


def race(
    config: RunConfig,
    world_size: int,
    reader: Dataset,
    device: torch.device,
    names: Sequence[Fixed],
    *,
    fewer: bool = False,
) -> tuple[dict[Fixed, float], float, bool]:
    """Seconds an image in each precision, infinite for what is given up, and of an image of the run
    in the precision that it will take; whether that takes more.

    First of the smallest batch, then of larger ones, up to about STEP seconds: what comes once a
    step, such as the optimizer's work, counts once. What each pass of a micro-batch costs besides
    is left out. `fewer`: torch's threads are halved as long as that is faster. Raises TooSlow where
    even the smallest takes more than FIRST seconds in the first precision.
    """
    most, share = config.micro(world_size), config.share(world_size)
    small = size = min(config.smallest_batch, most)
    # step: seconds of a step, by precision
    trial, step, limit = Trial(config, size, reader, device), {}, FIRST
    for name in names:
        try:
            warm_up = trial.seconds(name, limit=limit)
            step[name] = min(warm_up, trial.seconds(name))
            limit = max(0.2, GIVEN_UP * warm_up)
        except TooSlow:
            if not step:  # nothing to compare with
                raise
            step[name] = math.inf
    image = {name: seconds / size for name, seconds in step.items()}
    slope = dict.fromkeys(names, 0.0)  # seconds of an image more in a step
    best = min(image, key=image.__getitem__)
    while (larger := _larger(size, small, most, step[best], slope[best], len(trial.shares))) > size:
        close = [name for name in step if image[name] < CLEAR * image[best]]
        del trial  # before the next one takes its memory
        trial = Trial(config, larger, reader, device)
        before, step = step, _alternating(trial, close)
        slope = {name: max(0.0, step[name] - before[name]) / (larger - size) for name in close}
        size = larger
        image |= {name: seconds / size for name, seconds in step.items()}
        best = min(step, key=step.__getitem__)
    chosen = best if config.precision == "auto" else names[-1]
    if chosen not in step or math.isinf(step[chosen]):
        return image, min(GIVEN_UP * min(image.values()), image[chosen]), True
    if fewer:
        step[chosen] = _halve_threads(trial, chosen, step[chosen])
    tries, (most_frequent, *others) = 2 if step[chosen] < STEP else 1, trial.shares.items()
    once = most_frequent[1] * step[chosen] + sum(
        part * min(trial.seconds(chosen, kind) for _ in range(tries)) for kind, part in others
    )
    return image, once * (1 + slope[chosen] * (share - size) / step[chosen]) / share, False


def _alternating(trial: Trial, names: Sequence[Fixed]) -> dict[Fixed, float]:
    """Seconds of a step in each, the median of a few rounds; of two where the same was plainly the
    fastest in both.
    """
    rounds: list[dict[Fixed, float]] = []
    begun, plain = time.perf_counter(), False
    while len(rounds) < 2 or (
        len(rounds) < ROUNDS and time.perf_counter() - begun < BUDGET and not plain
    ):
        rounds.append({name: trial.seconds(name) for name in names})
        best = min(names, key=rounds[0].__getitem__)
        others = [name for name in names if name != best]
        plain = all(taken[name] > PLAIN * taken[best] for taken in rounds for name in others)
    return {name: median_low(taken[name] for taken in rounds) for name in names}


def _halve_threads(trial: Trial, name: Fixed, taken: float) -> float:
    """Halve torch's threads as long as a step is faster in them than `taken` seconds; returns what
    it takes then.
    """
    while (count := torch.get_num_threads()) > 1:
        torch.set_num_threads(count // 2)
        fewer = trial.seconds(name)
        if fewer < PLAIN * taken:  # else another try changes nothing
            fewer = min(fewer, trial.seconds(name))
        if fewer * FEWER > taken:
            torch.set_num_threads(count)
            break
        taken = fewer
    return taken


def _larger(size: int, small: int, most: int, seconds: float, slope: float, kinds: int) -> int:
    """The samples of the next steps that are tried: as many as surely take STEP seconds at most, or
    a few more.
    """
    surely, few = STEP / seconds * size, 4.0 * size
    if size > small:
        few = min(2 * few, STEP / max(slope, 1e-9)) if seconds < STEP else 0
    else:
        surely *= 2  # most of so small a step is what comes once
        few = few if few * seconds / size * kinds <= LARGER else 0
    return small * min(most // small, int(max(surely, few) / small + 1e-9))


def convolution_seconds(name: Fixed, device: torch.device) -> float:
    """Seconds of a 3x3 convolution, forward and backward: for networks of which one step takes too
    long.
    """
    layer = torch.nn.utils.skip_init(torch.nn.Conv2d, 64, 64, 3, padding=1, device=device)
    torch.nn.init.constant_(layer.weight, 0.01)
    torch.nn.init.zeros_(layer.bias)
    images = torch.ones(4, 64, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    images.requires_grad_(True)
    taken = []
    for _ in range(6):  # the first warms up
        begun = time.perf_counter()
        with Precision(name, device).autocast():
            layer(images).sum().backward()
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def forecast(choice: Choice, images: int) -> str:
    """What the plan says of how long `images` images of training take here; empty where that was
    not measured.
    """
    if choice.seconds is None or images < FORECAST:
        return ""
    rate = collectives.world_size() * choice.images_per_second
    text = f"{'more than' if choice.more else 'about'} {duration(images / rate)} here, "
    text += f"{'at most ' * choice.more}{rate:,.3g} images/s"
    if images / rate > LONG:
        text += "; that is long: recipes named cpu are smaller (train.py --list), and "
        text += "`python quickstart.py FOLDER --minutes N` chooses what fits"
    return text


def measure_recipe(
    config_file: str, overrides: Sequence[str] = (), *, device: str | None = None
) -> Choice:
    """How fast a recipe trains here, and in which precision; `overrides` as train.py takes them.
    Needs the packed images. Raises UserError as train.py does, and where memory runs out.
    """
    config = build_run_config(read_yaml(config_file), list(overrides), config_file)
    with data.open_training(config.data) as reader:
        choice = choose(config, reader, collectives.choose_device(device), always=True)
    if choice.seconds is None:
        raise UserError(
            f"{config_file}: memory runs out in a step; take a smaller --micro-batch or smaller networks"
        )
    return choice
