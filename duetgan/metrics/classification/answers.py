"""A classifier's answers to labelled images, and its figures: pure functions of the logits in the
images' order.

So they depend neither on batches nor on processes. Calibration is Guo et al.'s, 2017 (1706.04599).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.intervals import Measured, balanced_interval, root
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator


class Ranking:
    """Images ordered by a score: how well one class's probability ranks its images before all
    others, by AUROC and average precision. Equal scores form one level. Needs a positive and a
    negative image.

    Each figure has each image's influence on it, the derivative by its weight; for AUROC the mean
    of its squares is DeLong's variance (1988).
    """

    def __init__(self, scores: np.ndarray, positive: np.ndarray) -> None:
        """Args: `scores` float [n], higher for the positive ones; `positive` bool [n]."""
        self.positive = positive
        levels, self.level = np.unique(scores, return_inverse=True)  # ascending
        self._positives = np.bincount(self.level[positive], minlength=len(levels))
        self._negatives = np.bincount(self.level[~positive], minlength=len(levels))
        self.counts = int(self._positives.sum()), int(self._negatives.sum())
        if 0 in self.counts:
            raise ValueError("a ranking needs a positive and a negative image")

    @cached_property
    def _wins(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice the number of negatives below, and of positives above, each level; a tie is half a
        win.
        """
        below = 2 * np.cumsum(self._negatives) - self._negatives
        above = 2 * self.counts[0] - 2 * np.cumsum(self._positives) + self._positives
        return below, above

    def auroc(self) -> float:
        """Share of the pairs of a positive and a negative image that are in the right order."""
        positives, negatives = self.counts
        return int((self._positives * self._wins[0]).sum()) / (2 * positives * negatives)

    def auroc_influence(self) -> np.ndarray:
        """Influence of each image on `auroc`, [n], of mean 0."""
        (positives, negatives), (below, above) = self.counts, self._wins
        wins = (
            np.where(self.positive, below[self.level] / negatives, above[self.level] / positives)
            / 2
        )
        return len(wins) * (wins - self.auroc()) / np.where(self.positive, positives, negatives)

    @cached_property
    def _named(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the images at each level and above: their number, and the share of positives
        (precision).
        """
        named = np.cumsum((self._positives + self._negatives)[::-1])[::-1]
        return named, np.cumsum(self._positives[::-1])[::-1] / named

    def average_precision(self) -> float:
        """Mean precision over the positive images' levels: the sum of (R_i - R_(i-1)) P_i, without
        interpolation.
        """
        return float((self._positives * self._named[1]).sum()) / self.counts[0]

    def average_precision_influence(self) -> np.ndarray:
        """Influence of each image on `average_precision`, [n], of mean 0: on its own term, and on
        the precision at every level from the lowest up to its own.
        """
        named, precision = self._named
        own = precision - self.average_precision() + np.cumsum(self._positives / named)
        others = np.cumsum(self._positives * precision / named)
        return (
            len(self.level)
            / self.counts[0]
            * (self.positive * own[self.level] - others[self.level])
        )


BINS = 15  # of the calibration error
COLDEST, HOTTEST = 0.01, 100.0  # a temperature beyond is not looked for


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Bins 0 to M - 1 of confidences float64 [n]: bin m - 1 holds those in ((m - 1)/M, m/M], M
    bins.
    """
    return (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)


def calibration_error(confidence: Tensor, hits: Tensor) -> tuple[float, Tensor]:
    """The expected calibration error and each image's influence on it, [n].

    Args: `confidence` float64 [n], the largest probabilities; `hits` bool [n], whether the class is
    the true one.
    """
    gaps = confidence - hits.double()
    index = bin_of(confidence, BINS)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, index, gaps)
    error = float(sums.abs().sum()) / len(gaps)
    return error, sums.sign()[index] * gaps - error


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """-log of the true class's probability of each image, float64 [n], from logits [n, K]."""
    logits = logits.double()
    return logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of two halves of the images, ascending, equal in every class to within one image.

    Drawn by the key (seed, "eval", "temperature").
    """
    order = numpy_generator(seed, "eval", "temperature").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.sort(order[::2]), np.sort(order[1::2])


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that minimises the likelihood loss of softmax(logits / T), in float64.

    The loss is convex in 1/T: its slope, the mean of E[z] - z_y, has one sign below the best T and
    another above. Where every image is right, T would be 0: it stops at COLDEST; HOTTEST is the
    other end.
    """
    logits = logits.double()

    def expected(logarithm: float) -> Tensor:  # logit: the sharper the softmax, the larger
        return ((logits / math.exp(logarithm)).softmax(1) * logits).sum(1).mean()

    own = logits.gather(1, labels[:, None]).mean()
    return math.exp(root(expected, own, math.log(COLDEST), math.log(HOTTEST)))


