"""Evaluation of a classifier on labelled images: counts of right and wrong answers, and the figures made of them.

Everything that is accumulated is an integer, so any split over batches, ranks and orders gives the same sums.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from data.dataset import Dataset
from data.loader import evaluation_batches
from metrics.extractors import classifier_input
from metrics.precision import device_of, evaluating, exact_float32
from models.classifier import Classifier
from utils.errors import UserError
from utils.progress import Bar

TOP = 5  # labels among so many largest logits are counted
BINS = 15  # of the calibration error, as in Guo et al. 2017 (1706.04599)
CONFIDENCE_UNIT = 2**-32  # confidences are summed as whole multiples of this; 2^31 images fit an int64


class ClassificationCounts:
    """Confusion matrix, top-k hits and calibration bins over any number of batches; `reduce` adds up the ranks."""

    def __init__(self, classes: int, *, bins: int = BINS) -> None:
        self.classes = classes
        # all counts in one vector, which the ranks add up; the others are views of it
        self._packed = torch.zeros(classes**2 + 1 + 3 * bins, dtype=torch.int64)
        confusion, self.top_k_hits, *per_bin = self._packed.split([classes**2, 1, bins, bins, bins])
        self.confusion = confusion.view(classes, classes)  # [true, predicted]
        self.bin_counts, self.bin_hits, self.bin_confidence = per_bin  # the last in units of CONFIDENCE_UNIT

    def update(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Add a batch: logits [n, K] and labels int64 [n]; returns the probabilities [n, K], float64 on the CPU.

        Raises UserError where a logit is not finite or a label lies beyond the classes, ValueError for other shapes.
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
        self.top_k_hits += (_rank_of_label(logits, labels) < TOP).sum()
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
        """All of it for JSON: `n`; `accuracy`; `top5_accuracy` (None with 5 classes or fewer); `ece`, the mean
        distance of confidence and accuracy over the bins, weighted by their share (Guo et al. 2017, eq. 3);
        `per_class`; `confusion` [true][named]. Raises UserError where there was no image.
        """
        count = int(self.confusion.sum())
        if count == 0:
            raise UserError("there is no image to evaluate the classifier on; give some with --data")
        confidence = self.bin_confidence.double() * CONFIDENCE_UNIT
        return {
            "n": count,
            "accuracy": int(self.confusion.trace()) / count,
            f"top{TOP}_accuracy": int(self.top_k_hits) / count if self.classes > TOP else None,
            "ece": float((confidence - self.bin_hits).abs().sum()) / count,
            "per_class": self.per_class(names),
            "confusion": self.confusion.tolist(),
        }


def _rank_of_label(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the label's, [n]: larger logits, and equal ones of a lower number."""
    own = logits.gather(1, labels[:, None])
    lower_class = torch.arange(logits.shape[1])[None] < labels[:, None]
    return ((logits > own) | ((logits == own) & lower_class)).sum(1)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


Observer = Callable[[Tensor, Tensor, Tensor], None]
"""Called with each batch: images uint8 [b, C, H, W], labels int64 [b], probabilities float64 [b, K], on the CPU."""


def evaluate_classifier(
    classifier: Classifier,  # a models Classifier
    reader: Dataset,
    *,
    batch_size: int = 256,
    limit: int | None = None,  # only the first so many images
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[Tensor], Tensor] | None = None,  # sums an int64 vector over the ranks
    raising_together: Callable[[], AbstractContextManager[None]] = nullcontext,  # raises one rank's UserError on all
    show: bool = False,  # a progress bar
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Figures over every image of the file exactly once, whatever the number of ranks; the same on each rank.

    Pass the unwrapped module: wrappers that talk to other ranks in `forward` hang on uneven shares. Returns
    `ClassificationCounts.figures`. Raises UserError for images without labels or of other classes than the
    classifier's, for no image, and for outputs that are not finite.
    """
    own, given = classifier.classes, len(reader.classes)
    if not given:
        raise UserError("the images to evaluate on have no labels; give a labelled file with --data")
    if given != own:
        raise UserError(f"the images have {given} classes, the classifier {own}; give its own data")
    counts = ClassificationCounts(own)
    device = device_of(classifier)
    total = min(len(reader), len(reader) if limit is None else limit) // world_size
    bar = Bar(total=total, desc="images", unit="image", disable=not show)
    with bar, evaluating(classifier), exact_float32(device), raising_together():
        for batch in evaluation_batches(reader, batch_size, rank=rank, world_size=world_size, limit=limit):
            logits = classifier(classifier_input(classifier, batch.images))
            probabilities = counts.update(logits, batch.labels)
            if observe is not None:
                observe(batch.images, batch.labels, probabilities)
            bar.update(len(batch.labels))
    if reduce is not None:
        counts.reduce(lambda packed: reduce(packed.to(device)))  # a backend such as NCCL wants it on its device
    return counts.figures(reader.classes)
