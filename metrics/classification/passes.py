"""Passes of a classifier over images: logits in the file's order, and hits under every corruption.

The ranks share them chunk by chunk, see `metrics.features.passes`; rank 0 gets the results.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from data.reading.dataset import Dataset
from data.reading.loader import read_batch
from metrics.classification.corruptions import CORRUPTIONS, STRENGTHS
from metrics.features.extractors import classifier_input
from metrics.features.passes import chunk_size, shared_pass
from metrics.features.precision import device_of, evaluating, full_float32
from models.classifier import Classifier
from utils.distributed import collectives
from utils.errors import UserError
from utils.runlog.progress import Bar


def logits_of(classifier: Classifier, images: Tensor) -> Tensor:
    """Logits float32 [n, K] on the CPU of images uint8 [n, C, H, W] of any size and channels; they are adapted as for
    an extractor. Raises UserError where one is not finite.
    """
    with evaluating(classifier), full_float32(device_of(classifier)):
        logits = classifier(classifier_input(classifier, images)).float().cpu()
    if not torch.isfinite(logits).all():
        raise UserError("the classifier's outputs are not finite; take an earlier checkpoint")
    return logits


def outlier_logits(classifier: Classifier, reader: Dataset, *, limit: int | None, batch_size: int) -> Tensor:
    """Logits of the images of a file, which need no labels: float32 [n, K] on rank 0, none elsewhere."""

    def work(rows: range) -> Tensor:
        return logits_of(classifier, read_batch(reader, np.arange(rows.start, rows.stop)).images)

    parts = _pass(work, reader, limit, batch_size, "images of others")
    return torch.cat([torch.empty(0, classifier.classes), *parts])


def corrupted_hits(classifier: Classifier, reader: Dataset, *, seed: int, limit: int | None, batch_size: int) -> Tensor:
    """Numbers of images predicted correctly, int64 [corruptions, STRENGTHS] in the order of CORRUPTIONS, on rank 0."""

    def work(rows: range) -> Tensor:
        batch = read_batch(reader, np.arange(rows.start, rows.stop))
        hits = torch.zeros(len(CORRUPTIONS), STRENGTHS, dtype=torch.int64)
        for row, corruption in enumerate(CORRUPTIONS.values()):
            for column in range(STRENGTHS):
                each = zip(batch.images.numpy(), rows, strict=True)
                spoiled = np.stack([corruption(image, column + 1, seed=seed, index=index) for image, index in each])
                predicted = logits_of(classifier, torch.from_numpy(spoiled)).argmax(1)
                hits[row, column] = (predicted == batch.labels).sum()
        return hits

    parts = _pass(work, reader, limit, batch_size, "corrupted images")
    return torch.stack([torch.zeros(len(CORRUPTIONS), STRENGTHS, dtype=torch.int64), *parts]).sum(0)


def _pass(
    work: Callable[[range], Tensor], reader: Dataset, limit: int | None, batch_size: int, what: str
) -> Iterator[Tensor]:
    """`shared_pass` over the first `limit` images of a file (None: all), with a bar."""
    total = len(reader) if limit is None else min(limit, len(reader))
    with Bar(total=total, desc=what, unit="image", disable=not collectives.is_main()) as bar:
        for result in shared_pass(total, work, side=reader.resolution, batch_size=batch_size):
            yield result
            bar.update(min(chunk_size(reader.resolution), total - bar.n))
