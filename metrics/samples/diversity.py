"""Do the samples differ from one another as much as real images do, and are they what was asked for?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metrics import PER_CLASS
from metrics.intervals import normal_interval


def mean_pairwise_distance(features: Tensor) -> float:
    """Mean Euclidean distance over all pairs of features [n, F], computed in float64; n at least 2."""
    if len(features) < 2:
        raise ValueError(f"a pairwise distance needs at least 2 feature vectors, not {len(features)}")
    return float(torch.pdist(features.detach().cpu().double()).mean())


def diversity_ratio(samples: Tensor, real: Tensor) -> float | None:
    """Mean pairwise distance of samples [n, F] over that of real images [m, F].

    1 is as varied as the real ones, 0 is one image over and over. None where it is undefined: fewer than two vectors
    on a side, or real images that are all the same.
    """
    if len(samples) < 2 or len(real) < 2:
        return None
    reference = mean_pairwise_distance(real)
    return mean_pairwise_distance(samples) / reference if reference > 0 else None


def diversity_interval(samples: Tensor, real: Tensor) -> list[float] | None:
    """95 % interval of `diversity_ratio` over draws of both sets, by the infinitesimal jackknife; None where undefined.

    A bootstrap would be biased: an image that is drawn twice is at distance 0 from itself.
    """
    ratio = diversity_ratio(samples, real)
    if ratio is None:
        return None
    variances = []
    for features in (samples, real):
        rows = features.detach().cpu().double()
        exact = "donot_use_mm_for_euclid_dist"
        means = torch.cdist(rows, rows, compute_mode=exact).sum(1) / (len(rows) - 1)  # of each image's pairs
        variances.append(4 * float(means.var()) / len(rows))  # of the mean over all pairs, in which each is twice
    variance = (variances[0] + ratio**2 * variances[1]) / mean_pairwise_distance(real) ** 2
    return normal_interval(ratio, variance, low=0.0)


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """The ratio of each class (None: undefined), and the smallest, which is the figure of the whole generator."""

    smallest: float | None
    interval: list[float] | None  # 95 %, of the class that is the smallest
    by_class: list[float | None]
    images: int  # the least number of images on either side that a ratio above rests on

    def smallest_figures(self) -> dict[str, Any]:
        """Its two keys in an evaluation's document."""
        return {"diversity_ratio": self.smallest, "diversity_ratio_interval": self.interval}


def diversity_by_class(
    samples: Tensor,  # [n, F]
    sample_labels: Tensor,  # int64 [n], 0 to classes - 1
    real: Tensor,  # [m, F]
    real_labels: Tensor,  # int64 [m]
    *,
    classes: int,
    images: int = PER_CLASS,
) -> Diversity:
    """The diversity ratio of each class, over its first `images` samples and real images, as many of each."""
    ratios: list[float | None] = []
    intervals: dict[float, list[float] | None] = {}
    least = images
    for label in range(classes):
        drawn = samples[sample_labels == label][:images]
        shown = real[real_labels == label][:images]
        size = min(len(drawn), len(shown))
        ratio = diversity_ratio(drawn[:size], shown[:size])
        ratios.append(ratio)
        if ratio is not None:
            intervals[ratio] = diversity_interval(drawn[:size], shown[:size])
        least = least if ratio is None else min(least, size)
    smallest = min(intervals, default=None)
    interval = None if smallest is None else intervals[smallest]
    return Diversity(smallest=smallest, interval=interval, by_class=ratios, images=least if intervals else 0)


def recognised_share(
    predictions: Tensor,  # int64 [n], the class that the judge names
    labels: Tensor,  # int64 [n], the class that was asked for
    *,
    classes: int,
) -> tuple[float, list[float | None]]:
    """Share of samples whose class a classifier predicts: over all, and of each class (None: none was asked for)."""
    hits = predictions == labels
    if len(hits) == 0:
        raise ValueError("the recognised share of no samples is undefined")
    by_class: Sequence[Tensor] = [hits[labels == label] for label in range(classes)]
    return float(hits.double().mean()), [float(part.double().mean()) if len(part) else None for part in by_class]
