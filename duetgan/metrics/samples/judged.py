"""Are samples what was asked for, by an independent classifier, and do they differ as much as real
images do?
"""

import torch
from torch import Tensor

from duetgan.metrics.classification.answers import hot
from duetgan.metrics.intervals import Measured
from duetgan.metrics.protocol import PER_CLASS


def recognised(
    probabilities: Tensor,  # [n, K], the judge's
    # int64 [n], the class that was asked for; of several labels a sample bool [n, K]
    labels: Tensor,
    # [K], of several labels: the probability from which on each is named
    thresholds: Tensor | None = None,
) -> Measured:
    """Share of samples whose class a classifier predicts: over all, and of each class (None: none
    was asked for). Of several labels a sample: where it names exactly those, and of each label
    where it is asked for and named.
    """
    if not len(labels):
        raise ValueError("the recognised share of no samples is undefined")
    asked, answer = hot(labels, probabilities.shape[1]), probabilities.argmax(1)
    named = (
        hot(answer, probabilities.shape[1])
        if thresholds is None
        else probabilities >= thresholds.to(probabilities)
    )
    counts = zip((named & asked).sum(0).tolist(), asked.sum(0).tolist(), strict=True)
    return Measured.share(
        (named == asked).all(1), [count / total if total else None for count, total in counts]
    )


def class_score(probabilities: Tensor) -> Measured:
    """The Inception score (Salimans et al. 2016, 1606.03498, section 4) with our judge in
    Inception's place: exp(mean over images of KL(p(y|x) || p(y))) of its probabilities [n, K], over
    all n at once, not in splits.

    Between 1 (all images are predicted alike, or none with confidence) and K (each surely, all
    classes equally often). It is named after what it is: published Inception scores come from
    another network and cannot be compared. An image's influence on the score's logarithm is its own
    divergence less the mean.
    """
    p = probabilities.detach().cpu().double()
    if not len(p):
        raise ValueError("the class score of no images is undefined")
    divergences = torch.special.xlogy(p, p).sum(1) - torch.special.xlogy(p, p.mean(0)).sum(1)  # [n]
    score = float(divergences.mean().exp())
    return Measured.influenced(score, score * (divergences - divergences.mean()), high=p.shape[1])


def mean_distances(features: Tensor) -> Tensor:
    """Mean Euclidean distance of each of the features [n, F] to the others, float64 [n]; n at least
    2.
    """
    rows = features.detach().cpu().double()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1) / (
        len(rows) - 1
    )


def diversity_ratio(samples: Tensor, real: Tensor) -> Measured:
    """Mean pairwise distance of samples [n, F] over that of real images [m, F], with its 95 %
    interval over draws of both sets by the infinitesimal jackknife.

    1 is as varied as the real ones, 0 is one image over and over. Undefined for fewer than two
    vectors on a side, or real images that are all the same. A bootstrap would be biased: an image
    that is drawn twice is at distance 0 from itself.
    """
    if min(len(samples), len(real)) < 2:
        return Measured(None)
    means = [mean_distances(features) for features in (samples, real)]
    spread, reference = (float(each.mean()) for each in means)
    if reference == 0:
        return Measured(None)
    # over all pairs, in which each image is twice
    variances = [4 * float(each.var()) / len(each) for each in means]
    ratio = spread / reference
    return Measured.normal(ratio, (variances[0] + ratio**2 * variances[1]) / reference**2, low=0.0)


def diversity_by_class(
    samples: Tensor,  # [n, F]
    sample_labels: Tensor,  # int64 [n], 0 to classes - 1; or bool [n, classes]
    real: Tensor,  # [m, F]
    real_labels: Tensor,  # int64 [m], or bool [m, classes]
    *,
    classes: int,
    images: int = PER_CLASS,
) -> Measured:
    """The diversity ratio of each class, over its first `images` samples and real images, as many
    of each; the smallest is the figure of the whole generator, with its interval.
    """
    results, sizes = [], []
    for of_samples, of_real in zip(
        hot(sample_labels, classes).T, hot(real_labels, classes).T, strict=True
    ):
        pair = [samples[of_samples][:images], real[of_real][:images]]
        size = min(map(len, pair))
        results.append(diversity_ratio(pair[0][:size], pair[1][:size]))
        sizes.append(size if results[-1].value is not None else images)
    by_class = [each.value for each in results]
    defined = [each for each in results if each.value is not None]
    if not defined:
        return Measured(None, by_class=by_class)
    smallest = min(defined, key=lambda each: each.value or 0.0)
    return Measured(smallest.value, smallest.interval, by_class, min(sizes))
