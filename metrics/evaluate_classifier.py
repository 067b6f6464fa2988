"""Evaluation of a classifier on labelled images."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from data.dataset import Dataset
from data.loader import evaluation_batches
from metrics.classification import ClassificationCounts
from metrics.extractors import classifier_input
from metrics.features import Progress
from metrics.precision import device_of, evaluating, exact_float32
from models.classifier import Classifier
from utils.errors import UserError

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
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Figures over every image of the file exactly once, whatever the number of ranks; the same on each rank.

    Pass the unwrapped module: wrappers that talk to other ranks in `forward` hang on uneven shares.

    Returns:
        `n`, `accuracy`, `top5_accuracy` (None below 5 classes), `ece`, `per_class` and `confusion` [true][named].

    Raises:
        UserError: no labels, other classes than the classifier's, no image, or outputs that are not finite.
    """
    counts = ClassificationCounts(_checked_classes(classifier, reader))
    device = device_of(classifier)
    total = min(len(reader), len(reader) if limit is None else limit)
    done = 0
    with evaluating(classifier), exact_float32(device), raising_together():
        for batch in evaluation_batches(reader, batch_size, rank=rank, world_size=world_size, limit=limit):
            logits = classifier(classifier_input(classifier, batch.images))
            probabilities = counts.update(logits, batch.labels)
            done += len(batch.labels)
            if observe is not None:
                observe(batch.images, batch.labels, probabilities)
            if progress is not None:
                progress("images", done, total // world_size)
    if reduce is not None:
        counts.reduce(lambda packed: reduce(packed.to(device)))  # a backend such as NCCL wants it on its device
    return counts.figures(reader.classes)


def _checked_classes(classifier: Classifier, reader: Dataset) -> int:
    """Number of classes; UserError unless the file has as many as the classifier."""
    own = classifier.classes
    if not reader.classes:
        raise UserError("the images to evaluate on have no labels; give a labelled file with --data")
    if len(reader.classes) != own:
        raise UserError(f"the images have {len(reader.classes)} classes, the classifier {own}; give its own data")
    return own
