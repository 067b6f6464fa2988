"""Metrics of a classifier: pure functions of its logits on labelled images.

The metrics depend neither on batches nor on processes. Calibration follows Guo et al. 2017
(1706.04599).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.intervals import Measured, balanced_interval, root
from duetgan.metrics.protocol import Document
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator


class Ranking:
    """A ranking of images by a score, with its AUROC, average precision, and influences on both.

    Images of equal score form one level. The influence of an image on a metric is the derivative of
    the metric by the image's weight, times the number n of images. For the AUROC, the mean squared
    influence divided by n is DeLong's variance (1988).
    """

    def __init__(self, scores: np.ndarray, positive: np.ndarray) -> None:
        """Sort the images into levels.

        Args:
            scores: Score of each image, float [n]; it should be higher for positive images.
            positive: True for positive images, bool [n].

        Raises:
            ValueError: If there is no positive or no negative image.
        """
        self.positive = positive
        levels, self.level = np.unique(scores, return_inverse=True)  # ascending
        self._positives = np.bincount(self.level[positive], minlength=len(levels))
        self._negatives = np.bincount(self.level[~positive], minlength=len(levels))
        self.counts = int(self._positives.sum()), int(self._negatives.sum())
        if 0 in self.counts:
            raise ValueError("a ranking needs a positive and a negative image")

    @cached_property
    def _wins(self) -> tuple[np.ndarray, np.ndarray]:
        """For each level, twice the number of negatives below it, and of positives above it.

        Images of the level itself are ties and count half, so that twice the number is an integer.
        """
        below = 2 * np.cumsum(self._negatives) - self._negatives
        above = 2 * self.counts[0] - 2 * np.cumsum(self._positives) + self._positives
        return below, above

    def auroc(self) -> float:
        """Return the fraction of pairs (positive, negative) that the score orders correctly.

        A pair of equal scores counts half.
        """
        positives, negatives = self.counts
        return int((self._positives * self._wins[0]).sum()) / (2 * positives * negatives)

    def auroc_influence(self) -> np.ndarray:
        """Return the influence of each image on `auroc`, [n], with mean 0."""
        (positives, negatives), (below, above) = self.counts, self._wins
        wins = (
            np.where(self.positive, below[self.level] / negatives, above[self.level] / positives)
            / 2
        )
        return len(wins) * (wins - self.auroc()) / np.where(self.positive, positives, negatives)

    @cached_property
    def _retrieved(self) -> tuple[np.ndarray, np.ndarray]:
        """For each level, the number of images at or above it, and their fraction of positives."""
        count = np.cumsum((self._positives + self._negatives)[::-1])[::-1]
        return count, np.cumsum(self._positives[::-1])[::-1] / count

    def average_precision(self) -> float:
        """Return the average precision, sum((R_i - R_(i-1)) P_i) for recall R and precision P.

        There is no interpolation between levels.
        """
        return float((self._positives * self._retrieved[1]).sum()) / self.counts[0]

    def average_precision_influence(self) -> np.ndarray:
        """Return the influence of each image on `average_precision`, [n], with mean 0.

        Every image changes the precision at its own level and at all lower levels. A positive image
        also adds its own term to the sum.
        """
        count, precision = self._retrieved
        gain = precision - self.average_precision() + np.cumsum(self._positives / count)
        loss = np.cumsum(self._positives * precision / count)
        difference = self.positive * gain[self.level] - loss[self.level]
        return len(self.level) / self.counts[0] * difference


BINS = 15  # of confidence, for the calibration error
COLDEST, HOTTEST = 0.01, 100.0  # range of fitted temperatures


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Return the bin, 0 to `bins` - 1, of each confidence, float64 [n].

    Of M bins, bin m - 1 holds the confidences in ((m - 1)/M, m/M].
    """
    return (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)


def calibration_error(confidence: Tensor, hits: Tensor) -> tuple[float, Tensor]:
    """Return the expected calibration error and each image's influence on it, [n].

    Args:
        confidence: Largest probability of each image, float64 [n].
        hits: True for images that are predicted correctly, bool [n].
    """
    gaps = confidence - hits.double()
    index = bin_of(confidence, BINS)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, index, gaps)
    error = float(sums.abs().sum()) / len(gaps)
    return error, sums.sign()[index] * gaps - error


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log of the probability of each image's true class, float64 [n]."""
    logits = logits.double()
    return logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ascending indices of two random halves of the images, stratified by class.

    The halves are drawn by the key (seed, "eval", "temperature").
    """
    order = numpy_generator(seed, "eval", "temperature").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.sort(order[::2]), np.sort(order[1::2])


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the T that minimises the negative log-likelihood of softmax(logits / T).

    The loss is convex in 1/T, so that its slope, the mean of E[z] - z_y for logits z and label y,
    changes sign once. T is limited to COLDEST to HOTTEST, because the minimum would be at T = 0 if
    there are no mistakes.
    """
    logits = logits.double()

    def expected(logarithm: float) -> Tensor:  # mean of E[z], which falls as T rises
        return ((logits / math.exp(logarithm)).softmax(1) * logits).sum(1).mean()

    observed = logits.gather(1, labels[:, None]).mean()
    return math.exp(root(expected, observed, math.log(COLDEST), math.log(HOTTEST)))


