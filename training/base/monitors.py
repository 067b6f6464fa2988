"""What keeps and watches a training's figures: those since the last row of the log, spikes, early stopping."""

import copy
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from duetgan.utils.config.model import AboveOne, Config, NonNegativeFloat, PositiveInt
from duetgan.utils.distributed import collectives

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
    """Means of the metrics since the last log tick, on the device until `fold`. Of `watched` every value is kept."""

    STATE = ("sums", "counts", "values")

    def __init__(self, watched: str | None = None) -> None:
        self.watched = watched
        self.values: list[float] = []  # of the watched metric, a step each
        self._pending: dict[str, list[Tensor]] = {}
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self._pending.setdefault(name, []).append(value)

    def fold(self) -> None:
        """Add the pending values up over steps and ranks: one transfer and one collective. Steps are added one after
        the other, so that the sums do not depend on when this is called.
        """
        if not self._pending:
            return
        names = sorted(self._pending)
        pending = [torch.stack(self._pending[name]) for name in names]
        every = torch.cat([values.to(collectives.widest(values.device)) for values in pending])
        totals = iter(collectives.all_reduce_sum_(every).tolist())
        for name in names:
            values = [next(totals) for _ in self._pending[name]]
            for value in values:
                self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + len(values)
            if name == self.watched:
                self.values += values
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


class SpikesConfig(Config):
    """What counts as a spike of the loss, and what to do then. Checked at every log tick."""

    # roll-back: go back to the last checkpoint before the spike and leave out the batches since
    action: Literal["off", "warn", "roll-back"] = "warn"
    metric: str | None = None  # of metrics.jsonl, one that every step has; None: the task's loss
    factor: AboveOne = 20.0  # robust standard deviations (1.4826 MAD) above the median of the last steps
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
        """Note the values of updates from `first` on; the first spike: its update, its value and the usual one."""
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

    patience: PositiveInt | None = None  # evaluations in a row without a better figure; None: train to the last step
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
        gain = math.inf if self.best is None else self.best - value if self.lower_is_better else value - self.best
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
