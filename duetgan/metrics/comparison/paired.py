"""Differences of two metrics with 95 % intervals and two-sided p-values."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from duetgan.metrics.intervals import NORMAL, root
from duetgan.metrics.protocol import Document

LEVEL = 0.05  # significance level of verdicts, that of the 95 % intervals


@dataclass(frozen=True)
class Difference:
    """The difference of two metrics, second minus first."""

    difference: float
    interval: list[float] | None  # 95 %; None if the spread is unknown
    p: float | None  # two-sided p-value; None if the spread is unknown
    method: str  # name of the test


def paired_fractions(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compare the fractions of hits, bool [n], of two classifiers on the same images.

    p is that of McNemar's exact test; its null hypothesis: if only one classifier is correct on an
    image, it is as likely the first as the second. The interval is Tango's (1998), which keeps its
    level for few images and for fractions near 0 and 1, extended to 0 if the exact test, which is
    more conservative, is not significant.
    """
    from scipy.stats import binomtest  # imported here because SciPy is slow to import

    gained, lost = int((second & ~first).sum()), int((first & ~second).sum())
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    low, high = tango(gained, lost, len(first))
    interval = [low, high] if p < LEVEL else [min(low, 0.0), max(high, 0.0)]
    return Difference((gained - lost) / len(first), interval, p, "McNemar")


def tango(gained: int, lost: int, n: int) -> list[float]:
    """Return the 95 % score interval of (gained - lost) / n in n matched pairs.

    `gained` pairs have only the second hit, `lost` only the first. The limits are the differences
    at which the score is +-NORMAL (Tango 1998, Stat. Med. 17, 891-908).
    """

    def score(difference: float) -> float:
        """Return the score statistic, which falls with the difference (equations 4 and 5)."""
        a = 2 * n
        b = -gained - lost + (2 * n - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        # estimated fraction of pairs with the first hit alone, given the difference
        only_first = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = n * (2 * only_first + difference * (1 - difference))
        distance = gained - lost - n * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    estimate = (gained - lost) / n
    return [root(score, NORMAL, -1.0, estimate), root(score, -NORMAL, estimate, 1.0)]


def paired_figures(value: float, first: np.ndarray, second: np.ndarray) -> Difference:
    """Test the difference `value` of two metrics of the same images.

    The standard error is that of the infinitesimal jackknife (Efron 1982). For the AUROC this is
    DeLong's paired test (1988), for a mean the paired normal test.

    Args:
        value: The second metric minus the first.
        first: Influence of each image on the first metric, [n].
        second: Influence of each image on the second metric, [n].
    """
    error = float(np.sqrt(np.square(second - first).sum())) / len(first)
    return normal(value, error, "paired by image")


def independent_figures(
    first: float, first_interval: Sequence[float], second: float, second_interval: Sequence[float]
) -> Difference:
    """Compare two metrics by their intervals, as if they were independent (Zou and Donner 2008).

    Metrics of the same test images are correlated, so that the interval is too wide rather than too
    narrow. p is that of a normal distribution whose mean is the difference, and whose 95 % interval
    ends at the same limit on the side of 0.
    """
    value = second - first
    low = value - math.hypot(second - second_interval[0], first_interval[1] - first)
    high = value + math.hypot(second_interval[1] - second, first - first_interval[0])
    toward_zero = (value - low if value > 0 else high - value) / NORMAL
    return Difference(value, [low, high], normal(value, toward_zero, "").p, "intervals of each")


def by_seeds(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare pairs of runs that were trained with the same seeds, by Student's paired test.

    The interval covers the randomness of training, but not the choice of the test images, which all
    runs have in common. There must be at least two pairs.
    """
    differences = np.asarray(second) - np.asarray(first)
    value = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    # differences that are equal except for rounding do not tell the spread
    if error <= 1e-12 * max(1e-300, float(np.abs([first, second]).max())):
        return Difference(value, None, None, "paired by training seed")
    return student(value, error, len(differences) - 1, "paired by training seed")


def student(value: float, error: float, degrees: float, method: str) -> Difference:
    """Test a difference with this standard error by Student's distribution."""
    from scipy.stats import t

    half = float(t.ppf(0.975, degrees)) * error
    return Difference(
        value, [value - half, value + half], float(2 * t.sf(abs(value) / error, degrees)), method
    )


def normal(value: float, error: float, method: str) -> Difference:
    """Test a difference with this standard error by a normal distribution."""
    if error == 0:
        equal = value == 0
        return Difference(value, [0.0, 0.0] if equal else None, 1.0 if equal else None, method)
    p = math.erfc(abs(value) / error / math.sqrt(2))
    return Difference(value, [value - NORMAL * error, value + NORMAL * error], p, method)


def holm(rows: Iterable[Document]) -> None:
    """Correct the `p` of rows in place for multiple tests (Holm 1979).

    This bounds the chance of one or more false positives. Rows whose `p` is None are ignored.
    """
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    largest = 0.0
    for index, row in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - index) * row["p"]))
        row["p"] = largest
