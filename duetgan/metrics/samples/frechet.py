"""Frechet distance of two sets of features, each taken for a Gaussian (Heusel et al. 2017,
1706.08500, eq. 6).

A bootstrap of it would decompose covariances for each resample, minutes for 2048 features, and is
biased besides: a set that holds images twice has a narrower covariance than its source. The
infinitesimal jackknife (Jaeckel 1972; Efron 1982, ch. 6) asks instead how the distance answers to
the weight of each image, which its own decomposition tells.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from duetgan.metrics.classification.answers import hot
from duetgan.metrics.intervals import Measured

BLOCK = 1024  # rows at a time
FEW_PER_CLASS = 500  # images of a class below which its distance is mostly bias


def frechet_distance(first: Tensor, second: Tensor) -> tuple[float, float]:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of features [n, F] and [m, F], and its variance
    over draws of both sets, in float64. At least 0, in squared units of the features; covariances
    may be singular.

    The variance tells chance, not bias: at small n the distance is too large, of all draws of that
    n alike. Where the sets are equal but for chance, it is up to twice too large. Raises ValueError
    for fewer than two vectors.
    """
    if min(len(first), len(second)) < 2 or first.shape[1] != second.shape[1]:
        raise ValueError(
            f"no Frechet distance between features {list(first.shape)} and {list(second.shape)}"
        )
    sets = [features.detach().cpu().double() for features in (first, second)]
    means = [rows.mean(0) for rows in sets]
    # x' x = C
    rows = [(each - mean) / (len(each) - 1) ** 0.5 for each, mean in zip(sets, means, strict=True)]
    trace, weights = _trace_of_root(*rows)
    shift = means[0] - means[1]
    value, variance = float(shift.square().sum()) - 2 * trace, 0.0
    for part, weight, direction in zip(rows, weights, (shift, -shift), strict=True):
        count, norms = len(part), part.square().sum(1)
        value += float(norms.sum())
        # d distance / d log weight: of the means, of the trace of the covariance, of 2 tr (C1
        # C2)^(1/2)
        answers = 2 / count * (count - 1) ** 0.5 * (part @ direction) + norms - weight
        variance += float((answers - answers.mean()).square().sum()) * count / (count - 1)
    return max(0.0, value), variance  # rounding can leave a distance of 0 just below it


def intra_class_frechet(samples: Tensor, real: Tensor, labels: Tensor, classes: int) -> Measured:
    """Frechet distance within each class (Miyato and Koyama 2018, 1802.05637: intra-FID), and their
    mean.

    A generator that ignores its labels may have a small distance over all classes together, but not
    within them. Args: features [n, F] and `labels`, int64 [n] or bool [n, classes], of both. A
    class of fewer than two images has none.
    """
    rows = hot(labels, classes).T
    counts = rows.sum(1).tolist()
    results = {
        i: frechet_distance(samples[row], real[row]) for i, row in enumerate(rows) if counts[i] > 1
    }
    if not results:
        return Measured(None, by_class=[None] * classes)
    values, variances = torch.tensor(list(results.values()), dtype=torch.float64).T
    mean, least = float(values.mean()), min(counts[label] for label in results)
    measured = Measured.normal(mean, float(variances.sum()) / len(values) ** 2, low=0.0)
    few = (
        f"a class has {least} images a side, so its distance is mostly the bias of small n: compare it with figures of "
        "the same n alone"
    )
    by_class: Sequence[float | None] = [
        results[label][0] if label in results else None for label in range(classes)
    ]
    return Measured(mean, measured.interval, by_class, least, few if least < FEW_PER_CLASS else "")


def _trace_of_root(x: Tensor, y: Tensor) -> tuple[float, tuple[Tensor, Tensor]]:
    """tr (C1 C2)^(1/2), the sum of the singular values s of x y' [n, m]; and by how much each row
    raises twice that, sum_k s_k u_ik^2 for the singular vectors u: [n] and [m].

    With more images than features from the eigenvectors of C1 = L L' and L' C2 L, which are F x F:
    symmetric eigenvalues are real and stable, where a matrix square root of C1 C2 fails for
    singular covariances.
    """
    if min(len(x), len(y)) <= x.shape[1]:
        left, values, right = torch.linalg.svd(x @ y.T, full_matrices=False)
        kept = values > values.max() * max(x.shape) * torch.finfo(values.dtype).eps
        values = values[kept]
        return float(values.sum()), (
            left[:, kept].square() @ values,
            right[kept].T.square() @ values,
        )
    eigenvalues, vectors = _above_rounding(*torch.linalg.eigh(x.T @ x))
    factor = vectors * eigenvalues.sqrt()  # L [F, r]
    squares, turn = _above_rounding(*torch.linalg.eigh(factor.T @ (y.T @ y) @ factor))
    values = squares.sqrt()
    # from rows to the singular vectors
    maps = vectors / eigenvalues.sqrt() @ turn, factor @ turn / values
    shares = [
        torch.cat([(part @ to_vectors).square() @ values for part in rows.split(BLOCK)])
        for rows, to_vectors in zip((x, y), maps, strict=True)
    ]
    return float(values.sum()), (shares[0], shares[1])


def _above_rounding(eigenvalues: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Without what is rounding error, which a root would raise from 1e-16 to 1e-8; of no dimension
    none.
    """
    largest = eigenvalues[-1:]  # they ascend
    kept = eigenvalues > largest.abs() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    return eigenvalues[kept], vectors[:, kept]
