"""Frechet distance between Gaussians fitted to two feature sets.

Heusel et al. 2017, 1706.08500, equation 6.

The variance is that of the infinitesimal jackknife (Jaeckel 1972; Efron 1982, ch. 6). The jackknife
needs the derivative of the distance by each image's weight. The decomposition that gives the
distance also gives this derivative. A bootstrap would take minutes, because it would decompose
covariances of 2048 features for each resample. It would also be biased: a resample holds images
twice, so its covariance is narrower than that of its source.
"""

import torch
from torch import Tensor

BLOCK = 1024  # images processed at a time


def frechet_distance(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the Frechet distance of features [n, F] and [m, F], and its variance, in float64.

    The distance is |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), at least 0, in squared units of the
    features. Covariances may be singular. The variance is that over random draws of both sets. It
    does not include the bias: at small n, the distance is too large in every draw. If both sets
    come from the same distribution, the variance is up to twice too large. Each set must have at
    least two vectors.
    """
    x, first_mean = _scaled(first)
    y, second_mean = _scaled(second)
    trace, influences = _trace_of_root(x, y)
    shift = first_mean - second_mean
    value = float(shift.square().sum()) - 2 * trace
    variance = 0.0
    for rows, of_trace, direction in zip((x, y), influences, (shift, -shift), strict=True):
        count = len(rows)
        norms = rows.square().sum(1)
        value += float(norms.sum())
        # derivative by the logarithm of each image's weight: of the means, of tr C, and of
        # 2 tr (C1 C2)^(1/2)
        influence = 2 / count * (count - 1) ** 0.5 * (rows @ direction) + norms - of_trace
        variance += float((influence - influence.mean()).square().sum()) * count / (count - 1)
    return max(0.0, value), variance  # rounding can leave a distance of 0 just below it


def _scaled(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return features [n, F], centred and scaled, and their former mean [F], both in float64.

    The product x' x of the returned features x is the covariance of the features.
    """
    features = features.cpu().double()
    mean = features.mean(0)
    return (features - mean) / (len(features) - 1) ** 0.5, mean


def _trace_of_root(x: Tensor, y: Tensor) -> tuple[float, tuple[Tensor, Tensor]]:
    """Return t = tr (C1 C2)^(1/2), and the influence of each row of x [n, F] and y [m, F] on 2 t.

    C1 is x' x, and C2 is y' y. t is the sum of the singular values s of x y' [n, m]. The influence
    of row i is sum_k s_k u_ik^2, where u are the left singular vectors for x, and the right ones
    for y.

    With more images than features, the eigenvectors of C1 = L L' and of L' C2 L, which are F x F,
    give the same result. Eigenvalues of symmetric matrices are stable, whereas a matrix square root
    of C1 C2 fails for singular covariances.
    """
    if min(len(x), len(y)) <= x.shape[1]:
        left, values, right = torch.linalg.svd(x @ y.T, full_matrices=False)
        rank = values > values.max() * max(x.shape) * torch.finfo(values.dtype).eps
        values = values[rank]
        influences = left[:, rank].square() @ values, right[rank].T.square() @ values
        return float(values.sum()), influences
    eigenvalues, vectors = _above_rounding(*torch.linalg.eigh(x.T @ x))
    factor = vectors * eigenvalues.sqrt()  # L [F, r]
    squares, turn = _above_rounding(*torch.linalg.eigh(factor.T @ (y.T @ y) @ factor))
    values = squares.sqrt()

    def influence(rows: Tensor, projection: Tensor) -> Tensor:  # projects rows on singular vectors
        return torch.cat([(part @ projection).square() @ values for part in rows.split(BLOCK)])

    of_x = influence(x, vectors / eigenvalues.sqrt() @ turn)
    of_y = influence(y, factor @ turn / values)
    return float(values.sum()), (of_x, of_y)


def _above_rounding(eigenvalues: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Drop eigenvalues that are only rounding errors, and their vectors.

    The root of such an error, about 1e-16, would be 1e-8.
    """
    largest = eigenvalues[-1:]  # eigenvalues ascend; empty for no dimensions
    rank = eigenvalues > largest.abs() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    return eigenvalues[rank], vectors[:, rank]
