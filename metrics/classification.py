"""Counts of right and wrong answers of a classifier, and the figures made of them.

Everything that is accumulated is an integer, so any split over batches, ranks and orders gives the same sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError

BINS = 15  # of the calibration error, as in Guo et al. 2017 (1706.04599)
CONFIDENCE_UNIT = 2**-32  # confidences are summed as whole multiples of this; 2^31 images fit an int64


class ClassificationCounts:
    """Confusion matrix, top-k hits and calibration bins over any number of batches; `reduce` adds up the ranks."""

    def __init__(self, classes: int, *, k: int = 5, bins: int = BINS) -> None:
        self.classes = classes
        self.k = k
        # all counts in one vector, which the ranks add up; the others are views of it
        self._packed = torch.zeros(classes**2 + 1 + 3 * bins, dtype=torch.int64)
        confusion, self.top_k_hits, *per_bin = self._packed.split([classes**2, 1, bins, bins, bins])
        self.confusion = confusion.view(classes, classes)  # [true, predicted]
        self.bin_counts, self.bin_hits, self.bin_confidence = per_bin  # the last in units of CONFIDENCE_UNIT

    def update(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Add a batch: logits [n, K] and labels int64 [n]; returns the probabilities [n, K], float64 on the CPU.

        Raises:
            UserError: a logit is not finite, or a label lies beyond the classes.
            ValueError: shapes that do not fit.
        """
        logits, labels = logits.detach().cpu().double(), labels.detach().cpu()
        if logits.shape != (len(labels), self.classes):
            raise ValueError(f"expected logits [{len(labels)}, {self.classes}], got {list(logits.shape)}")
        if not torch.isfinite(logits).all():
            raise UserError("the classifier's outputs are not finite; take an earlier checkpoint")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise UserError(f"a label of the data lies beyond the classifier's {self.classes} classes; give its data")
        probabilities = logits.softmax(1)
        predicted = logits.argmax(1)
        pairs = labels * self.classes + predicted
        self.confusion += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)
        self.top_k_hits += (_rank_of_label(logits, labels) < self.k).sum()
        self._update_bins(probabilities.amax(1), predicted == labels)
        return probabilities

    def _update_bins(self, confidence: Tensor, hits: Tensor) -> None:
        """Bin m holds the confidences in ((m - 1)/M, m/M], M bins."""
        bins = len(self.bin_counts)
        index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
        units = (confidence / CONFIDENCE_UNIT).round().long()
        self.bin_counts += torch.bincount(index, minlength=bins)
        self.bin_hits.index_add_(0, index, hits.long())
        self.bin_confidence.index_add_(0, index, units)

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace the counts by their sums over all processes; `sum_over_ranks` takes and returns an int64 vector."""
        self._packed.copy_(sum_over_ranks(self._packed.clone()))

    @property
    def count(self) -> int:
        """Number of images seen."""
        return int(self.confusion.sum())

    def accuracy(self) -> float:
        """Share of images whose largest logit is the label's."""
        return int(self.confusion.trace()) / self._count_or_raise()

    def top_k_accuracy(self) -> float | None:
        """Share of images whose label is among the k largest logits; None with fewer than k classes."""
        return int(self.top_k_hits) / self._count_or_raise() if self.classes >= self.k else None

    def expected_calibration_error(self) -> float:
        """Mean distance of confidence and accuracy over the bins, weighted by their share (Guo et al. 2017, eq. 3)."""
        confidence = self.bin_confidence.double() * CONFIDENCE_UNIT
        return float((confidence - self.bin_hits).abs().sum()) / self._count_or_raise()

    def per_class(self, names: Sequence[str]) -> dict[str, dict[str, float | int | None]]:
        """Precision, recall, F1 and support of each class; None where a figure is 0/0 (never named, never there)."""
        hits = self.confusion.diagonal().tolist()
        support = self.confusion.sum(1).tolist()
        named = self.confusion.sum(0).tolist()
        return {
            name: {
                "precision": _share(hits[i], named[i]),
                "recall": _share(hits[i], support[i]),
                "f1": _share(2 * hits[i], support[i] + named[i]),
                "support": support[i],
            }
            for i, name in enumerate(names)
        }

    def figures(self, names: Sequence[str]) -> dict[str, Any]:
        """All of it for JSON: `n`, `accuracy`, `top5_accuracy`, `ece`, `per_class` and `confusion` [true][named]."""
        return {
            "n": self._count_or_raise(),
            "accuracy": self.accuracy(),
            f"top{self.k}_accuracy": self.top_k_accuracy(),
            "ece": self.expected_calibration_error(),
            "per_class": self.per_class(names),
            "confusion": self.confusion.tolist(),
        }

    def _count_or_raise(self) -> int:
        if self.count == 0:
            raise UserError("there is no image to evaluate the classifier on; give some with --data")
        return self.count


def _rank_of_label(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the label's, [n]: larger logits, and equal ones of a lower number."""
    own = logits.gather(1, labels[:, None])
    lower_class = torch.arange(logits.shape[1])[None] < labels[:, None]
    return ((logits > own) | ((logits == own) & lower_class)).sum(1)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
