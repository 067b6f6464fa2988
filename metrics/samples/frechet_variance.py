"""How much chance is in a Frechet distance: the variance that other images would give it, from one decomposition.

A bootstrap would decompose covariances for each resample, minutes for 2048 features, and is biased besides: a set that
holds images twice has a narrower covariance than its source. The infinitesimal jackknife (Jaeckel 1972; Efron 1982, ch.
6) asks instead how the distance answers to the weight of each image, which the decomposition of the distance tells.
"""

import torch
from torch import Tensor

BLOCK = 1024  # rows at a time


def frechet_with_variance(first: Tensor, second: Tensor) -> tuple[float, float]:
    """The Frechet distance of features [n, F] and [m, F], and its variance over draws of both sets, in float64.

    The variance tells chance, not bias: at small n the distance is too large, of all draws of that n alike. Where the
    sets are equal but for chance, it is up to twice too large. Raises ValueError for fewer than two vectors.
    """
    if min(len(first), len(second)) < 2 or first.shape[1] != second.shape[1]:
        raise ValueError(f"no Frechet distance between features {list(first.shape)} and {list(second.shape)}")
    means = [features.detach().cpu().double().mean(0) for features in (first, second)]
    rows = [_scaled(features, mean) for features, mean in zip((first, second), means, strict=True)]
    trace, weights = _trace_of_root(*rows)
    shift = means[0] - means[1]
    value, variance = float(shift.square().sum()) - 2 * trace, 0.0
    for part, weight, direction in zip(rows, weights, (shift, -shift), strict=True):
        count, norms = len(part), part.square().sum(1)
        value += float(norms.sum())
        # d distance / d log weight: of the means, of the trace of the covariance, of 2 tr (C1 C2)^(1/2)
        answers = 2 / count * (count - 1) ** 0.5 * (part @ direction) + norms - weight
        variance += float((answers - answers.mean()).square().sum()) * count / (count - 1)
    return max(0.0, value), variance


def _scaled(features: Tensor, mean: Tensor) -> Tensor:
    """Rows x [n, F] with x' x = the unbiased covariance."""
    return (features.detach().cpu().double() - mean) / (len(features) - 1) ** 0.5


def _trace_of_root(x: Tensor, y: Tensor) -> tuple[float, tuple[Tensor, Tensor]]:
    """tr (C1 C2)^(1/2), the sum of the singular values s of x y' [n, m]; and by how much each row raises twice that,
    sum_k s_k u_ik^2 for the singular vectors u: [n] and [m].

    With more images than features from the eigenvectors of C1 = L L' and L' C2 L, which are F x F.
    """
    if min(len(x), len(y)) <= x.shape[1]:
        left, values, right = torch.linalg.svd(x @ y.T, full_matrices=False)
        kept = values > values.max() * max(x.shape) * torch.finfo(values.dtype).eps
        values = values[kept]
        return float(values.sum()), (left[:, kept].square() @ values, right[kept].T.square() @ values)
    eigenvalues, vectors = _kept(*torch.linalg.eigh(x.T @ x))
    factor = vectors * eigenvalues.sqrt()  # L [F, r]
    squares, turn = _kept(*torch.linalg.eigh(factor.T @ (y.T @ y) @ factor))
    values = squares.sqrt()
    maps = vectors / eigenvalues.sqrt() @ turn, factor @ turn / values  # from rows to the singular vectors
    shares = [
        torch.cat([(part @ to_vectors).square() @ values for part in rows.split(BLOCK)])
        for rows, to_vectors in zip((x, y), maps, strict=True)
    ]
    return float(values.sum()), (shares[0], shares[1])


def _kept(eigenvalues: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Without what is rounding error; of no dimension none."""
    largest = eigenvalues[-1:]  # they ascend
    kept = eigenvalues > largest.abs() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    return eigenvalues[kept], vectors[:, kept]
