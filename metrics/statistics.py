"""Streaming mean and covariance of features, in float64."""

from collections.abc import Callable

import torch
from torch import Tensor


class Moments:
    """Count, sum and sum of outer products of feature vectors, in float64 on the CPU.

    Sums rather than means: those of several processes add up, so one `reduce` makes them all equal.
    float64 leaves 10 digits of the covariance where the mean is a thousand times the spread, which features are not.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim  # F
        self.count = 0
        self.total = torch.zeros(dim, dtype=torch.float64)  # [F]
        self.outer = torch.zeros(dim, dim, dtype=torch.float64)  # [F, F]

    def update(self, features: Tensor) -> None:
        """Add a batch of features [n, F], of any floating type and on any device; n may be 0.

        Raises:
            ValueError: another shape than [n, F].
        """
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"expected features [n, {self.dim}], got {list(features.shape)}")
        rows = features.detach().cpu().double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.outer += rows.T @ rows

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by their sums over all processes; `sum_over_ranks` takes and returns a float64 vector."""
        packed = torch.cat([torch.tensor([self.count], dtype=torch.float64), self.total, self.outer.flatten()])
        packed = sum_over_ranks(packed).cpu()
        self.count = round(packed[0].item())
        self.total = packed[1 : 1 + self.dim].clone()
        self.outer = packed[1 + self.dim :].view(self.dim, self.dim).clone()

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
