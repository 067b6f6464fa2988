"""Compute the recognised fraction and the diversity of a generator's samples."""

import torch
from torch import Tensor

from duetgan.metrics.classification.answers import multi_hot
from duetgan.metrics.intervals import Measured


def recognised(
    probabilities: Tensor,  # of the judge, [n, K]
    labels: Tensor,  # requested class, int64 [n]; bool [n, K] if samples have several labels
    thresholds: Tensor | None,  # of each label, [K], if samples have several labels
) -> Measured:
    """Return the fraction of samples for which the judge predicts the requested class.

    The judge is a classifier. If samples have several labels, it must predict exactly the requested
    labels. The value of a class is the fraction of its samples for which the judge predicts this
    class; None if it has no samples.
    """
    classes = probabilities.shape[1]
    requested = multi_hot(labels, classes)
    if thresholds is None:
        predicted = multi_hot(probabilities.argmax(1), classes)
    else:
        predicted = probabilities >= thresholds.to(probabilities)
    counts = zip((predicted & requested).sum(0).tolist(), requested.sum(0).tolist(), strict=True)
    by_class = [count / total if total else None for count, total in counts]
    return Measured.fraction((predicted == requested).all(1), by_class)


def mean_distances(features: Tensor) -> Tensor:
    """Return the mean Euclidean distance of each vector of [n, F] to all others, float64 [n].

    n must be at least 2.
    """
    rows = features.detach().cpu().double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum(1) / (len(rows) - 1)


def diversity_ratio(samples: Tensor, real: Tensor) -> Measured:
    """Return the mean distance between samples [n, F], divided by that between real images [m, F].

    At 1, samples are as diverse as real images; at 0, all samples are the same. The 95 % interval
    is that of the infinitesimal jackknife, over draws of both sets. A bootstrap would be biased: an
    image that is drawn twice is at distance 0 from itself. The value is None if there are fewer
    than two samples or real images, or if all real images are the same.
    """
    if min(len(samples), len(real)) < 2:
        return Measured(None)
    means = [mean_distances(features) for features in (samples, real)]
    spread, reference = (float(distances.mean()) for distances in means)
    if reference == 0:
        return Measured(None)
    # an image counts twice, in its own mean distance and in those of all others: 2**2
    variances = [4 * float(distances.var()) / len(distances) for distances in means]
    ratio = spread / reference
    return Measured.normal(ratio, (variances[0] + ratio**2 * variances[1]) / reference**2, low=0.0)


def diversity_by_class(
    samples: Tensor,  # [n, F]
    sample_labels: Tensor,  # int64 [n], 0 to classes - 1; or bool [n, classes]
    real: Tensor,  # [m, F]
    real_labels: Tensor,  # int64 [m], or bool [m, classes]
    *,
    classes: int,
    images: int,
) -> Measured:
    """Return the diversity ratio of the least diverse class, with the ratios by class.

    The ratio of a class compares its first samples and its first real images, the same number of
    each, at most `images`.
    """
    results, sizes = [], []
    for is_sample, is_real in zip(
        multi_hot(sample_labels, classes).T, multi_hot(real_labels, classes).T, strict=True
    ):
        class_samples, class_real = samples[is_sample][:images], real[is_real][:images]
        size = min(len(class_samples), len(class_real))
        results.append(diversity_ratio(class_samples[:size], class_real[:size]))
        sizes.append(size if results[-1].value is not None else images)
    by_class = [result.value for result in results]
    defined = [result for result in results if result.value is not None]
    if not defined:
        return Measured(None, by_class=by_class)
    smallest = min(defined, key=lambda result: result.value or 0.0)
    return Measured(smallest.value, smallest.interval, by_class, min(sizes))
