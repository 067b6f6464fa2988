"""95 % confidence intervals of metrics, in closed form (no resampling)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

NORMAL = 1.959964  # 97.5 % quantile of the normal distribution, for 95 % intervals
BISECTION_STEPS = 100  # enough for the last digits of a float64


@dataclass(frozen=True)
class Measured:
    """A metric's value, with its interval, its values by class and each image's influence on it."""

    value: float | None  # None if undefined
    interval: list[float] | None = None  # 95 %: [low, high]
    by_class: Sequence[float | None] = ()
    images: int = 0  # number of images of the smallest class in `by_class`
    note: str = ""  # a caveat, or the reason why the value is missing
    # of each image, [n]: the derivative of the value by the image's weight, times n
    influence: np.ndarray | None = None

    @classmethod
    def normal(
        cls, value: float, variance: float, *, low: float = -math.inf, high: float = math.inf
    ) -> Self:
        """Return an estimate with the 95 % interval of a normal distribution.

        Args:
            variance: Variance of the estimate, not of an image. If it is 0, there is no interval,
                because the images have no spread.
            low: Smallest possible value, at which the interval is cut off.
            high: Largest possible value.
        """
        half = NORMAL * max(0.0, variance) ** 0.5
        return cls(
            value,
            [min(max(end, low), high) for end in (value - half, value + half)] if half else None,
        )

    @classmethod
    def influenced(
        cls,
        value: float,
        influence: Tensor | np.ndarray,
        by_class: Sequence[float | None] = (),
        *,
        high: float = 1.0,
    ) -> Self:
        """Return a metric between 0 and `high` with the 95 % interval from each image's influence.

        The standard error is sqrt(mean(influence^2) / n), the infinitesimal jackknife (Efron 1982),
        which is the limit of the bootstrap. There is no interval if all influences are 0.

        Args:
            value: The metric over n images.
            influence: Influence of each image on the value, [n].
        """
        influence = np.asarray(influence)
        half = NORMAL * float(np.sqrt(np.square(influence).sum())) / len(influence)
        interval = [max(0.0, value - half), min(high, value + half)] if half else None
        return cls(value, interval, by_class, influence=influence)

    @classmethod
    def fraction(cls, hits: Tensor, by_class: Sequence[float | None] = ()) -> Self:
        """Return the fraction of True in `hits`, bool [n], with its 95 % Wilson interval."""
        count, n = int(hits.sum()), len(hits)
        return cls(count / n, wilson(count, n), by_class)


def wilson(hits: int, count: int) -> list[float] | None:
    """Return the 95 % score interval [low, high] of the fraction hits / count (Wilson 1927).

    The limits lie within 0 and 1. Returns None if `count` is 0.
    """
    if count == 0:
        return None
    fraction, square = hits / count, NORMAL**2
    centre = (fraction + square / (2 * count)) / (1 + square / count)
    half = (
        NORMAL
        / (1 + square / count)
        * math.sqrt(fraction * (1 - fraction) / count + square / (4 * count**2))
    )
    return [max(0.0, centre - half), min(1.0, centre + half)]


def balanced_interval(hits: Sequence[int], counts: Sequence[int]) -> list[float]:
    """Return the 95 % interval of the mean of several fractions, hits[i] / counts[i].

    On each side, the squared distances from the fractions to their Wilson limits are added, as for
    independent estimates (the "method of variance estimates recovery", Zou and Donner 2008). Each
    count must be at least 1.
    """
    fractions = np.divide(hits, counts)
    limits = np.array([wilson(*pair) for pair in zip(hits, counts, strict=True)])
    mean = sum(fractions.tolist()) / len(limits)
    below = math.hypot(*(fractions - limits[:, 0])) / len(limits)
    above = math.hypot(*(limits[:, 1] - fractions)) / len(limits)
    return [max(0.0, mean - below), min(1.0, mean + above)]


def root(
    falling: Callable[[float], float | Tensor], value: float | Tensor, low: float, high: float
) -> float:
    """Return the x between `low` and `high` for which `falling` has the value `value`.

    The function `falling` must decrease. If it does not reach the value between `low` and `high`,
    the end where it comes nearest to the value is returned.
    """
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def jackknife_variance(left_out: Tensor) -> float:
    """Return the variance of an estimate by the delete-a-group jackknife (Tukey 1958).

    The jackknife suits metrics of nearest neighbours, which a bootstrap would bias: a resample
    holds images twice, and a duplicate is nearer than any neighbour.

    Args:
        left_out: G estimates, [G]; each leaves out one of G equal groups of images.
    """
    count = len(left_out)
    return float((left_out - left_out.mean()).square().sum() * (count - 1) / count)
