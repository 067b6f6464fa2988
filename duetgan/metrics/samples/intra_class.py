"""Frechet distance within classes."""

import torch
from torch import Tensor

from duetgan.metrics.classification.answers import multi_hot
from duetgan.metrics.intervals import Measured
from duetgan.metrics.samples.frechet import frechet_distance

FEW_PER_CLASS = 500  # below this number of images, the distance of a class is mostly bias


def intra_class_frechet(samples: Tensor, real: Tensor, labels: Tensor, classes: int) -> Measured:
    """Return the mean over classes of the Frechet distance within each class, with its interval.

    Miyato and Koyama 2018, 1802.05637 (intra-FID). A generator that ignores its labels may have a
    small distance over all classes together, but not within classes. A class with fewer than two
    images has no distance, and its value is None.

    Args:
        samples: Features of the samples, [n, F].
        real: Features of real images, [n, F].
        labels: Labels of the samples, which are also those of the real images, int64 [n] or bool
            [n, classes].
        classes: Number of classes.
    """
    members = multi_hot(labels, classes).T
    counts = members.sum(1).tolist()
    results = {
        label: frechet_distance(samples[rows], real[rows])
        for label, rows in enumerate(members)
        if counts[label] > 1
    }
    by_class = [results[label][0] if label in results else None for label in range(classes)]
    if not results:
        return Measured(None, by_class=by_class)
    values, variances = torch.tensor(list(results.values()), dtype=torch.float64).T
    mean, smallest = float(values.mean()), min(counts[label] for label in results)
    interval = Measured.normal(mean, float(variances.sum()) / len(values) ** 2, low=0.0).interval
    note = ""
    if smallest < FEW_PER_CLASS:
        note = (
            f"the smallest class has only {smallest} samples and {smallest} real images; with so "
            "few, compare only with values from as many images"
        )
    return Measured(mean, interval, by_class, smallest, note)
