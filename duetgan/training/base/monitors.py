"""What keeps and watches a training's figures: those since the last row of the log, spikes, early
stopping; and how fast a run goes: the threads of each step, and a line where it falls to half its
speed that says why.
"""

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from duetgan.utils import threads
from duetgan.utils.config.model import AboveOne, Config, NonNegativeFloat, PositiveInt
from duetgan.utils.distributed import collectives
from duetgan.utils.memory import CGROUP
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.text import listed

LEAST = 30  # steps that must have been seen before one can be told to be unusual
GAUSS = 1.4826  # standard deviations of a normal distribution in a median absolute deviation


class Fields:
    """What a checkpoint holds as some of its attributes, which are plain data."""

    STATE: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({name: getattr(self, name) for name in self.STATE})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.STATE:
            setattr(self, name, copy.deepcopy(state[name]))


class MetricWindow(Fields):
    """Means of the metrics since the last log tick, on the device until `fold`. Of `watched` every
    value is kept.
    """

    STATE = ("sums", "counts", "values")

    def __init__(self, watched: str | None = None) -> None:
        self.watched = watched
        self.values: list[float] = []  # of the watched metric, a step each
        # steps since its user emptied it: True where an update was not finite
        self.failed: list[bool] = []
        self._pending: dict[str, list[Tensor]] = {}
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self._pending.setdefault(name, []).append(value)

    def fold(self) -> None:
        """Add the pending values up over steps and ranks: one transfer and one collective. Steps
        are added one after the other, so that the sums do not depend on when this is called.
        """
        if not self._pending:
            return
        names = sorted(self._pending)
        pending = [torch.stack(self._pending[name]) for name in names]
        every = torch.cat([values.to(collectives.widest(values.device)) for values in pending])
        totals = iter(collectives.all_reduce_sum_(every).tolist())
        failed = [False] * max(map(len, self._pending.values()))
        for name in names:
            values = [next(totals) for _ in self._pending[name]]
            if name.startswith("nonfinite_updates/"):
                failed = [before or value > 0 for before, value in zip(failed, values, strict=True)]
            for value in values:
                self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + len(values)
            if name == self.watched:
                self.values += values
        self.failed += failed
        self._pending.clear()

    def total(self, prefix: str) -> float:
        """Sum of the folded metrics `prefix/...` so far."""
        return sum(total for name, total in self.sums.items() if name.startswith(f"{prefix}/"))

    def means(self) -> dict[str, float]:
        self.fold()
        return {name: total / self.counts[name] for name, total in self.sums.items()}

    def take(self) -> dict[str, float]:
        """The means, and start anew; `values` are the caller's to take before."""
        means = self.means()
        self.sums, self.counts, self.values = {}, {}, []
        return means

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending.clear()
        self.failed.clear()


QUIET = 64  # steps without a skipped update after which training is taken to be sound again


class Failing:
    """The latest stretch of steps in which updates were skipped because they were not finite."""

    def __init__(self) -> None:
        self.span: list[int] = []  # its first and last step; empty: no update was skipped

    def see(self, step: int, failed: list[bool]) -> None:
        """Take over a window's `failed`, of the steps up to `step`, and empty it."""
        for number in [step - len(failed) + 1 + place for place, bad in enumerate(failed) if bad]:
            goes_on = self.span and number - self.span[1] <= QUIET
            self.span = [self.span[0] if goes_on else number, number]
        failed.clear()

    def healthy(self, step: int) -> int | None:
        """Return the last step after which an update was made while updates are being skipped, else
        None.

        The update before the first that was skipped may be what broke the weights.
        """
        return self.span[0] - 2 if self.span and step - self.span[1] <= QUIET else None


class SpikesConfig(Config):
    """What counts as a spike of the loss, and what to do then. Checked at every log tick."""

    # roll-back: go back to the last checkpoint before the spike and leave out the batches since
    action: Literal["off", "warn", "roll-back"] = "warn"
    metric: str | None = None  # of metrics.jsonl, one that every step has; None: the task's loss
    # robust standard deviations (1.4826 MAD) above the median of the last steps
    factor: AboveOne = 20.0
    window: Annotated[int, Ge(LEAST)] = 200  # steps it is compared with
    limit: PositiveInt = 3  # roll-backs; at one more training stops itself


class SpikeDetector(Fields):
    """Compares every step's value with the median of those before; non-finite values are ignored."""

    STATE = ("history", "unusual")

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.history: list[float] = []  # of the last `window` usual steps
        self.unusual = 0  # steps in a row that were not: so many of them are the new usual

    def see(self, first: int, values: Sequence[float]) -> tuple[int, float, float] | None:
        """Note the values of updates from `first` on; the first spike: its update, its value and
        the usual one.
        """
        first_spike = None
        for step, value in enumerate(values, first):
            if not math.isfinite(value):
                continue
            usual = self._usual(value)
            if usual is None:
                self.history, self.unusual = [*self.history, value][-self.config.window :], 0
                continue
            self.unusual += 1
            first_spike = first_spike or (step, value, usual)
            if self.unusual >= LEAST:
                self.history, self.unusual = [], 0
        return first_spike

    def _usual(self, value: float) -> float | None:
        if len(self.history) < LEAST:
            return None
        median = float(np.median(self.history))
        spread = GAUSS * float(np.median(np.abs(np.array(self.history) - median)))
        spread = max(spread, 1e-3 * abs(median))  # of a loss that hardly moves
        return median if value - median > self.config.factor * spread else None


class EarlyStoppingConfig(Config):
    """When to stop before the last step, by the figure that chooses the best checkpoint."""

    # evaluations in a row without a better figure; None: train to the last step
    patience: PositiveInt | None = None
    min_delta: NonNegativeFloat = 0.0  # by more than this a figure must be better to count


