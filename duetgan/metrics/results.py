"""Give Python code access to the results of an evaluation: `Evaluation` holds its metrics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from duetgan.metrics.figures import rows_of
from duetgan.metrics.protocol import Document
from duetgan.utils.runlog.frames import data_frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Metric:
    """A metric's value, its 95 % interval and its floor. A missing interval or floor is None."""

    name: str  # as in metrics.json
    value: float
    low: float | None
    high: float | None
    floor: float | None  # the value between two sets of real images
    extractor: str  # of the features; "" for a metric that uses no features


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an evaluation, and its complete results."""

    metrics: list[Metric]
    document: Document  # as in metrics.json (docs/evaluation.md)

    @classmethod
    def of(cls, document: Document) -> "Evaluation":
        """Return the `Evaluation` for `document`, which has the results of an evaluation."""
        metrics = []
        for row, results in rows_of(document):
            low, high = results.get(f"{row.key}_interval") or (None, None)
            floors = {"frechet": results.get("floor"), "kernel": results.get("kernel_floor")}
            floor = results.get("floors", floors).get(row.key)
            extractor = results.get("extractor", "")
            metrics.append(Metric(row.key, results[row.key], low, high, floor, extractor))
        return cls(metrics, document)

    def __getitem__(self, name: str) -> Metric:
        """Return the metric `name`; if there is one for each extractor, that of the first one.

        Raises KeyError if there is none.
        """
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(name)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with a row for each metric and a column for each field of `Metric`.

        Raises UserError if pandas is not installed.
        """
        names = Metric.__dataclass_fields__
        return data_frame(
            {name: [getattr(metric, name) for metric in self.metrics] for name in names}
        )
