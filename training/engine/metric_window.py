"""The metrics of the steps since the last row of the log."""

from typing import Any

import torch
from torch import Tensor

from duetgan.training.base.monitors import Fields
from duetgan.utils.distributed import collectives


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
        every = torch.cat([torch.stack(self._pending[name]).double() for name in names])
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