def judged_temperature(logits: Tensor, labels: Tensor, *, seed: int) -> dict[str, Any] | None:
    """A temperature fitted on one half of the images, and what it changes on the other; None of
    less than 4 images.

    Returns `value`, `fitted_on`, `judged_on` (images), and of the judged half without (`_before`)
    and with it (`_after`): `nll`, `ece`, `ece_interval`.
    """
    if len(labels) < 4:
        return None
    fitted, judged = (torch.from_numpy(half) for half in halves(labels.numpy(), seed))
    temperature = fit_temperature(logits[fitted], labels[fitted])
    result: dict[str, Any] = {
        "value": temperature,
        "fitted_on": len(fitted),
        "judged_on": len(judged),
    }
    for name, divisor in (("before", 1.0), ("after", temperature)):
        scaled, wanted = logits[judged].double() / divisor, labels[judged]
        confidence, predicted = scaled.softmax(1).max(1)
        error = Measured.influenced(*calibration_error(confidence, predicted == wanted))
        result[f"nll_{name}"] = float(negative_log_likelihood(scaled, wanted).mean())
        result[f"ece_{name}"], result[f"ece_interval_{name}"] = error.value, error.interval
    return result


TOP = 5  # labels among so many largest logits are counted
PAIRS = 10  # most confused pairs of classes that are listed


def hot(labels: Tensor, classes: int) -> Tensor:
    """Of which classes images are, bool [n, classes], from labels int64 [n], or of several an image
    [n, classes].
    """
    return labels > 0 if labels.ndim == 2 else labels[:, None] == torch.arange(classes)


