"""Improved precision and recall (Kynkäänniemi et al. 2019, 1904.06991, eq. 1 and 2)."""

from metrics.samples.neighbours import Estimate, Neighbourhoods, estimate


def precision(found: Neighbourhoods) -> Estimate:
    """Share of samples inside the manifold of real images: in the ball of at least one of them."""
    return estimate(found.manifold_of_real, lambda counts: (counts > 0).double(), len(found.manifold_of_samples))


def recall(found: Neighbourhoods) -> Estimate:
    """Share of real images inside the manifold of samples."""
    return estimate(found.manifold_of_samples, lambda counts: (counts > 0).double(), len(found.manifold_of_real))
