"""Frechet distance of two sets of features, each taken for a Gaussian (Heusel et al. 2017, 1706.08500, eq. 6)."""

import torch
from torch import Tensor


class Moments:
    """Count, sum and sum of outer products of feature vectors, in float64 on the CPU.

    float64 leaves 10 digits of the covariance where the mean is a thousand times the spread, which features are not.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim  # F
        self.count = 0
        self.total = torch.zeros(dim, dtype=torch.float64)  # [F]
        self.outer = torch.zeros(dim, dim, dtype=torch.float64)  # [F, F]

    def update(self, features: Tensor) -> None:
        """Add a batch of features [n, F], of any floating type and on any device; n may be 0. ValueError for
        another shape.
        """
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"expected features [n, {self.dim}], got {list(features.shape)}")
        rows = features.detach().cpu().double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.outer += rows.T @ rows

    @property
    def mean(self) -> Tensor:
        """Mean [F], float64. ValueError while nothing has been seen."""
        if self.count < 1:
            raise ValueError("the mean of no features is undefined")
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance [F, F] (divided by n - 1), float64. ValueError below two vectors."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 feature vectors, not {self.count}")
        covariance = (self.outer - torch.outer(self.mean, self.total)) / (self.count - 1)
        return (covariance + covariance.T) / 2


def frechet_distance(first: Moments, second: Moments) -> float:
    """Frechet distance between the Gaussians of two feature sets; at least 0, in squared units of the features.

    Raises ValueError for different dimensions, or fewer than two vectors in a set.
    """
    if first.dim != second.dim:
        raise ValueError(f"features of {first.dim} and of {second.dim} dimensions have no distance")
    return gaussian_frechet_distance(first.mean, first.covariance, second.mean, second.covariance)


def gaussian_frechet_distance(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), for means [F] and covariances [F, F] in float64.

    Singular covariances (fewer images than dimensions) are as good as regular ones.
    """
    mean_part = (mean1 - mean2).square().sum()
    trace_part = covariance1.trace() + covariance2.trace() - 2 * _trace_of_root_of_product(covariance1, covariance2)
    return max(0.0, float(mean_part + trace_part))  # rounding can leave a distance of 0 just below it


def _trace_of_root_of_product(covariance1: Tensor, covariance2: Tensor) -> Tensor:
    """tr (C1 C2)^(1/2), from the eigenvalues of the symmetric L' C2 L with C1 = L L', which are those of C1 C2.

    Symmetric eigenvalues are real and stable, where a matrix square root of C1 C2 fails for singular covariances. What
    lies below the rounding error of the largest eigenvalue is noise and dropped: a root would raise 1e-16 to 1e-8.
    """
    values, vectors = torch.linalg.eigh(covariance1)
    kept = values > _rounding_error(values)
    factor = vectors[:, kept] * values[kept].sqrt()  # L [F, rank]
    if factor.shape[1] == 0:  # all vectors of the first set are equal
        return covariance1.new_zeros(())
    product = torch.linalg.eigvalsh(factor.T @ covariance2 @ factor)
    return product[product > _rounding_error(product)].sqrt().sum()


def _rounding_error(eigenvalues: Tensor) -> Tensor:
    """Size of the numerical noise in the eigenvalues of a symmetric matrix."""
    return eigenvalues.abs().max() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
