"""The Inception score (Salimans et al. 2016, 1606.03498, section 4) with our judge in the Inception network's place.

It is named after what it is: published Inception scores come from another network and cannot be compared.
"""

import torch
from torch import Tensor

from metrics.bootstrap import bootstrap_interval


def class_score(probabilities: Tensor, *, seed: int) -> tuple[float, list[float] | None]:
    """exp(mean over images of KL(p(y|x) || p(y))) of a judge's probabilities [n, K], over all n at once, not in splits.

    Between 1 (all images are named alike, or none with confidence) and K (each surely, all classes equally often).
    With a 95 % percentile bootstrap interval over the images, drawn by the key (seed, "eval", "class score").
    """
    p = probabilities.detach().cpu().double()
    if len(p) == 0:
        raise ValueError("the class score of no images is undefined")
    own = torch.special.xlogy(p, p).sum(1)  # minus the entropy of each image's answer, [n]

    def score(weights: Tensor) -> Tensor:
        marginal = weights @ p / len(p)  # [b, K]
        return (weights @ own / len(p) - torch.special.xlogy(marginal, marginal).sum(1)).exp()

    value = float(score(torch.ones(1, len(p), dtype=torch.float64)))
    return value, bootstrap_interval(score, len(p), seed, "eval", "class score")
