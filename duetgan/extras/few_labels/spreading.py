"""Label spreading over a graph of neighbours.

Zhou et al. 2004, "Learning with local and global consistency".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.metrics.samples.neighbours import neighbours

NEIGHBOURS = 10  # number of each image's neighbours in the graph
COMPONENTS = 100  # largest number of principal components, in which distances are measured
UNKNOWN = -1  # label of an image without label
ALPHA = 0.99  # weight of the neighbours' labels, alpha of Zhou et al.
ITERATIONS = 50


def spreading(
    features: Tensor, labels: Tensor, queries: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Spread labels over a neighbour graph and return the scores of each class.

    Two images are joined if one is among the NEIGHBOURS nearest images of the other. The weight of
    the edge is 1, or 2 if each is among the nearest of the other. Distances are measured in the
    first principal components, scaled to unit variance. The number of components is COMPONENTS, but
    at most a tenth of the number of images.

    With the edge weights W, their row sums D, the one-hot labels Y and S = D^-1/2 W D^-1/2, the
    iteration is F <- ALPHA S F + (1 - ALPHA) Y (section 2). Finally, the scores of each class are
    scaled to a sum of 1 over the images of the graph.

    Args:
        features: Features of the images of the graph, [n, F].
        labels: Label of each of these images, int64 [n], or UNKNOWN.
        queries: Features of images outside the graph, [m, F].
        classes: Number of classes K.

    Returns:
        Scores of the images of the graph, float64 [n, K], and scores of the queries, [m, K]. The
        scores of a query are the mean scores of its nearest images in the graph.
    """
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp_min(1e-6)
    x = (features - mean) / deviation
    values, axes = torch.linalg.eigh(x.T @ x / len(x))
    components = min(COMPONENTS, max(1, len(x) // 10))
    axes = axes[:, -components:] / values[-components:].clamp_min(1e-6).sqrt()
    points = x @ axes
    count = min(NEIGHBOURS, len(x) - 1)
    near = neighbours(points, points, count)[1]
    degree = (count + torch.bincount(near.flatten(), minlength=len(x))).double().sqrt()[:, None]
    one_hot = F.one_hot(labels.clamp_min(0), classes) * (labels != UNKNOWN).double()[:, None]
    scores = one_hot
    for _ in range(ITERATIONS):
        sent = scores / degree
        received = sent[near].sum(1).index_add(0, near.flatten(), sent.repeat_interleave(count, 0))
        scores = ALPHA * received / degree + (1 - ALPHA) * one_hot
    scores = scores / scores.sum(0).clamp_min(1e-12)  # so that all classes count equally
    query_points = (queries - mean) / deviation @ axes
    return scores, scores[neighbours(query_points, points, count)[1]].mean(1)


def spread_to(queries: Tensor, features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Spread labels from labelled images to unlabelled ones in a common graph.

    Returns the class probabilities of the unlabelled images, float64 [m, K].

    Args:
        queries: Features of the unlabelled images, [m, F].
        features: Features of the labelled images, [n, F].
        labels: Labels of the labelled images, int64 [n].
        classes: Number of classes K.
    """
    x = torch.cat([features, queries])
    unknown = labels.new_full((len(queries),), UNKNOWN)
    scores = spreading(x, torch.cat([labels, unknown]), x[:1], classes)[0][len(labels) :]
    return scores / scores.sum(1, keepdim=True).clamp_min(1e-300)
