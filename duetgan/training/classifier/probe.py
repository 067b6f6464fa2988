"""A linear probe: logistic regression on a network's features of images and mirror images.

Fine-tuning can start with the probe as its head (2202.10054). Its accuracy is the baseline that
fine-tuning must beat.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import find, look_alikes
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.intervals import wilson
from duetgan.training.base.monitors import Fields
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import numpy_generator
from duetgan.utils.text import duration

FOLDS = 5  # of the cross-validation
# Strengths of the penalty, strongest first: each fit starts from the previous solution.
STRENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01)
# Limit of images x features x classes in the cross-validation, for about half a minute.
WORK = 2e8
ITERATIONS = 100  # largest number of iterations of L-BFGS
COMPARED = 20_000  # most images that are searched for look-alikes, which takes seconds
FeatureScale = tuple[Tensor, Tensor]  # mean and deviation of each feature, [F]


class Probe(NamedTuple):
    """A fitted logistic regression, whose logits are features @ weight.T + bias."""

    weight: Tensor  # float32 [K, F]
    bias: Tensor  # float32 [K]
    # cross-validated: on images to which neither the regression nor its strength was fitted
    accuracy: float
    interval: list[float]  # 95 % interval of the accuracy
    images: int  # number of images from which the accuracy is computed
    # The loss is mean cross-entropy + strength / 2 * |weights of standardised features|^2.
    strength: float


class ProbeSummary(Fields):
    """The summary of the probe with which a run started. Checkpoints of the run contain it."""

    STATE = ("accuracy", "interval", "images", "strength", "seconds")
    optional = True  # A run that started without a probe has no such state.

    def __init__(self) -> None:
        self.accuracy = 0.0
        self.interval = [0.0, 1.0]
        self.images = 0
        self.strength = 0.0
        self.seconds = 0.0  # duration of computing the features and the regression

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"a logistic regression of strength {self.strength:g} on frozen features: accuracy "
            f"{self.accuracy:.3f} ({low:.3f} to {high:.3f}) by cross-validation on "
            f"{self.images:,} images, {duration(self.seconds)}"
        )

    @torch.no_grad()
    def install(self, probe: Probe, heads: Sequence[nn.Linear]) -> None:
        """Copy the weights of `probe` into the heads, and record its accuracy and settings."""
        for name in ("accuracy", "interval", "images", "strength"):
            setattr(self, name, getattr(probe, name))
        for head in heads:
            head.weight.copy_(probe.weight)
            head.bias.copy_(probe.bias)


def look_alike_groups(dataset: Dataset) -> np.ndarray:
    """Return the group of each image, int64 [n]; images that look alike are in one group.

    The number of a group is that of its first image. A data set is not searched for look-alikes if
    it has several files, has more than COMPARED images, or is not packed. Each of its images is
    then a group.
    """
    firsts = np.arange(len(dataset))
    reader = dataset.shards[0]
    if len(dataset) == len(reader) <= COMPARED and isinstance(reader, LMDBReader):
        for group in look_alikes(len(reader), find(reader, similar=True), ()):
            firsts[group] = group[0]
    return firsts


def fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    seed: int = 0,
    groups: np.ndarray | None = None,
    scale: FeatureScale | None = None,
) -> Probe:
    """Fit a logistic regression, and choose the strength of its penalty by cross-validation.

    The chosen strength is that with the best accuracy on held-out images. Only the first view of
    a held-out image counts. For the reported accuracy, each fold uses the strength that is best on
    the other folds.

    Args:
        features: [n, V, F] of V views of each image, on the device that computes.
        labels: int64 [n] below `classes`.
        groups: int64 [n]. Images of a group are in one fold; None if each image is a group.
        scale: The mean and deviation that standardise the features; None for those of `features`.
    """
    n, _, width = features.shape
    if groups is None:
        groups = np.arange(n)
    folds = torch.from_numpy(_folds(labels.cpu().numpy(), seed, groups))
    limit = max(FOLDS * classes, int(WORK / width / classes))
    subset = np.sort(numpy_generator(seed, "probe", "images").permutation(n)[:limit])
    rows = torch.from_numpy(subset)
    correct = torch.zeros(len(STRENGTHS), FOLDS, dtype=torch.int64)
    for fold in Bar(range(FOLDS), "cross-validating the head", unit="fold", delay=1):
        train, held_out = rows[folds[rows] != fold], rows[folds[rows] == fold]
        path = _path(features[train], labels[train], classes, STRENGTHS, scale)
        for row, (weight, bias) in enumerate(path):
            predicted = F.linear(features[held_out, 0], weight, bias).argmax(1)
            correct[row, fold] = (predicted == labels[held_out]).sum()
    totals = correct.sum(1)
    best = int(totals.argmax())
    *_, (weight, bias) = _path(features, labels, classes, STRENGTHS[: best + 1], scale)
    hits = sum(int(correct[(totals - correct[:, fold]).argmax(), fold]) for fold in range(FOLDS))
    interval = wilson(hits, len(rows)) or [0.0, 1.0]
    return Probe(weight, bias, hits / len(rows), interval, len(rows), STRENGTHS[best])


def _folds(labels: np.ndarray, seed: int, groups: np.ndarray) -> np.ndarray:
    """Return the fold of each image, int64 [n]. All images of a group have the same fold.

    The groups of each class are spread evenly over the folds.
    """
    _, firsts, group = np.unique(groups, return_index=True, return_inverse=True)
    order = numpy_generator(seed, "probe", "folds").permutation(len(firsts))
    order = order[np.argsort(labels[firsts][order], kind="stable")]
    folds = np.empty(len(firsts), np.int64)
    folds[order] = np.arange(len(firsts)) % FOLDS
    return folds[group]


def scale_of(features: Tensor) -> FeatureScale:
    """Return the mean and standard deviation of each feature, [F], over features [n, F]."""
    return features.mean(0), features.std(0, correction=0).clamp_min(1e-6)


def _path(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strengths: Sequence[float],
    scale: FeatureScale | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fit a regression for each strength of the penalty, and yield its weight [K, F] and bias [K].

    The fit standardises the features by `scale`, but weight and bias apply to features that are not
    standardised. Each fit starts from the previous solution.
    """
    x, y = features.flatten(0, 1), labels.repeat_interleave(features.shape[1])
    mean, deviation = scale or scale_of(x)
    x, basis = (x - mean) / deviation, None
    if len(x) < x.shape[1]:  # Because of the penalty, the solution is in the span of the features.
        basis = torch.linalg.qr(x.T)[0]
        x = x @ basis
    weight = x.new_zeros(classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    for strength in strengths:
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe"
        )

        def loss(optimizer: torch.optim.LBFGS = optimizer, strength: float = strength) -> Tensor:
            optimizer.zero_grad()
            penalty = strength / 2 * weight.square().sum()
            value = F.cross_entropy(F.linear(x, weight, bias), y) + penalty
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        standardised = weight.detach() if basis is None else weight.detach() @ basis.T
        scaled = standardised / deviation
        yield scaled, bias.detach() - scaled @ mean