@dataclass(frozen=True)
class Answers:
    """What figures are made of. Raises UserError for no image, or a label beyond the classes."""

    logits: Tensor  # float32 [n, K]
    labels: Tensor  # int64 [n]
    names: Sequence[str]  # [K], of the classes
    # int64 [n] in the file; None: 0 to n - 1
    records: np.ndarray | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        count, classes = len(self.labels), len(self.names)
        if self.logits.shape != (count, classes) or self.labels.shape[1:] not in ((), (classes,)):
            raise ValueError(
                f"expected logits [{count}, {classes}], got {list(self.logits.shape)} and labels "
                f"{list(self.labels.shape)}"
            )
        if not count:
            raise UserError(
                "there is no image to evaluate the classifier on; give some with --data"
            )
        if (
            self.labels.ndim == 1
            and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < classes
        ):
            raise UserError(
                f"a label of the data lies beyond the classifier's {classes} classes; give its data"
            )

    def places(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The records of some of the images."""
        return np.asarray(rows) if self.records is None else self.records[rows]

    @cached_property
    def probabilities(self) -> Tensor:
        """float64 [n, K]."""
        return self.logits.double().softmax(1)

    @cached_property
    def predicted(self) -> Tensor:
        """int64 [n]; of equally likely classes the first."""
        return self.logits.argmax(1)

    @cached_property
    def confidence(self) -> Tensor:
        return self.probabilities.amax(1)

    @cached_property
    def hits(self) -> Tensor:
        """bool [n]: whether exactly its classes are predicted."""
        return (self.named == self.shown).all(1)

    @cached_property
    def shown(self) -> Tensor:
        """bool [n, K]: of which classes each image is."""
        return hot(self.labels, len(self.names))

    @cached_property
    def named(self) -> Tensor:
        """bool [n, K]: of which it is predicted to be."""
        return hot(self.predicted, len(self.names))

    def words(self, classes: Tensor) -> str:
        """What some of the classes, bool [K], are called."""
        return (
            "; ".join(
                name for name, there in zip(self.names, classes.tolist(), strict=True) if there
            )
            or "no label"
        )

    @cached_property
    def confusion(self) -> Tensor:
        """Counts int64 [K, K], [true, predicted]."""
        classes = len(self.names)
        return torch.bincount(self.labels * classes + self.predicted, minlength=classes**2).view(
            classes, classes
        )

    @cached_property
    def rankings(self) -> list[Ranking | None]:
        """Of the images by each class's probability; None for a class without images, or that all
        images have.
        """
        pairs = zip(self.probabilities.T.numpy(), self.shown.T.numpy(), strict=True)
        return [
            Ranking(scores, each) if each.any() and not each.all() else None
            for scores, each in pairs
        ]


# --- the figures


def accuracy(answers: Answers) -> Measured:
    """Share of images whose class is the likeliest."""
    return Measured.share(answers.hits)


def top5_accuracy(answers: Answers) -> Measured:
    """Share of images whose class is among the five likeliest; of equal ones the first count. None
    for five or less.
    """
    logits, labels = answers.logits, answers.labels
    if len(answers.names) <= TOP:
        return Measured(None)
    own = logits.gather(1, labels[:, None])
    before = torch.arange(logits.shape[1])[None] < labels[:, None]
    return Measured.share(((logits > own) | ((logits == own) & before)).sum(1) < TOP)


def balanced_accuracy(answers: Answers) -> Measured:
    """Mean recall of the classes that have images."""
    counts, hits = answers.confusion.sum(1), answers.confusion.diagonal()
    there = counts > 0
    recalls = hits.double() / counts.clamp(min=1)
    interval = balanced_interval(hits[there].tolist(), counts[there].tolist())
    weights = len(answers.labels) / (counts[answers.labels].double() * there.sum())
    influence = weights * (answers.hits.double() - recalls[answers.labels])
    return Measured(float(recalls[there].mean()), interval, influence=influence.numpy())


def ece(answers: Answers) -> Measured:
    """Mean distance of confidence and accuracy over bins of confidence, weighted by their share
    (Guo et al. 2017).
    """
    return Measured.influenced(*calibration_error(answers.confidence, answers.hits))


def nll(answers: Answers) -> Measured:
    """Mean of -log of the true class's probability."""
    losses = negative_log_likelihood(answers.logits, answers.labels)
    return Measured.influenced(float(losses.mean()), losses - losses.mean(), high=math.inf)


def _ranked(answers: Answers, name: str) -> Measured:
    """The mean of a figure of the rankings that there are, and each class's."""
    values = [
        None if ranking is None else float(getattr(ranking, name)()) for ranking in answers.rankings
    ]
    there = [value for value in values if value is not None]
    if not there:
        return Measured(None, by_class=values)
    influence = np.zeros(len(answers.labels))
    for ranking in filter(None, answers.rankings):
        influence += getattr(ranking, f"{name}_influence")() / len(there)
    return Measured.influenced(sum(there) / len(there), influence, values)


# the mean over the classes of the area under the ROC curve, or of the average precision, of each
# against all others
auroc, average_precision = (partial(_ranked, name=name) for name in ("auroc", "average_precision"))


# --- more of what a document says


def per_class(answers: Answers) -> dict[str, dict[str, float | int | None]]:
    """Precision, recall, F1 and support of each class; None where a figure is 0/0 (never predicted,
    never there).
    """
    every = (answers.shown & answers.named, answers.shown, answers.named)
    hits, support, predicted = (each.sum(0).tolist() for each in every)
    return {
        name: {
            "precision": _share(hits[i], predicted[i]),
            "recall": _share(hits[i], support[i]),
            "f1": _share(2 * hits[i], support[i] + predicted[i]),
            "support": support[i],
        }
        for i, name in enumerate(answers.names)
    }


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def reliability(answers: Answers, bins: int = BINS) -> list[dict[str, float | int | None]]:
    """Of each bin of confidence, least sure first: `n`, mean `confidence` and `accuracy`; None in
    an empty one.
    """
    index = bin_of(answers.confidence, bins)
    counts, hits, confidence = (
        torch.bincount(index, weights, bins).tolist()
        for weights in (None, answers.hits.double(), answers.confidence)
    )
    rows = zip(counts, confidence, hits, strict=True)
    return [
        {"n": n, "confidence": _share(total, n), "accuracy": _share(right, n)}
        for n, total, right in rows
    ]


def confused_pairs(answers: Answers) -> list[dict[str, Any]]:
    """The pairs of a true and a predicted class with the most images, at most PAIRS: `true`,
    `predicted`, `n`.
    """
    counts, names = answers.confusion.numpy().copy(), answers.names
    np.fill_diagonal(counts, 0)
    places = [
        divmod(int(place), len(names))
        for place in np.argsort(-counts, axis=None, kind="stable")[:PAIRS]
    ]
    return [
        {"true": names[i], "predicted": names[j], "n": int(counts[i, j])}
        for i, j in places
        if counts[i, j]
    ]


def outliers(logits: Tensor, others: Tensor) -> dict[str, Any]:
    """How well two scores tell the classifier's own images from others: logits [n, K] of both.

    `max_probability` is the largest probability (Hendrycks and Gimpel 1610.02136), `energy` the
    logarithm of the sum of e^logit (Liu et al. 2010.03759); own images should have the larger ones.
    Each has `auroc`, `auroc_interval` and `fpr95`: the share of others above the score that 95 % of
    the own images reach.
    """
    both = torch.cat([logits, others]).double()
    own = np.arange(len(both)) < len(logits)
    document: dict[str, Any] = {"n": len(others)}
    for name, scores in (
        ("max_probability", both.softmax(1).amax(1)),
        ("energy", both.logsumexp(1)),
    ):
        values = scores.numpy()
        ranking = Ranking(values, own)
        reached = np.sort(values[own])[len(logits) - -(-95 * len(logits) // 100)]
        area = Measured.influenced(ranking.auroc(), ranking.auroc_influence())
        passed = float((values[~own] >= reached).mean())
        document[name] = {"auroc": area.value, "auroc_interval": area.interval, "fpr95": passed}
    return document
