"""Monitor a training: time, means of metrics, skipped updates, loss spikes, early stopping."""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from duetgan.utils.config.model import AboveOne, Config, NonNegativeFloat, PositiveInt
from duetgan.utils.distributed import collectives

LEAST = 30  # previous steps that are needed to judge a step as unusual
GAUSS = 1.4826  # standard deviation / median absolute deviation of a normal distribution
State = dict[str, Any]  # a state dict


class Fields:
    """Base class of objects whose state is the attributes named in STATE.

    The values of these attributes are plain data.
    """

    STATE: ClassVar[tuple[str, ...]]

    def state_dict(self) -> State:
        return copy.deepcopy({name: getattr(self, name) for name in self.STATE})

    def load_state_dict(self, state: State) -> None:
        for name in self.STATE:
            setattr(self, name, copy.deepcopy(state[name]))


class Stopwatch:
    """A clock of the training time since the last row of metrics. Pauses do not count.

    `step` is the step of that row.
    """

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        self.step = step
        self._started = time.perf_counter()
        self._paused = 0.0

    def seconds(self) -> float:
        return max(1e-9, time.perf_counter() - self._started - self._paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock during the block."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started


# metrics by network that are added up over the run, not averaged
COUNTED = ("skipped_updates", "nonfinite_updates")


class MetricWindow(Fields):
    """The sums and means of the training metrics since the last row of metrics.

    Metrics stay on the device until `fold`. Of the metric `watched`, the value of every step is
    kept.
    """

    STATE = ("sums", "counts", "values")

    def __init__(self, watched: str | None) -> None:
        self.watched = watched
        self.values: list[float] = []  # values of the watched metric, one per step
        # one per step since `SkippedUpdates` last emptied it: True if an update was not finite
        self.failed: list[bool] = []
        self._pending: dict[str, list[Tensor]] = {}
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self._pending.setdefault(name, []).append(value)

    def fold(self) -> None:
        """Add the pending values of all steps and ranks to the sums.

        All ranks must call this. It takes one transfer from the device and one collective
        operation. Steps are added one by one, so rounding does not depend on when this is called.
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
        """Fold, and return the means of the metrics, except those that are COUNTED."""
        self.fold()
        return {
            name: total / self.counts[name]
            for name, total in self.sums.items()
            if name.partition("/")[0] not in COUNTED
        }

    def take(self) -> "MetricWindow":
        """Fold, return a copy of this window, and reset this window."""
        self.fold()
        window = copy.copy(self)
        self.sums = {}
        self.counts = {}
        self.values = []
        return window

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._pending.clear()
        self.failed.clear()


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

    def watched(self, loss_metric: str) -> str | None:
        """Return the name of the metric in which spikes are detected; None if detection is off."""
        return None if self.action == "off" else self.metric or loss_metric


class SpikeDetector(Fields):
    """A detector of spikes: steps whose metric lies far above the median of the previous steps.

    Values that are not finite are ignored.
    """

    STATE = ("history", "unusual")

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.history: list[float] = []  # values of the last `window` usual steps
        self.unusual = 0  # consecutive unusual steps; after LEAST of them the history starts anew

    def see(self, first: int, values: Sequence[float]) -> tuple[int, float, float] | None:
        """Record the metric of consecutive steps, and return the first spike.

        `first` is the number of the first of these steps. The spike is (step, value, median of the
        previous values); None if there is none.
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


def improvement(value: float, previous: float | None, is_lower_better: bool) -> float:
    """Return the amount by which `value` is better than `previous`.

    Return infinity if there is no previous value.
    """
    if previous is None:
        return math.inf
    return previous - value if is_lower_better else value - previous


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
        gain = improvement(value, self.best, self.lower_is_better)
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
