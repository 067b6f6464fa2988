"""95 % intervals of figures over images, by formula: none draws its own resamples."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

NORMAL = 1.959964  # 97.5 % of the normal distribution lie below: intervals of 95 %
FEW = 1000  # images a side, below which distances of features are rough
WIDE = 0.1  # an interval's width from which on a share is rough


def wilson(hits: int, count: int) -> list[float] | None:
    """The 95 % score interval [low, high] of a share (Wilson 1927), within 0 and 1; None of nothing."""
    if count == 0:
        return None
    share, square = hits / count, NORMAL**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def interval_of(share: float | None, count: int) -> list[float] | None:
    """`wilson` of a share of `count` images."""
    return None if share is None else wilson(round(share * count), count)


def balanced_interval(confusion: Sequence[Sequence[int]]) -> list[float] | None:
    """The 95 % interval of the mean recall of the classes that have images; counts [true][predicted].

    The distances from each recall to its Wilson limits are added up as independent ones are: by their squares (the
    "method of variance estimates recovery", Zou and Donner 2008).
    """
    rows = [(row[label], sum(row)) for label, row in enumerate(confusion) if sum(row)]
    limits = [(hits / count, wilson(hits, count) or [0.0, 1.0]) for hits, count in rows]
    if not limits:
        return None
    mean = sum(share for share, _ in limits) / len(limits)
    below = math.hypot(*(share - low for share, (low, _) in limits)) / len(limits)
    above = math.hypot(*(high - share for share, (_, high) in limits)) / len(limits)
    return [max(0.0, mean - below), min(1.0, mean + above)]


def influence_interval(
    value: float, influence: np.ndarray, *, low: float = 0.0, high: float = 1.0
) -> list[float] | None:
    """The 95 % interval of a figure of n images from each one's influence on it, [n], within `low` and `high`.

    The influence is the figure's derivative by the image's weight, times n. The standard error is the root of the mean
    square over n, of the infinitesimal jackknife (Efron 1982); it is what the bootstrap's tends to. None where no image
    has any: such images leave no spread to estimate it from.
    """
    half = NORMAL * float(np.sqrt(np.square(influence).sum())) / len(influence)
    return [max(low, value - half), min(high, value + half)] if half else None


def normal_interval(value: float, variance: float, *, low: float = -np.inf, high: float = np.inf) -> list[float]:
    """The 95 % interval of an estimate with a known variance (its own, not an image's), within what it can be."""
    half = NORMAL * max(0.0, variance) ** 0.5
    return [float(np.clip(value - half, low, high)), float(np.clip(value + half, low, high))]


def jackknife_variance(left_out: Tensor) -> float:
    """Variance of an estimate, from its values [G] with one of G equal groups of images left out (Tukey 1958).

    For figures that a resample would bias because it holds images twice: a twin is nearer than any neighbour.
    """
    count = len(left_out)
    return float((left_out - left_out.mean()).square().sum() * (count - 1) / count)


def few_images(n: int, *, interval: list[float] | None = None, distances: bool = False) -> dict[str, str]:
    """A note under the key `n` where so few images leave much to chance, else none."""
    words = []
    if interval is not None and interval[1] - interval[0] > WIDE:
        words.append(f"its share is known to {100 * (interval[1] - interval[0]):.0f} points only")
    if distances and n < FEW:
        words.append(
            f"distances of fewer than {FEW:,} images are rough and depend on n: compare them only with figures of the "
            "same n, and only large differences"
        )
    return {"n": f"few images ({n}): {'; '.join(words)}"} if words else {}
