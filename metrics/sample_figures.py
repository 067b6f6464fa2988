"""The figures of samples beside real images under one extractor, with their 95 % intervals, ready for JSON."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metrics.intervals import normal_interval
from metrics.samples.clipped import clipped_coverage, clipped_density
from metrics.samples.density_coverage import coverage, density
from metrics.samples.frechet_variance import frechet_with_variance
from metrics.samples.intra_class import intra_class_frechet
from metrics.samples.neighbours import K_DENSITY, neighbourhoods
from metrics.samples.precision_recall import precision, recall

NEIGHBOURS = ("precision", "recall", "density", "coverage", "clipped_density", "clipped_coverage")
HEADLINE = (  # of the first extractor, repeated at the top of an evaluation's document
    *(name + ending for name in NEIGHBOURS for ending in ("", "_interval")),
    "intra_class_frechet",
    "intra_class_frechet_interval",
    "intra_class_frechet_by_class",
)
FEW_PER_CLASS = 500  # images of a class below which its Frechet distance is mostly bias


def sample_figures(
    samples: Tensor,  # features [n, F]
    real: Tensor,  # features [n, F]
    labels: Tensor,  # int64 [n], of both sides
    names: Sequence[str],  # of the classes; empty for an unconditional generator
    notes: dict[str, str],
) -> dict[str, Any]:
    """The interval of `frechet`, the figures of neighbourhoods and the distances within classes.

    Each of `NEIGHBOURS` and `intra_class_frechet` has its interval under `NAME_interval`; what is undefined is None
    and `notes` says why.
    """
    found = {"frechet_interval": normal_interval(*frechet_with_variance(samples, real), low=0.0)}
    return found | _neighbours(samples, real, notes) | _intra_class(samples, real, labels, names, notes)


def _neighbours(samples: Tensor, real: Tensor, notes: dict[str, str]) -> dict[str, Any]:
    """Precision, recall, density and coverage in both forms."""
    if min(len(samples), len(real)) <= K_DENSITY:
        notes["density"] = f"neighbourhoods need more than {K_DENSITY} images on each side"
        return dict.fromkeys([*NEIGHBOURS, *(f"{name}_interval" for name in NEIGHBOURS)])
    found = neighbourhoods(samples, real)
    figures: dict[str, Any] = {}
    for name, figure, high in (
        ("precision", precision, 1.0),
        ("recall", recall, 1.0),
        ("density", density, torch.inf),
        ("coverage", coverage, 1.0),
    ):
        estimate = figure(found)
        figures |= {name: estimate.value, f"{name}_interval": estimate.interval(high=high)}
    for name, clipped in (("clipped_density", clipped_density), ("clipped_coverage", clipped_coverage)):
        figures[name], figures[f"{name}_interval"] = clipped(found)
    return figures


def _intra_class(
    samples: Tensor, real: Tensor, labels: Tensor, names: Sequence[str], notes: dict[str, str]
) -> dict[str, Any]:
    """The Frechet distances within classes; None for a generator without them."""
    key = "intra_class_frechet"
    if not names:
        return dict.fromkeys([key, f"{key}_interval", f"{key}_by_class"])
    within = intra_class_frechet(samples, labels, real, labels, classes=len(names))
    if within.images < FEW_PER_CLASS:
        few = f"a class has {within.images} images a side, so its distance is mostly the bias of small n"
        notes[key] = f"{few}: compare it with figures of the same n alone"
    by_class = dict(zip(names, within.by_class, strict=True))
    return {key: within.mean, f"{key}_interval": within.interval, f"{key}_by_class": by_class}
