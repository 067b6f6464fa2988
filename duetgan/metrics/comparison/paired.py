"""Is one of two figures larger than the other? Differences with 95 % intervals and p-values, all
two-sided.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duetgan.metrics.intervals import NORMAL, root

LEVEL = 0.05  # of a verdict: an interval of 95 % leaves 0 out where p is below


@dataclass(frozen=True)
class Difference:
    difference: float
    interval: list[float] | None  # of 95 %; None where nothing tells how far chance reaches
    p: float | None  # that a difference as large comes about by chance alone
    method: str


def paired_shares(first: np.ndarray, second: np.ndarray) -> Difference:
    """Two shares over the same images: `first` and `second` bool [n].

    p is McNemar's exact test: of the images where only one is right, each is as likely to be in the
    right. The interval is Tango's (1998), which keeps its level for few images and for shares near
    0 and 1; where the exact test, which is the more cautious one, cannot tell at `LEVEL`, it is
    stretched to 0.
    """
    from scipy.stats import binomtest  # where it is used: SciPy takes its time to import

    gained, lost = int((second & ~first).sum()), int((first & ~second).sum())
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    low, high = tango(gained, lost, len(first))
    interval = [low, high] if p < LEVEL else [min(low, 0.0), max(high, 0.0)]
    return Difference((gained - lost) / len(first), interval, p, "McNemar")


def tango(gained: int, lost: int, n: int) -> list[float]:
    """The 95 % score interval of (gained - lost) / n in matched pairs (Tango 1998, Stat. Med. 17,
    891-908).
    """

    def score(difference: float) -> float:
        """Falls with the difference; its root of +-NORMAL are the limits. Equations 4 and 5."""
        a = 2 * n
        b = -gained - lost + (2 * n - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        # estimated share, given the difference
        only_first = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = n * (2 * only_first + difference * (1 - difference))
        distance = gained - lost - n * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    estimate = (gained - lost) / n
    return [root(score, NORMAL, -1.0, estimate), root(score, -NORMAL, estimate, 1.0)]


def paired_figures(value: float, first: np.ndarray, second: np.ndarray) -> Difference:
    """The difference `value` of two figures of the same images, from each image's influence on
    both, [n].

    The standard error is of the infinitesimal jackknife, see `Measured.influenced`; for the AUROC
    this is DeLong's paired test (1988), for a mean the paired normal test.
    """
    error = float(np.sqrt(np.square(second - first).sum())) / len(first)
    return _normal(value, error, "paired by image")


def independent_figures(
    first: float, first_interval: Sequence[float], second: float, second_interval: Sequence[float]
) -> Difference:
    """The difference of two figures with intervals of their own, taken as independent (Zou and
    Donner 2008).

    Figures of the same test images go up and down together, so that the interval is rather too
    wide. p is of the normal distribution that reaches 0 as the interval does.
    """
    value = second - first
    low = value - math.hypot(second - second_interval[0], first_interval[1] - first)
    high = value + math.hypot(second_interval[1] - second, first - first_interval[0])
    toward_zero = (value - low if value > 0 else high - value) / NORMAL
    return Difference(value, [low, high], _normal(value, toward_zero, "").p, "intervals of each")


def by_seeds(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The mean difference of pairs of runs that were trained with the same seeds; at least two
    pairs.

    Student's paired test: it covers the chance of training and of the draw of test images for that
    training, but not that all runs share the test images.
    """
    differences = np.asarray(second) - np.asarray(first)
    value, error = (
        float(differences.mean()),
        float(differences.std(ddof=1)) / math.sqrt(len(differences)),
    )
    if error <= 1e-12 * max(1e-300, float(np.abs([first, second]).max())):  # equal but for rounding
        return Difference(value, None, None, "paired by training seed")
    return _student(value, error, len(differences) - 1, "paired by training seed")


def by_seeds_and_images(first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> Difference:
    """The difference of two weighted shares over S pairs of runs and the same N images: bool [S,
    N], weights [N] of sum 1.

    Both the seeds and the images are taken as drawn at random, as readers and cases are in reader
    studies: the variance is of the two-way analysis of variance, the degrees of freedom are
    Hillis's (2007, Stat. Med. 26, 596-619, equation 4). One pair: over the images alone, by the
    normal distribution.
    """
    used = weights > 0
    each = (second[:, used].astype(np.float64) - first[:, used]) * (weights[used] * used.sum())
    seeds, count = each.shape
    value, of_image = float(each.mean()), each.mean(0)
    if seeds == 1:
        return _normal(
            value,
            float(of_image.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0,
            "paired by image",
        )
    method, of_seed = "paired by seed and image", each.mean(1)
    left = each - of_seed[:, None] - of_image + value
    by_seed = count * float(of_seed.var(ddof=1))  # mean squares
    by_image = seeds * float(of_image.var(ddof=1)) if count > 1 else 0.0
    rest = float(np.square(left).sum()) / max(1, (seeds - 1) * (count - 1))
    both = by_seed + max(0.0, by_image - rest)
    # but for rounding the seeds do not differ: over the images alone
    if by_seed <= 1e-12 * (by_image + rest):
        return _normal(value, math.sqrt(by_image / (seeds * count)), method)
    degrees, error = (seeds - 1) * (both / by_seed) ** 2, math.sqrt(both / (seeds * count))
    return _student(value, error, degrees, method)


def _student(value: float, error: float, degrees: float, method: str) -> Difference:
    from scipy.stats import t

    half = float(t.ppf(0.975, degrees)) * error
    return Difference(
        value, [value - half, value + half], float(2 * t.sf(abs(value) / error, degrees)), method
    )


def _normal(value: float, error: float, method: str) -> Difference:
    if error == 0:
        equal = value == 0
        return Difference(value, [0.0, 0.0] if equal else None, 1.0 if equal else None, method)
    p = math.erfc(abs(value) / error / math.sqrt(2))
    return Difference(value, [value - NORMAL * error, value + NORMAL * error], p, method)


def holm(rows: Iterable[dict[str, Any]]) -> None:
    """Correct the `p` of the rows that have one for their number (Holm 1979): the chance of even
    one false alarm stays below the level.
    """
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    largest = 0.0
    for place, row in enumerate(tested):
        row["p"] = largest = max(largest, min(1.0, (len(tested) - place) * row["p"]))