TOP = 5  # likeliest classes, for the top-5 accuracy
PAIRS = 10  # number of most confused pairs of classes to list


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """Convert labels, class indices int64 [n] or multi-hot [n, classes], to bool [n, classes]."""
    return labels > 0 if labels.ndim == 2 else labels[:, None] == torch.arange(classes)


@dataclass(frozen=True)
class Answers:
    """Logits and labels of images that have one class each, and values derived from them.

    Raises:
        UserError: If there is no image.
    """

    logits: Tensor  # float32 [n, K]
    labels: Tensor  # int64 [n]
    names: Sequence[str]  # class names, [K]
    # record numbers of the images, int64 [n]; None means 0 to n - 1
    records: np.ndarray | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise UserError(
                "there is no image to evaluate the classifier on; give some with --data"
            )

    def record_numbers(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the record numbers of the images at these rows."""
        return np.asarray(rows) if self.records is None else self.records[rows]

    @cached_property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes, float64 [n, K]."""
        return self.logits.double().softmax(1)

    @cached_property
    def predicted(self) -> Tensor:
        """Most likely class, int64 [n]; the first one of equally likely classes."""
        return self.logits.argmax(1)

    @cached_property
    def confidence(self) -> Tensor:
        return self.probabilities.amax(1)

    @cached_property
    def hits(self) -> Tensor:
        """True for images whose predicted classes are exactly the true classes, bool [n]."""
        return (self.predicted_classes == self.true_classes).all(1)

    @cached_property
    def true_classes(self) -> Tensor:
        """True classes of each image, bool [n, K]."""
        return multi_hot(self.labels, len(self.names))

    @cached_property
    def predicted_classes(self) -> Tensor:
        """Predicted classes of each image, bool [n, K]."""
        return multi_hot(self.predicted, len(self.names))

    def class_text(self, classes: Tensor) -> str:
        """Return the names of the classes that are True in bool [K], or "no label"."""
        return "; ".join(itertools.compress(self.names, classes.tolist())) or "no label"

    @cached_property
    def confusion(self) -> Tensor:
        """Number of images of each true (row) and predicted class (column), int64 [K, K]."""
        classes = len(self.names)
        return torch.bincount(self.labels * classes + self.predicted, minlength=classes**2).view(
            classes, classes
        )

    @cached_property
    def rankings(self) -> list[Ranking | None]:
        """Ranking of the images by the probability of each class.

        It is None for a class that no image has, or that every image has.
        """
        pairs = zip(self.probabilities.T.numpy(), self.true_classes.T.numpy(), strict=True)
        return [
            Ranking(scores, positive) if positive.any() and not positive.all() else None
            for scores, positive in pairs
        ]


# --- metrics


def accuracy(answers: Answers) -> Measured:
    """Return the fraction of images whose predicted classes are correct."""
    return Measured.fraction(answers.hits)


def top5_accuracy(answers: Answers) -> Measured:
    """Return the fraction of images whose class is among the five likeliest.

    If classes are equally likely, those with lower numbers come first. The value is None for five
    classes or fewer.
    """
    logits, labels = answers.logits, answers.labels
    if len(answers.names) <= TOP:
        return Measured(None)
    true_logit = logits.gather(1, labels[:, None])
    precedes = torch.arange(logits.shape[1])[None] < labels[:, None]
    rank = ((logits > true_logit) | ((logits == true_logit) & precedes)).sum(1)
    return Measured.fraction(rank < TOP)


def balanced_accuracy(answers: Answers) -> Measured:
    """Return the mean recall of the classes that have images."""
    counts, hits = answers.confusion.sum(1), answers.confusion.diagonal()
    present = counts > 0
    recalls = hits.double() / counts.clamp(min=1)
    interval = balanced_interval(hits[present].tolist(), counts[present].tolist())
    return Measured(float(recalls[present].mean()), interval)


def ece(answers: Answers) -> Measured:
    """Return the expected calibration error (Guo et al. 2017).

    This is |accuracy - mean confidence| of the images in a bin of confidence, averaged over the
    bins, each weighted by its number of images.
    """
    return Measured.influenced(*calibration_error(answers.confidence, answers.hits))


def nll(answers: Answers) -> Measured:
    """Return the mean negative log-likelihood of the true classes."""
    losses = negative_log_likelihood(answers.logits, answers.labels)
    return Measured.influenced(float(losses.mean()), losses - losses.mean(), high=math.inf)


def _ranked(answers: Answers, name: str) -> Measured:
    """Return a metric of `Ranking`, averaged over the classes, with the values by class.

    `name` is the metric's method, such as "auroc".
    """
    by_class = [
        None if ranking is None else float(getattr(ranking, name)()) for ranking in answers.rankings
    ]
    defined = [value for value in by_class if value is not None]
    if not defined:
        return Measured(None, by_class=by_class)
    influence = np.zeros(len(answers.labels))
    for ranking in filter(None, answers.rankings):
        influence += getattr(ranking, f"{name}_influence")() / len(defined)
    return Measured.influenced(sum(defined) / len(defined), influence, by_class)


# one class against all others, then the mean over the classes
auroc, average_precision = (partial(_ranked, name=name) for name in ("auroc", "average_precision"))


# --- further parts of a document


def judged_temperature(answers: Answers, *, seed: int) -> Document | None:
    """Fit a temperature on all images, and test the method by cross-fitting.

    For the test, the logits of each half of the images are divided by the temperature that was
    fitted on the other half. No image is then judged by a temperature that it helped to fit.

    Returns:
        A dict with `value`, the temperature; `n`, the number of images; and the metrics `nll` and
        `ece`, each with its interval, without a temperature (keys with `_before`) and with the
        temperatures of the halves (keys with `_after`). None if there are fewer than 4 images.
    """
    logits, labels = answers.logits.double(), answers.labels
    if len(labels) < 4:
        return None
    scaled = logits.clone()
    parts = [torch.from_numpy(half) for half in halves(labels.numpy(), seed)]
    for judged, fitted in itertools.permutations(parts):
        scaled[judged] /= fit_temperature(logits[fitted], labels[fitted])
    result: Document = {"value": fit_temperature(logits, labels), "n": len(labels)}
    for name, judged_answers in (("before", answers), ("after", replace(answers, logits=scaled))):
        for metric in (nll, ece):
            measured = metric(judged_answers)
            result[f"{metric.__name__}_{name}"] = measured.value
            result[f"{metric.__name__}_interval_{name}"] = measured.interval
    return result


def per_class(answers: Answers) -> dict[str, dict[str, float | int | None]]:
    """Return a dict from each class name to its `precision`, `recall`, `f1` and `support`.

    The support is the number of the class's images. A value is None where it is 0/0: the class was
    never predicted, or has no images.
    """
    true, named = answers.true_classes, answers.predicted_classes
    hits = (true & named).sum(0).tolist()
    support = true.sum(0).tolist()
    predicted = named.sum(0).tolist()
    return {
        name: {
            "precision": _ratio(hits[i], predicted[i]),
            "recall": _ratio(hits[i], support[i]),
            "f1": _ratio(2 * hits[i], support[i] + predicted[i]),
            "support": support[i],
        }
        for i, name in enumerate(answers.names)
    }


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def reliability(answers: Answers, bins: int = BINS) -> list[dict[str, float | int | None]]:
    """Return a list with a dict for each bin of confidence, from low to high confidence.

    The dict has the number `n` of images in the bin, their mean `confidence` and their `accuracy`.
    In an empty bin, `confidence` and `accuracy` are None.
    """
    index = bin_of(answers.confidence, bins)
    counts, hits, confidence = (
        torch.bincount(index, weights, bins).tolist()
        for weights in (None, answers.hits.double(), answers.confidence)
    )
    rows = zip(counts, confidence, hits, strict=True)
    return [
        {"n": n, "confidence": _ratio(total, n), "accuracy": _ratio(correct, n)}
        for n, total, correct in rows
    ]


def confused_pairs(answers: Answers) -> list[Document]:
    """Return the PAIRS most frequent mistakes, the most frequent first.

    A mistake is a dict with the `true` class, the `predicted` class, and the number `n` of images.
    """
    counts, names = answers.confusion.numpy().copy(), answers.names
    np.fill_diagonal(counts, 0)
    pairs = []
    for cell in np.argsort(-counts, axis=None, kind="stable")[:PAIRS]:
        true, predicted = divmod(int(cell), len(names))
        if n := int(counts[true, predicted]):
            pairs.append({"true": names[true], "predicted": names[predicted], "n": n})
    return pairs
