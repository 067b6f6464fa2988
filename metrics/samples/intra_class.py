"""Frechet distance within each class (Miyato and Koyama 2018, 1802.05637: intra-FID), and its mean over the classes.

A generator that ignores its labels may have a small distance over all classes together, but not within them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from metrics.intervals import normal_interval
from metrics.samples.frechet_variance import frechet_with_variance


@dataclass(frozen=True, kw_only=True)
class IntraClass:
    """The distance of each class (None: fewer than two images on a side), their mean, and its 95 % interval."""

    mean: float | None
    interval: list[float] | None
    by_class: list[float | None]
    images: int  # the least number of images on a side that a distance above rests on


def intra_class_frechet(
    samples: Tensor,  # [m, F]
    sample_labels: Tensor,  # int64 [m], the classes that were asked for, 0 to classes - 1
    real: Tensor,  # [n, F]
    real_labels: Tensor,  # int64 [n]
    *,
    classes: int,
) -> IntraClass:
    """Of every class on its own. The mean is over the classes that have a distance, all alike."""
    found: list[tuple[float, float]] = []
    by_class: list[float | None] = []
    least = max(len(samples), len(real))
    for label in range(classes):
        drawn, shown = samples[sample_labels == label], real[real_labels == label]
        size = min(len(drawn), len(shown))
        if size < 2:
            by_class.append(None)
            continue
        found.append(frechet_with_variance(drawn, shown))
        by_class.append(found[-1][0])
        least = min(least, size)
    if not found:
        return IntraClass(mean=None, interval=None, by_class=by_class, images=0)
    values, variances = torch.tensor(found, dtype=torch.float64).T
    interval = normal_interval(float(values.mean()), float(variances.sum()) / len(found) ** 2, low=0.0)
    return IntraClass(mean=float(values.mean()), interval=interval, by_class=by_class, images=least)
