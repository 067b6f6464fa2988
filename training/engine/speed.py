"""How fast a task trains on this machine, and therefore what `precision: auto` means here.

On accelerators auto is bf16 where that is native, else fp16. On CPUs it is the faster of fp32 and bf16: without units
for bf16 they take ten times as long in it as in fp32. A few steps of a task tell, which is made from the run's config
for this alone and thrown away: the run's networks, statistics and draws are not touched.
"""

import gc
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.reading.dataset import Dataset
from data.reading.loader import Batch
from models.fast import Fixed, native
from training.base import data
from training.base.config import RunConfig
from training.base.task import Task
from training.engine.tasks import TASKS, build_run_config
from training.optim.updater import Precision
from utils.config.yaml_files import read_yaml
from utils.distributed import collectives
from utils.errors import UserError
from utils.memory import ran_out
from utils.text import duration

FORCED = "DUET_PRECISION"  # environment variable: what auto means, without a measurement
FIRST = 3.0  # seconds that the first step may take, with the fewest samples
GIVEN_UP = 3.0  # times of the first candidate's after which the second one's first step is given up
CLEAR = 3.0  # so many times as slow with the fewest samples: decided
STEP = 0.4  # seconds; batches are cut where a step would take longer
LARGER = 10.0  # seconds in which steps of all kinds may take a few more images than the fewest, whatever STEP says
WHOLE = 3.0  # and here, where the speed itself is asked for: small batches are slower by the image
BUDGET = 2.0  # seconds in which two candidates that are close are compared
ROUNDS = 5  # of that, at most
FORECAST = 20_000  # images of a training below which it is short, and how long it takes is not measured
LONG = 24 * 3600.0  # seconds of a training above which the plan says what to take instead
SLOWER = 1.1  # a precision given by hand is called slower from here on: less may be noise


class Measured(NamedTuple):
    """The speed of training."""

    precision: Fixed  # what the config's is on this machine
    # of one process, in real steps with a GAN's lazy penalties by their share; without reading, compiling, evaluations
    images_per_second: float
    ratio: float | None  # its speed over the other candidate's, infinite: that was given up; None: there was none


