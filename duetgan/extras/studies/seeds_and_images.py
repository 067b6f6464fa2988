"""Compare two groups of runs; both seeds and images are random effects."""

import math

import numpy as np

from duetgan.metrics.comparison.paired import Difference, normal, student


def by_seeds_and_images(first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> Difference:
    """Compare the weighted accuracies of two groups of S runs on the same N images.

    Seeds and images are both random effects, like the readers and cases of a reader study in
    radiology. The variance is that of the two-way analysis of variance, and the degrees of freedom
    are Hillis's (2007, Stat. Med. 26, 596-619, equation 4). With one run per group, only images are
    random effects, and the distribution is normal.

    Args:
        first: Correct predictions of the first runs, bool [S, N].
        second: Correct predictions of the second runs, trained with the same seeds, bool [S, N].
        weights: Weights of the images, [N], which sum to 1.

    Returns:
        The difference second minus first, with its interval and p-value.
    """
    used = weights > 0
    scale = weights[used] * used.sum()
    differences = (second[:, used].astype(np.float64) - first[:, used]) * scale
    seeds, count = differences.shape
    value = float(differences.mean())
    image_means = differences.mean(0)
    if seeds == 1:
        error = float(image_means.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
        return normal(value, error, "paired by image")
    method = "paired by seed and image"
    seed_means = differences.mean(1)
    residuals = differences - seed_means[:, None] - image_means + value
    # mean squares of the analysis of variance
    of_seeds = count * float(seed_means.var(ddof=1))
    of_images = seeds * float(image_means.var(ddof=1)) if count > 1 else 0.0
    of_residuals = float(np.square(residuals).sum()) / max(1, (seeds - 1) * (count - 1))
    # if seeds differ by no more than rounding, only images are random effects
    if of_seeds <= 1e-12 * (of_images + of_residuals):
        return normal(value, math.sqrt(of_images / (seeds * count)), method)
    total = of_seeds + max(0.0, of_images - of_residuals)
    degrees = (seeds - 1) * (total / of_seeds) ** 2
    return student(value, math.sqrt(total / (seeds * count)), degrees, method)
