"""Metrics of classifiers and generators, with 95 % intervals."""

from typing import TYPE_CHECKING

from duetgan.lazy import lazily

if TYPE_CHECKING:
    from duetgan.metrics.figures import Figure, Measured
    from duetgan.metrics.samples.frechet import frechet_distance
    from duetgan.metrics.samples.kernel import kernel_distance

__all__ = ["Figure", "Measured", "frechet_distance", "kernel_distance"]
_PLACES = {
    "figures": __all__,
    "samples.frechet": ["frechet_distance"],
    "samples.kernel": ["kernel_distance"],
}
__getattr__ = lazily("duetgan.metrics", _PLACES)
