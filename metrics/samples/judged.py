"""What an independent classifier says of samples: are they what was asked for, and do they differ by class?"""

import torch
from torch import Tensor

from duetgan.metrics.intervals import Measured


def recognised(
    probabilities: Tensor,  # [n, K], the judge's
    labels: Tensor,  # int64 [n], the class that was asked for
) -> Measured:
    """Share of samples whose class a classifier predicts: over all, and of each class (None: none was asked for)."""
    if not len(labels):
        raise ValueError("the recognised share of no samples is undefined")
    hits, classes = probabilities.argmax(1) == labels, probabilities.shape[1]
    counts = zip(*(torch.bincount(each, minlength=classes).tolist() for each in (labels[hits], labels)), strict=True)
    return Measured.share(hits, [count / total if total else None for count, total in counts])


def class_score(probabilities: Tensor) -> Measured:
    """The Inception score (Salimans et al. 2016, 1606.03498, section 4) with our judge in Inception's place: exp(mean
    over images of KL(p(y|x) || p(y))) of its probabilities [n, K], over all n at once, not in splits.

    Between 1 (all images are predicted alike, or none with confidence) and K (each surely, all classes equally often).
    It is named after what it is: published Inception scores come from another network and cannot be compared. An
    image's influence on the score's logarithm is its own divergence less the mean.
    """
    p = probabilities.detach().cpu().double()
    if not len(p):
        raise ValueError("the class score of no images is undefined")
    divergences = torch.special.xlogy(p, p).sum(1) - torch.special.xlogy(p, p.mean(0)).sum(1)  # [n]
    score = float(divergences.mean().exp())
    return Measured.influenced(score, score * (divergences - divergences.mean()), high=p.shape[1])
