"""Density and coverage (Naeem et al. 2020, 2002.09797, eq. 6 and 7)."""

from metrics.samples.neighbours import Estimate, Neighbourhoods, estimate


def density(found: Neighbourhoods) -> Estimate:
    """Real images' balls that hold a sample, over k, on average. About 1 for samples like real images; may be above 1
    where samples crowd in dense regions.
    """
    return estimate(found.dense, lambda counts: counts / found.k_density, len(found.covering), rescale=True)


def coverage(found: Neighbourhoods) -> Estimate:
    """Share of real images whose ball holds at least one sample. 1 - (1/2)^k is expected of real images."""
    return estimate(found.covering, lambda counts: (counts > 0).double(), len(found.dense))
