"""A linear probe: multinomial logistic regression on a network's features of images and of their
mirror images. It is the head that a fine-tuning begins with (2202.10054), and what it must be
better than.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import find
from duetgan.data.packing.split import look_alikes
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.intervals import wilson
from duetgan.training.base.monitors import Fields
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import numpy_generator
from duetgan.utils.text import duration

FOLDS = 5
# of the penalty, strongest first: each begins where the one before ended
STRENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01)
# images by features by classes that are cross-validated, which bounds the time to about half a
# minute
WORK = 2e8
ITERATIONS = 100  # of L-BFGS, at most
COMPARED = 20_000  # images that are searched for look-alikes, at most: seconds
LOOK, A_CLASS = 200, 5  # images of the first look, at least so many a class on average


class Probe(NamedTuple):
    """A fitted regression: logits are features @ weight.T + bias."""

    weight: Tensor  # float32 [K, F]
    bias: Tensor  # float32 [K]
    accuracy: float  # of images that the regression was not fitted to, nor its strength chosen by
    interval: list[float]  # of 95 %
    images: int  # that it is measured on
    # of the penalty: mean cross-entropy + strength / 2 * |weights of standardised features|^2
    strength: float


class Probed(Fields):
    """What a run that began at a probe keeps of it."""

    STATE = ("accuracy", "interval", "images", "strength", "seconds")
    optional = True  # a run that was begun without has no such state

    def __init__(self) -> None:
        self.accuracy, self.interval, self.images, self.strength = 0.0, [0.0, 1.0], 0, 0.0
        self.seconds = 0.0  # that features and regression took

    def __str__(self) -> str:
        (low, high), part = (
            self.interval,
            f"a logistic regression of strength {self.strength:g} on frozen features",
        )
        unseen = f"accuracy {self.accuracy:.3f} ({low:.3f} to {high:.3f}) by cross-validation on {self.images:,} images"
        return f"{part}: {unseen}, {duration(self.seconds)}"

    @torch.no_grad()
    def take(self, probe: Probe, heads: Sequence[nn.Linear]) -> None:
        """Make the probe of the heads."""
        self.accuracy, self.interval, self.images, self.strength = probe[2:]
        for head in heads:
            head.weight.copy_(probe.weight)
            head.bias.copy_(probe.bias)


def looked_at(count: int, classes: int, seed: int) -> np.ndarray | None:
    """Some records whose features are soon there, for a first answer; None where that would hardly
    be sooner.
    """
    number = max(LOOK, A_CLASS * classes)
    return (
        np.sort(numpy_generator(seed, "probe", "look").permutation(count)[:number])
        if 3 * number < count
        else None
    )


def alike(dataset: Dataset) -> np.ndarray:
    """The first image that looks like each image, its own number where none does: int64 [n]. Not
    searched: sets of several files, or of more than COMPARED images.
    """
    firsts = np.arange(len(dataset))
    reader = dataset.shards[0]
    if len(dataset) == len(reader) <= COMPARED and isinstance(reader, LMDBReader):
        for group in look_alikes(len(reader), find(reader, similar=True)):
            firsts[group] = group[0]
    return firsts


def fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    seed: int = 0,
    groups: np.ndarray | None = None,
    like: Tensor | None = None,
) -> Probe:
    """The regression on features [n, V, F] of V views of each image and labels int64 [n] below
    `classes`, where they lie. Its strength has the best accuracy of one view over FOLDS folds, and
    an image's answer there is that of the strength that is best on the other folds. Images of a
    group, int64 [n], are in one fold (None: each is alone). Features are standardised as `like` [m,
    F] are, such as those of images without labels (None: as they are).
    """
    n, _, width = features.shape
    scale = None if like is None else _scale(like)
    folds = torch.from_numpy(
        _folds(labels.cpu().numpy(), seed, np.arange(n) if groups is None else groups)
    )
    most = max(FOLDS * classes, int(WORK / width / classes))
    some = torch.from_numpy(np.sort(numpy_generator(seed, "probe", "images").permutation(n)[:most]))
    right = torch.zeros(len(STRENGTHS), FOLDS, dtype=torch.int64)
    for fold in Bar(range(FOLDS), "cross-validating the head", unit="fold", delay=1):
        train, held = (
            some[folds[some] == fold] if out else some[folds[some] != fold] for out in (False, True)
        )
        for row, (weight, bias) in enumerate(
            _path(features[train], labels[train], classes, STRENGTHS, scale)
        ):
            right[row, fold] = (
                F.linear(features[held, 0], weight, bias).argmax(1) == labels[held]
            ).sum()
    best = int(right.sum(1).argmax())
    unseen = sum(
        int(right[(right.sum(1) - right[:, fold]).argmax(), fold]) for fold in range(FOLDS)
    )
    *_, (weight, bias) = _path(features, labels, classes, STRENGTHS[: best + 1], scale)
    interval = wilson(unseen, len(some)) or [0.0, 1.0]
    return Probe(weight, bias, unseen / len(some), interval, len(some), STRENGTHS[best])


def _folds(labels: np.ndarray, seed: int, groups: np.ndarray) -> np.ndarray:
    """The fold of each image, int64 [n]: of each class as many groups in every fold as in another,
    or one more.
    """
    _, firsts, group = np.unique(groups, return_index=True, return_inverse=True)
    order = numpy_generator(seed, "probe", "folds").permutation(len(firsts))
    order = order[np.argsort(labels[firsts][order], kind="stable")]
    folds = np.empty(len(firsts), np.int64)
    folds[order] = np.arange(len(firsts)) % FOLDS
    return folds[group]


def _scale(features: Tensor) -> tuple[Tensor, Tensor]:
    return features.mean(0), features.std(0, correction=0).clamp_min(1e-6)


def _path(
    features: Tensor, labels: Tensor, classes: int, strengths: Sequence[float], scale: Any
) -> Any:
    """Weight [K, F] and bias [K] for features as they come, for each strength in turn."""
    x, y = features.flatten(0, 1), labels.repeat_interleave(features.shape[1])
    mean, deviation = scale or _scale(x)
    x, basis = (x - mean) / deviation, None
    if len(x) < x.shape[1]:  # with its penalty the solution lies in the span of the images
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
            value = (
                F.cross_entropy(F.linear(x, weight, bias), y) + strength / 2 * weight.square().sum()
            )
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        scaled = (weight.detach() if basis is None else weight.detach() @ basis.T) / deviation
        yield scaled, bias.detach() - scaled @ mean
