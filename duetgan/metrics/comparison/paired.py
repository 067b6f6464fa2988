"""Compute differences of two metrics, with 95 % intervals and two-sided p-values."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from duetgan.metrics.intervals import NORMAL
from duetgan.metrics.protocol import Document

LEVEL = 0.05  # significance level of verdicts, that of the 95 % intervals


@dataclass(frozen=True)
class Difference:
    """The difference of two metrics, second minus first."""

    difference: float
    interval: list[float] | None  # 95 %; None if the spread is unknown
    p: float | None  # two-sided p-value; None if the spread is unknown
    method: str  # name of the test


def independent_figures(
    first: float,
    first_interval: Sequence[float] | None,
    second: float,
    second_interval: Sequence[float] | None,
) -> Difference:
    """Compare two metrics by their intervals, as if they were independent (Zou and Donner 2008).

    Metrics on the same test images are correlated, which makes the interval too wide rather than
    too narrow. The p-value is that of a normal distribution. Its standard error is the distance
    from the difference to the interval's limit on the side of 0, divided by 1.96, so that p is
    below 0.05 exactly if the interval excludes 0.
    """
    value = second - first
    if first_interval is None or second_interval is None:
        return Difference(value, None, None, "no interval")
    low = value - math.hypot(second - second_interval[0], first_interval[1] - first)
    high = value + math.hypot(second_interval[1] - second, first - first_interval[0])
    toward_zero = (value - low if value > 0 else high - value) / NORMAL
    return Difference(value, [low, high], normal(value, toward_zero, "").p, "intervals of each")


def by_seeds(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare pairs of runs of equal training seed by Student's paired test.

    `first[i]` and `second[i]` are the metric of the two runs of pair i. The interval covers the
    randomness of training, but not the choice of the test images, which all runs have in common.
    There must be at least two pairs.
    """
    differences = np.asarray(second) - np.asarray(first)
    value = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    # differences that are equal except for rounding do not tell the spread
    if error <= 1e-12 * max(1e-300, float(np.abs([first, second]).max())):
        return Difference(value, None, None, "paired by training seed")
    return student(value, error, len(differences) - 1, "paired by training seed")


def student(value: float, error: float, degrees: float, method: str) -> Difference:
    """Test a difference by Student's distribution with `degrees` degrees of freedom.

    `value` is the difference, `error` is its standard error, and `method` is the name of the test.
    """
    from scipy.stats import t

    half = float(t.ppf(0.975, degrees)) * error
    return Difference(
        value, [value - half, value + half], float(2 * t.sf(abs(value) / error, degrees)), method
    )


def normal(value: float, error: float, method: str) -> Difference:
    """Test a difference by a normal distribution.

    `value` is the difference, `error` is its standard error, and `method` is the name of the test.
    """
    if error == 0:
        equal = value == 0
        return Difference(value, [0.0, 0.0] if equal else None, 1.0 if equal else None, method)
    p = math.erfc(abs(value) / error / math.sqrt(2))
    return Difference(value, [value - NORMAL * error, value + NORMAL * error], p, method)


def holm(rows: Iterable[Document]) -> None:
    """Correct the `p` of rows in place for multiple tests (Holm 1979).

    The correction bounds the chance of one or more false positives. Rows whose `p` is None are
    ignored.
    """
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    largest = 0.0
    for index, row in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - index) * row["p"]))
        row["p"] = largest
