"""How sure a figure over images is: 95 % intervals by formula, none by resampling."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

NORMAL = 1.959964  # 97.5 % of the normal distribution lie below: intervals of 95 %
ROUNDS = 100  # of a bisection: to the last digits of a float64


@dataclass(frozen=True)
class Measured:
    """A figure, and what is known of it."""

    value: float | None  # None: it is undefined
    interval: list[float] | None = None  # of 95 %
    by_class: Sequence[float | None] = ()
    images: int = 0  # the fewest images of a class that values by class rest on
    note: str = ""  # what is to be said of it
    # of each image on the value: its derivative by the image's weight, times n
    influence: np.ndarray | None = None

    @classmethod
    def normal(
        cls, value: float, variance: float, *, low: float = -math.inf, high: float = math.inf
    ) -> Self:
        """An estimate of a known variance (its own, not an image's) and its normal interval, within
        what it can be; no interval where nothing varies: such images leave no spread to estimate it
        from.
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
        """A figure of n images, from 0 to `high`, from each one's influence on it, [n].

        The standard error is the root of the mean square over n, of the infinitesimal jackknife
        (Efron 1982); it is what the bootstrap's tends to. No interval where no image has any, as
        `normal`.
        """
        influence = np.asarray(influence)
        half = NORMAL * float(np.sqrt(np.square(influence).sum())) / len(influence)
        interval = [max(0.0, value - half), min(high, value + half)] if half else None
        return cls(value, interval, by_class, influence=influence)

    @classmethod
    def share(cls, hits: Tensor, by_class: Sequence[float | None] = ()) -> Self:
        """How many of n images are hits, bool [n]."""
        count, n = int(hits.sum()), len(hits)
        return cls(count / n, wilson(count, n), by_class)


def wilson(hits: int, count: int) -> list[float] | None:
    """The 95 % score interval [low, high] of a share (Wilson 1927), within 0 and 1; None of
    nothing.
    """
    if count == 0:
        return None
    share, square = hits / count, NORMAL**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = (
        NORMAL
        / (1 + square / count)
        * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    )
    return [max(0.0, centre - half), min(1.0, centre + half)]


def balanced_interval(hits: Sequence[int], counts: Sequence[int]) -> list[float]:
    """The 95 % interval of the mean of several shares, each of at least one image.

    The distances from each share to its Wilson limits are added up as independent ones are: by
    their squares (the "method of variance estimates recovery", Zou and Donner 2008).
    """
    limits = [
        (some / count, wilson(some, count) or [0.0, 1.0])
        for some, count in zip(hits, counts, strict=True)
    ]
    mean = sum(share for share, _ in limits) / len(limits)
    below = math.hypot(*(share - low for share, (low, _) in limits)) / len(limits)
    above = math.hypot(*(high - share for share, (_, high) in limits)) / len(limits)
    return [max(0.0, mean - below), min(1.0, mean + above)]


def root(
    falling: Callable[[float], float | Tensor], value: float | Tensor, low: float, high: float
) -> float:
    """Where a falling function reaches `value`, or the end of the range that is nearer to it."""
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def jackknife_variance(left_out: Tensor) -> float:
    """Variance of an estimate, from its values [G] with one of G equal groups of images left out
    (Tukey 1958).

    For figures that a resample would bias because it holds images twice: a twin is nearer than any
    neighbour.
    """
    count = len(left_out)
    return float((left_out - left_out.mean()).square().sum() * (count - 1) / count)