class Choice(NamedTuple):
    """A run's precision."""

    precision: Fixed
    text: str  # for the plan
    ratio: float | None = None  # its speed over the other candidate's; infinite: the other was given up
    warning: str = ""


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
    """A task of its own for the steps that are measured: it draws by key, so nothing random is used up."""

    def __init__(self, config: RunConfig, samples: int, reader: Dataset, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self.task: Task = TASKS[config.task].task(config.for_trial(samples), reader, None, device)
        self.precision = next(part for part in self.task.registry().values() if isinstance(part, Precision))
        self.shares = self.task.typical_steps(config.steps)
        shape = (samples, reader.meta.channels, reader.resolution, reader.resolution)
        images = (torch.arange(math.prod(shape)) % 251).to(torch.uint8).view(shape)
        self.batch = Batch(images, torch.arange(samples) % max(1, len(reader.classes))).to(device)

    def seconds(self, precision: Fixed, step: int | None = None, *, limit: float = math.inf) -> float:
        """What a step takes (None: the most frequent kind). Raises TooSlow beyond `limit`."""
        if self.precision.name != precision:
            self.precision.switch(precision)
        begun = time.perf_counter()
        step = next(iter(self.shares)) if step is None else step
        if limit < math.inf:
            with Deadline(limit):
                self.task.step(iter([self.batch] * 2), step)
        else:
            self.task.step(iter([self.batch] * 2), step)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - begun

    def mean_seconds(self, precision: Fixed, tries: int = 3) -> float:
        """What steps of all kinds take on average, each the best of so many tries: the first warms up."""
        found = {step: min(self.seconds(precision, step) for _ in range(tries)) for step in self.shares}
        return sum(share * found[step] for step, share in self.shares.items())


def choose(config: RunConfig, reader: Dataset, device: torch.device, *, kept: bool = False) -> Choice:
    """What the run trains in: rank 0 measures where that is needed, all ranks agree. `kept`: an earlier start of the
    run has chosen.
    """
    samples = config.micro(collectives.world_size())
    return collectives.from_main_process(lambda: _choose(config, samples, reader, device, kept))


def _choose(config: RunConfig, samples: int, reader: Dataset, device: torch.device, kept: bool) -> Choice:
    given = config.precision
    forced = os.environ.get(FORCED)
    if forced is not None and forced not in ("fp32", "bf16", "fp16"):
        raise UserError(f"{FORCED}={forced}: must be fp32, bf16 or fp16")
    if given == "auto" and forced is not None:
        return Choice(forced, f"{forced} (auto: {FORCED} says so)")  # type: ignore[arg-type]
    if device.type != "cpu":
        best = native(device)
        if given == "auto":
            return Choice(best, f"{best} (auto: native here)")
        emulated = given == "bf16" and best == "fp16"
        warning = "bf16 is emulated by this accelerator; --precision fp16 is faster here" if emulated else ""
        return Choice(given, _given_text(given, kept), warning=warning)
    if given == "fp32" or forced is not None:
        return Choice("fp32" if given == "auto" else given, _given_text(given, kept))
    other: Fixed = "bf16" if given == "auto" else given
    names: tuple[Fixed, Fixed] = ("fp32", other)
    by = ""
    with collectives.alone():
        try:
            seconds = race(config, samples, reader, device, names)
        except (TooSlow, RuntimeError, MemoryError) as error:
            if not (isinstance(error, TooSlow) or ran_out(error)):
                raise
            seconds, by = {name: convolution_seconds(name, device) for name in names}, ", by a convolution"
    gc.collect()  # the tasks are gone before the run's is built
    if given == "auto":
        best, slower = sorted(seconds, key=seconds.__getitem__)
        ratio = seconds[slower] / seconds[best]
        return Choice(best, f"{best} (auto: {times(ratio)} the speed of {slower}{by})", ratio)
    ratio, warning = seconds[other] / seconds["fp32"], ""
    if ratio > SLOWER:
        remedy = "--precision fp32 goes on in it, but no longer bit for bit" if kept else "take --precision auto"
        warning = f"fp32 trains at {times(ratio)} the speed of {given} on this CPU{by}; {remedy}"
    return Choice(given, _given_text(given, kept), 1 / ratio, warning)


def _given_text(given: str, kept: bool) -> str:
    return f"{given} (kept: the run began in it)" if kept else given


def times(ratio: float) -> str:
    """A ratio in words: "1.3 times", and "more than 3 times" for one that was not measured to the end."""
    return f"more than {GIVEN_UP:g} times" if math.isinf(ratio) else f"{ratio:.3g} times"


def race(
    config: RunConfig, samples: int, reader: Dataset, device: torch.device, names: Sequence[Fixed]
) -> dict[Fixed, float]:
    """Seconds an image in each precision, infinite for what is given up: first of the smallest batch, then, where that
    does not decide, of one of `samples`, or as many of them as steps of STEP seconds hold. Raises TooSlow where even
    the smallest takes more than FIRST seconds in the first precision.
    """
    small = min(config.smallest_batch, samples)
    trial, found = Trial(config, small, reader, device), {}
    limit = FIRST
    for name in names:
        try:
            warm_up = trial.seconds(name, limit=limit)
            found[name] = min(trial.seconds(name) for _ in range(3)) / small
            limit = max(0.2, GIVEN_UP * warm_up)
        except TooSlow:
            found[name] = math.inf
            if name == names[0]:  # nothing to compare with
                raise
    best = min(found.values())
    close = [name for name in names if found[name] < CLEAR * best]
    large = _fitting(samples, small, best, STEP)
    if len(close) == 1 or large == small:
        return found
    del trial  # before another needs memory
    trial = Trial(config, large, reader, device)
    for name in close:
        trial.seconds(name)
    rows: list[dict[Fixed, float]] = []
    begun = time.perf_counter()
    while len(rows) < ROUNDS and (not rows or time.perf_counter() - begun < BUDGET):
        rows.append({name: trial.seconds(name) for name in close})
    return {name: min(row[name] for row in rows) / large for name in close}  # the least disturbed


def _fitting(samples: int, small: int, seconds: float, limit: float) -> int:
    """The largest multiple of `small` up to `samples` whose step, at `seconds` an image, takes `limit` at most."""
    return small * max(1, min(samples // small, int(limit / (small * seconds))))


def convolution_seconds(name: Fixed, device: torch.device) -> float:
    """Seconds of a 3x3 convolution, forward and backward: for networks of which one step takes too long."""
    layer = torch.nn.utils.skip_init(torch.nn.Conv2d, 64, 64, 3, padding=1, device=device)
    torch.nn.init.constant_(layer.weight, 0.01)
    torch.nn.init.zeros_(layer.bias)
    images = torch.ones(4, 64, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    images.requires_grad_(True)
    found = []
    for _ in range(6):  # the first warms up
        begun = time.perf_counter()
        with Precision(name, device).autocast():
            layer(images).sum().backward()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def forecast(config: RunConfig, reader: Dataset, device: torch.device, images: int) -> str:
    """What the plan says of how long `images` images of training take on this CPU; empty for short trainings, and on
    accelerators, which compile. Collective.
    """
    if device.type != "cpu" or images < FORECAST:
        return ""
    return collectives.from_main_process(lambda: _forecast(config, reader, device, images))


def _forecast(config: RunConfig, reader: Dataset, device: torch.device, images: int) -> str:
    world, about = collectives.world_size(), "about"
    with collectives.alone():
        try:
            seconds = _seconds_an_image(config, world, reader, device)
        except TooSlow:
            seconds, about = FIRST / min(config.smallest_batch, config.micro(world)), "more than"
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):  # if the run has too little as well, it says so
                raise
            return ""
    gc.collect()
    whole = seconds * images / world
    advice = (
        "; that is long: recipes named cpu are smaller (train.py --list), and "
        "`python quickstart.py FOLDER --minutes N` chooses what fits"
    )
    rate = f"{'at most ' * (about == 'more than')}{world / seconds:,.3g} images/s"
    return f"{about} {duration(whole)} here, {rate}" + (advice if whole > LONG else "")


def _seconds_an_image(config: RunConfig, world: int, reader: Dataset, device: torch.device) -> float:
    """In whole steps, found by steps of a few images and then more, up to about STEP: what comes once a step, such as
    the optimizer's work, counts once. What each pass of a micro-batch costs besides is left out. Raises TooSlow.
    """
    micro, share, precision = config.micro(world), config.share(world), config.precision
    assert precision != "auto"
    trial = Trial(config, min(config.smallest_batch, micro), reader, device)
    tries = 2 if trial.seconds(precision, limit=FIRST) < STEP else 1
    begin, least = trial.samples, trial.mean_seconds(precision, tries)
    count, whole, each = begin, least, least / begin
    # once if it can be, or all of a small step's time would count for its few images
    once = 4 * least * len(trial.shares) < LARGER
    while count < micro // begin * begin and (4 * count * each < STEP or (once and count == begin)):
        count = begin * min(4 * count // begin, micro // begin)
        del trial  # before the next one takes its memory
        trial = Trial(config, count, reader, device)
        whole = trial.mean_seconds(precision, tries)
        each = max(0.0, whole - least) / (count - begin)
    return (whole + each * (share - count)) / share


def measure_recipe(config_file: str, overrides: Sequence[str] = (), *, device: str | None = None) -> Measured:
    """How fast a recipe trains here, and in which precision; `overrides` as train.py takes them.

    Takes a few seconds and changes nothing. Needs the packed images. Raises UserError as train.py does.
    """
    config = build_run_config(read_yaml(config_file), list(overrides), config_file)
    here = collectives.choose_device(device)
    reader = data.open_training(config.data)
    try:
        choice = choose(config, reader, here)
        config = replace(config, precision=choice.precision)
        small = min(config.smallest_batch, config.micro(1))
        trial = Trial(config, small, reader, here)
        trial.seconds(choice.precision)
        samples = _fitting(config.micro(1), small, trial.seconds(choice.precision) / small, WHOLE)
        trial = Trial(config, samples, reader, here)
        rate = samples / trial.mean_seconds(choice.precision)
    finally:
        reader.close()
    return Measured(choice.precision, rate, choice.ratio)
