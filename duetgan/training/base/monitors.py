"""Monitors of a training: means of metrics, skipped updates, loss spikes, early stopping and speed."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from duetgan.utils import machine
from duetgan.utils.config.model import AboveOne, Config, NonNegativeFloat, PositiveInt
from duetgan.utils.distributed import collectives
from duetgan.utils.machine import CGROUP
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.text import listed

LEAST = 30  # previous steps that are needed to judge a step as unusual
GAUSS = 1.4826  # standard deviation / median absolute deviation of a normal distribution
State = dict[str, Any]  # a state dict


class Fields:
    """A base class of objects whose state is the attributes named in STATE, which are plain data."""

    STATE: ClassVar[tuple[str, ...]]

    def state_dict(self) -> State:
        return copy.deepcopy({name: getattr(self, name) for name in self.STATE})

    def load_state_dict(self, state: State) -> None:
        for name in self.STATE:
            setattr(self, name, copy.deepcopy(state[name]))


class MetricWindow(Fields):
    """Means of the training metrics since the last log tick.

    Metrics stay on the device until `fold`. Every value of the metric `watched` is recorded.
    """

    STATE = ("sums", "counts", "values")

    def __init__(self, watched: str | None = None) -> None:
        self.watched = watched
        self.values: list[float] = []  # values of the watched metric, one per step
        # one per step since `Failing.see` last emptied it: True if an update was not finite
        self.failed: list[bool] = []
        self._pending: dict[str, list[Tensor]] = {}
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self._pending.setdefault(name, []).append(value)

    def fold(self) -> None:
        """Add the pending values over steps and ranks, in one transfer and one collective.

        Steps are added one by one, so that rounding does not depend on when this is called.
        """
        if not self._pending:
            return
        names = sorted(self._pending)
        pending = [torch.stack(self._pending[name]) for name in names]
        flat = torch.cat([values.to(collectives.widest(values.device)) for values in pending])
        totals = iter(collectives.all_reduce_sum_(flat).tolist())
        failed = [False] * max(map(len, self._pending.values()))
        for name in names:
            values = [next(totals) for _ in self._pending[name]]
            if name.startswith("nonfinite_updates/"):
                failed = [bad or value > 0 for bad, value in zip(failed, values, strict=True)]
            for value in values:
                self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + len(values)
            if name == self.watched:
                self.values += values
        self.failed += failed
        self._pending.clear()

    def total(self, prefix: str) -> float:
        """Return the sum of the folded metrics whose names begin with `prefix/`."""
        return sum(total for name, total in self.sums.items() if name.startswith(f"{prefix}/"))

    def means(self) -> dict[str, float]:
        self.fold()
        return {name: total / self.counts[name] for name, total in self.sums.items()}

    def take(self) -> dict[str, float]:
        """Return the means and start a new window, which also empties `values`."""
        means = self.means()
        self.sums = {}
        self.counts = {}
        self.values = []
        return means

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._pending.clear()
        self.failed.clear()


QUIET = 64  # steps without a skipped update after which training counts as healthy again


class Failing:
    """The latest range of steps in which updates were skipped because they were not finite."""

    def __init__(self) -> None:
        self.span: list[int] = []  # first and last of these steps; empty if no update was skipped

    def see(self, step: int, failed: list[bool]) -> None:
        """Record and empty `failed`, one bool per step (see `MetricWindow`), the last for `step`."""
        for number, bad in enumerate(failed, step - len(failed) + 1):
            if not bad:
                continue
            if self.span and number - self.span[1] <= QUIET:
                self.span = [self.span[0], number]
            else:
                self.span = [number, number]
        failed.clear()

    def healthy(self, step: int) -> int | None:
        """Return the last healthy step if updates are being skipped at `step`, else None.

        It is two steps before the first skipped update, because the update in between may have
        broken the weights.
        """
        if not self.span or step - self.span[1] > QUIET:
            return None
        return self.span[0] - 2


class SpikesConfig(Config):
    """Detection of spikes in the loss, at every log tick, and the reaction to them."""

    # roll-back: resume from the last checkpoint before the spike and skip the batches since then
    action: Literal["off", "warn", "roll-back"] = "warn"
    # a metric of metrics.jsonl that every step computes; null: the loss
    metric: str | None = None
    # a spike is this many robust standard deviations (1.4826 MAD) above the median of the last
    # steps
    factor: AboveOne = 20.0
    # number of previous steps in the median for spikes.factor
    window: Annotated[int, Ge(LEAST)] = 200
    limit: PositiveInt = 3  # largest number of roll-backs; one more stops training


class SpikeDetector(Fields):
    """A detector that compares the metric of every step with the median of the previous steps.

    Values that are not finite are ignored.
    """

    STATE = ("history", "unusual")

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.history: list[float] = []  # values of the last `window` usual steps
        self.unusual = 0  # consecutive unusual steps; after LEAST of them the history starts anew

    def see(self, first: int, values: Sequence[float]) -> tuple[int, float, float] | None:
        """Record the metric of consecutive steps, the first of which is step `first`.

        Returns: The first spike as (step, value, median of the previous values); None without one.
        """
        first_spike = None
        for step, value in enumerate(values, first):
            if not math.isfinite(value):
                continue
            median = self._median_if_unusual(value)
            if median is None:
                self.history = [*self.history, value][-self.config.window :]
                self.unusual = 0
                continue
            self.unusual += 1
            first_spike = first_spike or (step, value, median)
            if self.unusual >= LEAST:
                self.history = []
                self.unusual = 0
        return first_spike

    def _median_if_unusual(self, value: float) -> float | None:
        """Return the median of the history if `value` lies far above it, else None."""
        if len(self.history) < LEAST:
            return None
        median = float(np.median(self.history))
        spread = GAUSS * float(np.median(np.abs(np.array(self.history) - median)))
        spread = max(spread, 1e-3 * abs(median))  # a constant loss has a deviation of 0
        return median if value - median > self.config.factor * spread else None


class EarlyStoppingConfig(Config):
    """Stopping before the last step, by the metric that chooses the best checkpoint."""

    # stop after this many evaluations in a row without an improvement; null: never
    patience: PositiveInt | None = None
    min_delta: NonNegativeFloat = 0.0  # an improvement must be larger than this


class EarlyStopping(Fields):
    """A counter of evaluations without an improvement of `metric`.

    `best` is the last value that counted as an improvement.
    """

    STATE = ("best", "waited")

    def __init__(self, config: EarlyStoppingConfig, metric: str, *, lower_is_better: bool) -> None:
        self.config = config
        self.metric = metric
        self.lower_is_better = lower_is_better
        self.best: float | None = None
        self.waited = 0  # number of evaluations since `best`

    def see(self, value: float) -> None:
        """Record the metric of an evaluation; NaN never counts as an improvement."""
        if self.best is None:
            gain = math.inf
        elif self.lower_is_better:
            gain = self.best - value
        else:
            gain = value - self.best
        if not math.isnan(value) and gain > self.config.min_delta:
            self.best = value
            self.waited = 0
        else:
            self.waited += 1

    @property
    def reached(self) -> bool:
        return self.config.patience is not None and self.waited >= self.config.patience

    @property
    def reason(self) -> str:
        best = "nothing" if self.best is None else f"{self.best:.4g}"
        margin = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return f"early stopping: {self.waited} evaluations without {self.metric} better than {best}{margin}"


CHECK_INTERVAL = 1.0  # seconds between two checks of the load of other programs
# seconds for which cores must be free before threads are added; doubled each time they are
PATIENCE = 5.0
VMSTAT = Path("/proc/vmstat")
MIN_TICK_SECONDS = 2.0  # shortest interval between log ticks whose speed is judged
SWAPPING_PAGES = 100.0  # pages swapped in per second above which memory counts as short


class Counters(NamedTuple):
    """Readings of the clock and of the system's counters, all since an arbitrary start."""

    seconds: float  # monotonic clock
    throttled: float  # seconds for which the container's CPU quota held processes back
    swapped: float  # pages swapped in from the disk