class EarlyStopping(Fields):
    """Counts evaluations without a better figure. `best` is the last figure that counted as better."""

    STATE = ("best", "waited")

    def __init__(self, config: EarlyStoppingConfig, metric: str, *, lower_is_better: bool) -> None:
        self.config, self.metric, self.lower_is_better = config, metric, lower_is_better
        self.best: float | None = None
        self.waited = 0  # evaluations since

    def see(self, value: float) -> None:
        """Record an evaluation's figure; NaN never counts as better."""
        gain = (
            math.inf
            if self.best is None
            else self.best - value
            if self.lower_is_better
            else value - self.best
        )
        if not math.isnan(value) and gain > self.config.min_delta:
            self.best, self.waited = value, 0
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


LOOK = 1.0  # seconds from one look at other programs to the next
# seconds that cores must have been free before they are taken back; twice as many the next time
PATIENCE = 5.0
VMSTAT = Path("/proc/vmstat")
SHORT = 2.0  # seconds; a log tick that is shorter tells nothing
SWAPPING = 100.0  # pages a second that come back from the disk


class Pace:
    """Sets torch's threads before each step, as `setting` says: their number here; by step; or
    `adapt`: by what other programs leave. What was set is kept in `by_step`, which repeats the run
    as `--threads '{0: 2, 120: 1}'`.
    """

    def __init__(self, setting: Any, device: torch.device) -> None:
        here = torch.get_num_threads()
        self.by_step: dict[int, int] = {0: here}  # first step -> threads from there on
        self._given = dict(setting) if isinstance(setting, dict) else {0: here}
        self._cpu = device.type == "cpu"
        self._adapts = setting == "adapt" and self._cpu and collectives.world_size() == 1
        self._load, self._looked, self._patience = threads.Load(), time.monotonic(), PATIENCE
        self._free_since: float | None = None
        self._span: Any = None  # what is trained: images of another size have another speed
        self._rates: list[float] = []
        self._told = False
        self._tick, self._counts = threads.Load(), _counts()

    def resume(self, step: int, by_step: dict[int, int]) -> None:
        """Take what a checkpoint of that step holds; where this process computes in another number,
        from there on.
        """
        self.by_step = {
            first: count for first, count in by_step.items() if first <= step
        } or self.by_step
        if not self._adapts:
            self._change(step, _at(self._given, step))

    def _change(self, step: int, count: int) -> None:
        if count != _at(self.by_step, step):
            self.by_step[step] = count

    def begin(self, step: int) -> None:
        """Before every update: set its threads."""
        if not self._adapts and step in self._given:
            self._change(step, self._given[step])
        if self._adapts and time.monotonic() - self._looked >= LOOK:
            self._look(step)
        if self._cpu and torch.get_num_threads() != (count := _at(self.by_step, step)):
            torch.set_num_threads(count)

    def _look(self, step: int) -> None:
        now, others, count = time.monotonic(), self._load.others(), _at(self.by_step, step)
        self._looked, fitting = now, threads.fitting(others)
        self._free_since = (self._free_since or now) if fitting > count else None
        if fitting < count or (
            self._free_since is not None and now - self._free_since >= self._patience
        ):
            self._patience *= 1 if fitting < count else 2
            self._free_since = None
            self._change(step, fitting)
            say_main(
                f"step {step}: {count} -> {threads.counted(fitting)}: {threads.others_text(others)} (threads: adapt)"
            )

    # --- the watch

    def tick(self, span: Any, rate: float, waited: float) -> str:
        """What to say at a log tick of `rate` images/s, `waited` of the time for images; `span`:
        what was trained.
        """
        others, before, self._counts = self._tick.others(), self._counts, _counts()
        if self._counts[0] - before[0] < SHORT:
            return ""
        if span != self._span:  # the tick before may have been of both
            self._span, self._rates, self._told = span, [], False
            return ""
        usual = median(self._rates or [rate])
        if rate >= usual / 2:
            self._rates.append(rate)
            self._told = self._told and rate < 0.75 * usual
            return ""
        seconds, throttled, swapped = (
            now - then + 1e-9 for now, then in zip(self._counts, before, strict=True)
        )
        why = {
            f"waiting for images took {waited:.0%} of the time (raw ones need no decoding: docs/lmdb.md)": waited
            > 0.5,
            f"the container's CPU quota held it back {throttled / seconds:.0%} of the time": throttled
            > 0.1 * seconds,
            f"memory is short, {swapped / seconds:,.0f} pages/s come from the disk (close programs, or make "
            "micro_batch smaller)": swapped > SWAPPING * seconds,
            f"{threads.others_text(others)} (stop them, or start again with --threads adapt)": self._cpu
            and others > threads.ROOM
            and not self._adapts,
        }
        causes = [text for text, holds in why.items() if holds]
        if self._told or not causes:
            return ""
        self._told = True
        return f"{rate:,.3g} images/s instead of {usual:,.3g}: {listed(causes, 4)}"


def _at(by_step: dict[int, int], step: int) -> int:
    return by_step[max(first for first in by_step if first <= step)]


def _counts() -> tuple[float, float, float]:
    """Seconds by the clock, seconds held back by the container's quota, pages that came back from
    the disk.
    """
    kept = {"throttled_usec": 0.0, "pswpin": 0.0}
    for file in (CGROUP / "cpu.stat", VMSTAT):
        if file.exists():
            kept |= {
                key: float(value)
                for key, value in map(str.split, file.read_text().splitlines())
                if key in kept
            }
    return time.monotonic(), kept["throttled_usec"] / 1e6, kept["pswpin"]
