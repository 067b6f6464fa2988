"""Monitors of a training: time, means of metrics, skipped updates."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from duetgan.utils.distributed import collectives

State = dict[str, Any]  # a state dict


class Fields:
    """A base class of objects whose state is the attributes named in STATE, which are plain data."""

    STATE: ClassVar[tuple[str, ...]]

    def state_dict(self) -> State:
        return copy.deepcopy({name: getattr(self, name) for name in self.STATE})

    def load_state_dict(self, state: State) -> None:
        for name in self.STATE:
            setattr(self, name, copy.deepcopy(state[name]))


class Stopwatch:
    """A clock of the training time, without pauses, since `step`, the step of the last row."""

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
        """Leave out the time of the block."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started


# metrics by network that are added up over the run, not averaged
COUNTED = ("skipped_updates", "nonfinite_updates")


class MetricWindow(Fields):
    """Means of the training metrics since the last row of metrics.

    Metrics stay on the device until `fold`.
    """

    STATE = ("sums", "counts")

    def __init__(self) -> None:
        # one per step since `SkippedUpdates` last emptied it: True if an update was not finite
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
        self.failed += failed
        self._pending.clear()

    def total(self, prefix: str) -> float:
        """Return the sum of the folded metrics whose names begin with `prefix/`."""
        return sum(total for name, total in self.sums.items() if name.startswith(f"{prefix}/"))

    def means(self) -> dict[str, float]:
        """Return the means of the metrics, except those that are COUNTED."""
        self.fold()
        return {
            name: total / self.counts[name]
            for name, total in self.sums.items()
            if name.partition("/")[0] not in COUNTED
        }

    def take(self) -> "MetricWindow":
        """Return a folded copy of this window, and reset this window."""
        self.fold()
        window = copy.copy(self)
        self.sums = {}
        self.counts = {}
        return window

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._pending.clear()
        self.failed.clear()
