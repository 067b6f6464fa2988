"""Evaluation of a classifier on labelled images: counts of right and wrong answers, and the figures made of them.

Everything that is accumulated is an integer, so any split over batches and any order gives the same sums.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading.dataset import Dataset
from data.reading.loader import read_batch
from metrics.features.extractors import classifier_input
from metrics.features.passes import shared_pass
from metrics.features.precision import device_of, evaluating, full_float32
from models.classifier import Classifier
from utils.distributed import collectives
from utils.errors import UserError
from utils.runlog.progress import Bar

TOP = 5  # labels among so many largest logits are counted
BINS = 15  # of the calibration error, as in Guo et al. 2017 (1706.04599)
CONFIDENCE_UNIT = 2**-32  # confidences are summed as whole multiples of this; 2^31 images fit an int64


class ClassificationCounts:
    """Confusion matrix, top-k hits and calibration bins over any number of batches."""

    def __init__(self, classes: int, *, bins: int = BINS) -> None:
        self.classes = classes
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)  # [true, predicted]
        self.top_k_hits = torch.zeros(1, dtype=torch.int64)
        # the last in units of CONFIDENCE_UNIT
        self.bin_counts, self.bin_hits, self.bin_confidence = torch.zeros(3, bins, dtype=torch.int64)

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Raise UserError where a logit is not finite or a label lies beyond the classes, ValueError for shapes other
        than [n, K] and [n].
        """
        if logits.shape != (len(labels), self.classes):
            raise ValueError(f"expected logits [{len(labels)}, {self.classes}], got {list(logits.shape)}")
        if not torch.isfinite(logits).all():
            raise UserError("the classifier's outputs are not finite; take an earlier checkpoint")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise UserError(f"a label of the data lies beyond the classifier's {self.classes} classes; give its data")

    def update(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Add a batch: logits [n, K] and labels int64 [n]; returns the probabilities [n, K], float64 on the CPU.

        Raises as `check` does.
        """
        logits, labels = logits.detach().cpu().double(), labels.detach().cpu()
        self.check(logits, labels)
        probabilities = logits.softmax(1)
        predicted = logits.argmax(1)
        pairs = labels * self.classes + predicted
        self.confusion += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, self.classes)
        self.top_k_hits += (_rank_of_label(logits, labels) < TOP).sum()
        self._update_bins(probabilities.amax(1), predicted == labels)
        return probabilities

    def _update_bins(self, confidence: Tensor, hits: Tensor) -> None:
        bins = len(self.bin_counts)
        index = bin_of(confidence, bins)
        units = (confidence / CONFIDENCE_UNIT).round().long()
        self.bin_counts += torch.bincount(index, minlength=bins)
        self.bin_hits.index_add_(0, index, hits.long())
        self.bin_confidence.index_add_(0, index, units)

    def reliability(self) -> list[dict[str, float | int | None]]:
        """Of each bin of confidence, least sure first: `n`, mean `confidence` and `accuracy`; None in an empty one."""
        confidence = (self.bin_confidence.double() * CONFIDENCE_UNIT).tolist()
        rows = zip(self.bin_counts.tolist(), confidence, self.bin_hits.tolist(), strict=True)
        return [{"n": n, "confidence": _share(total, n), "accuracy": _share(hits, n)} for n, total, hits in rows]

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
            "reliability": self.reliability(),
            "per_class": self.per_class(names),
            "confusion": self.confusion.tolist(),
        }


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Bins 0 to M - 1 of confidences float64 [n]: bin m - 1 holds those in ((m - 1)/M, m/M], M bins."""
    return (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)


def _rank_of_label(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the label's, [n]: larger logits, and equal ones of a lower number."""
    own = logits.gather(1, labels[:, None])
    lower_class = torch.arange(logits.shape[1])[None] < labels[:, None]
    return ((logits > own) | ((logits == own) & lower_class)).sum(1)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def evaluate_classifier(
    classifier: Classifier,  # a models Classifier
    reader: Dataset,
    *,
    batch_size: int = 256,
    limit: int | None = None,  # only the first so many images
    show: bool = False,  # a progress bar
    kept: list[Tensor] | None = None,  # takes all logits on rank 0, float32 [b, K] on the CPU, in the images' order
) -> dict[str, Any]:
    """Figures over every image of the file exactly once; the ranks share the images and get the same figures.

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
    total = min(len(reader), len(reader) if limit is None else limit)

    def work(rows: range) -> tuple[Tensor, Tensor]:
        batch = read_batch(reader, np.arange(rows.start, rows.stop))
        logits = classifier(classifier_input(classifier, batch.images)).cpu()
        counts.check(logits, batch.labels)
        return logits, batch.labels

    with (
        Bar(total=total, desc="images", unit="image", disable=not (show and collectives.is_main())) as bar,
        evaluating(classifier),
        full_float32(device_of(classifier)),
    ):
        for logits, labels in shared_pass(total, work, side=reader.resolution, batch_size=batch_size):
            counts.update(logits, labels)
            if kept is not None:
                kept.append(logits.float())
            bar.update(len(labels))
    return collectives.from_main_process(lambda: counts.figures(reader.classes))