class Pace:
    """Sets torch's number of threads before each step, and warns of a drop in speed.

    `setting` is the number that this process already uses, a mapping from first step to number, or
    "adapt": as many as other programs leave cores free. `by_step` records the numbers used;
    `--threads '{0: 2, 120: 1}'` repeats a run with them.
    """

    def __init__(self, setting: int | str | Mapping[int, int], device: torch.device) -> None:
        current = torch.get_num_threads()
        self.by_step: dict[int, int] = {0: current}  # first step -> threads from it on
        self._requested = dict(setting) if isinstance(setting, Mapping) else {0: current}
        self._cpu = device.type == "cpu"
        self._adapts = setting == "adapt" and self._cpu and collectives.world_size() == 1
        self._load = machine.ProgramLoad()
        self._checked = time.monotonic()
        self._patience = PATIENCE
        self._free_since: float | None = None
        # the current part of the training; its speed depends on the size of its images
        self._span: object = None
        self._rates: list[float] = []
        self._warned = False
        self._tick = machine.ProgramLoad()
        self._counters = _read_counters()

    def resume(self, step: int, by_step: Mapping[int, int]) -> None:
        """Continue the record `by_step` of a checkpoint of `step`, with this process's threads."""
        recorded = {first: count for first, count in by_step.items() if first <= step}
        self.by_step = recorded or self.by_step
        if not self._adapts:
            self._record(step, _at(self._requested, step))

    def _record(self, step: int, count: int) -> None:
        if count != _at(self.by_step, step):
            self.by_step[step] = count

    def begin(self, step: int) -> None:
        """Set the number of threads for update number `step`, before it."""
        if not self._adapts and step in self._requested:
            self._record(step, self._requested[step])
        if self._adapts and time.monotonic() - self._checked >= CHECK_INTERVAL:
            self._adapt(step)
        if self._cpu and torch.get_num_threads() != (count := _at(self.by_step, step)):
            machine.use_threads(count)

    def _adapt(self, step: int) -> None:
        now = time.monotonic()
        busy = self._load.busy_cores()
        count = _at(self.by_step, step)
        fitting = machine.fitting(busy)
        self._checked = now
        if fitting <= count:
            self._free_since = None
        elif not self._free_since:
            self._free_since = now
        is_free = self._free_since is not None and now - self._free_since >= self._patience
        if fitting < count or is_free:
            if fitting >= count:
                self._patience *= 2
            self._free_since = None
            self._record(step, fitting)
            say_main(
                f"step {step}: {count} -> {machine.counted(fitting)}: {machine.load_text(busy)} "
                "(threads: adapt)"
            )

    # --- the speed

    def tick(self, span: object, rate: float, data_wait: float) -> str:
        """Return a warning if the speed has fallen to half of its median for a known cause, or "".

        Args:
            span: Identifier of the part of the training; each part has a median of its own.
            rate: Images per second since the last log tick.
            data_wait: The fraction of this time that was spent waiting for images.
        """
        busy = self._tick.busy_cores()
        previous, self._counters = self._counters, _read_counters()
        if self._counters.seconds - previous.seconds < MIN_TICK_SECONDS:
            return ""
        if span != self._span:  # This tick's speed may be partly that of the previous part.
            self._span = span
            self._rates = []
            self._warned = False
            return ""
        usual = median(self._rates or [rate])
        if rate >= usual / 2:
            self._rates.append(rate)
            self._warned = self._warned and rate < 0.75 * usual
            return ""
        causes = self._causes(busy, data_wait, previous)
        if self._warned or not causes:
            return ""
        self._warned = True
        return f"{rate:,.3g} images/s instead of {usual:,.3g}: {listed(causes, 4)}"

    def _causes(self, busy: float, data_wait: float, previous: Counters) -> list[str]:
        """Return the causes of low speed since the `previous` counters, each with a remedy."""
        seconds = self._counters.seconds - previous.seconds + 1e-9
        throttled = self._counters.throttled - previous.throttled + 1e-9
        swapped = self._counters.swapped - previous.swapped + 1e-9
        causes = []
        if data_wait > 0.5:
            causes.append(
                f"waiting for images took {data_wait:.0%} of the time (raw ones need no decoding: "
                "docs/lmdb.md)"
            )
        if throttled > 0.1 * seconds:
            causes.append(
                f"the container's CPU quota held it back {throttled / seconds:.0%} of the time"
            )
        if swapped > SWAPPING_PAGES * seconds:
            causes.append(
                f"memory is short, {swapped / seconds:,.0f} pages/s come from the disk (close "
                "programs, or make micro_batch smaller)"
            )
        if self._cpu and busy > machine.TOLERATED_LOAD and not self._adapts:
            causes.append(
                f"{machine.load_text(busy)} (stop them, or start again with --threads adapt)"
            )
        return causes


def _at(by_step: dict[int, int], step: int) -> int:
    return by_step[max(first for first in by_step if first <= step)]


def _read_counters() -> Counters:
    values = {"throttled_usec": 0.0, "pswpin": 0.0}
    for file in (CGROUP / "cpu.stat", VMSTAT):
        if not file.exists():
            continue
        for line in file.read_text().splitlines():
            key, value = line.split()
            if key in values:
                values[key] = float(value)
    return Counters(time.monotonic(), values["throttled_usec"] / 1e6, values["pswpin"])
