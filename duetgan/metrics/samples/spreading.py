"""Labels that spread over a graph of neighbours (Zhou et al. 2004, "Learning with local and global
consistency").
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.metrics.samples.neighbours import neighbours

NEIGHBOURS, DIRECTIONS = 10, 100  # of the graph, and of principal components in which they are near
UNKNOWN = -1  # a label
KEPT = 0.99  # share of its neighbours' labels in an image's, alpha of Zhou et al.
ROUNDS = 50  # of spreading


def spreading(
    features: Tensor, labels: Tensor, asked: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """How much of each class's labels arrives at the images of the graph, float64 [n, K], and at
    the others `asked` for, [m, K], the mean over their neighbours; features are [n, F] and [m, F],
    `labels` int64 [n], some UNKNOWN.

    Two images are joined where one is among the other's nearest, by principal components of unit
    variance, at most a tenth as many as images. F <- KEPT S F + (1 - KEPT) Y with S = D^-1/2 W
    D^-1/2 (section 2).
    """
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp_min(1e-6)
    x, others = (features - mean) / deviation, (asked - mean) / deviation
    values, axes = torch.linalg.eigh(x.T @ x / len(x))
    kept = min(DIRECTIONS, max(1, len(x) // 10))
    axes = axes[:, -kept:] / values[-kept:].clamp_min(1e-6).sqrt()
    points, count = x @ axes, min(NEIGHBOURS, len(x) - 1)
    near = neighbours(points, points, count)[1]
    degree = (count + torch.bincount(near.flatten(), minlength=len(x))).double().sqrt()[:, None]
    found = given = F.one_hot(labels.clamp_min(0), classes) * (labels != UNKNOWN).double()[:, None]
    for _ in range(ROUNDS):
        sent = found / degree
        came = sent[near].sum(1).index_add(0, near.flatten(), sent.repeat_interleave(count, 0))
        found = KEPT * came / degree + (1 - KEPT) * given
    found = found / found.sum(0).clamp_min(1e-12)  # every class has as much to give
    return found, found[neighbours(others @ axes, points, count)[1]].mean(1)


def spread_to(others: Tensor, features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """What labels int64 [n] of features [n, F], spread over neighbours, say of other images' [m,
    F]: float64 [m, K], a class's share of what arrives.
    """
    x, unknown = torch.cat([features, others]), labels.new_full((len(others),), UNKNOWN)
    found = spreading(x, torch.cat([labels, unknown]), x[:1], classes)[0][len(labels) :]
    return found / found.sum(1, keepdim=True).clamp_min(1e-300)
