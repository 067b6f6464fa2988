"""Classify corrupted images, and add the accuracy to the results of an evaluation."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.extras.robustness.corruptions import CORRUPTIONS, STRENGTHS, robustness
from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.evaluate_classifier import MEASUREMENTS, Finish, draw_records, logits_of
from duetgan.metrics.features.extractors import shared_pass
from duetgan.metrics.protocol import Document
from duetgan.models.classifier import Classifier
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.images import save_table


def measure_robustness(
    classifier: Classifier,
    _checkpoint: Checkpoint,
    dataset: Dataset,
    out: Path,
    options: Namespace,
) -> Finish | None:
    """Classify corrupted images for `--robustness`, and return a function that stores the results.

    The function adds `robustness` to the results and writes `robustness.png` into the folder `out`.
    Without the option, return None.
    """
    if not options.robustness:
        return None
    seed: int = options.seed
    with collectives.raising_together():
        if classifier.thresholds is not None:
            raise UserError("--robustness is for one label an image; leave it out")
        classifier.spec.need_plain("--robustness")
    records = draw_records(dataset, options.n, seed)
    hits = corrupted_hits(
        classifier, dataset, seed=seed, records=records, batch_size=options.batch_size
    )

    def finish(document: Document, _answers: Answers) -> None:
        document["robustness"] = robustness(hits, len(records), dataset.spec.side)
        save_corruptions(dataset.read([0])[0][0], out / "robustness.png", seed=seed)
        document["images"].append("robustness.png")

    return finish


def corrupted_hits(
    classifier: Classifier, dataset: Dataset, *, seed: int, records: np.ndarray, batch_size: int
) -> Tensor:
    """Return the number of correct predictions on corrupted images, int64 [corruptions, STRENGTHS].

    `records` are the indices of the images. Rows are in the order of CORRUPTIONS. All ranks must
    call this; all but rank 0 get zeros.
    """

    def work(rows: range) -> Tensor:
        indices = records[rows.start : rows.stop]
        batch = read_batch(dataset, indices)
        hits = torch.zeros(len(CORRUPTIONS), STRENGTHS, dtype=torch.int64)
        for row, corruption in enumerate(CORRUPTIONS.values()):
            for column in range(STRENGTHS):
                corrupted = [
                    corruption(image, column + 1, seed=seed, index=index)
                    for image, index in zip(batch.images.numpy(), indices.tolist(), strict=True)
                ]
                logits = logits_of(classifier, torch.from_numpy(np.stack(corrupted)))
                hits[row, column] = (logits.argmax(1) == batch.labels).sum()
        return hits

    parts = shared_pass(
        len(records),
        work,
        side=dataset.spec.side,
        batch_size=batch_size,
        progress="corrupted images",
    )
    return sum(parts, torch.zeros(len(CORRUPTIONS), STRENGTHS, dtype=torch.int64))


def save_corruptions(image: np.ndarray, path: Path, *, seed: int) -> None:
    """Write a picture of an image, uint8 [C, H, W], under all corruptions and strengths.

    The rows are the corruptions. The columns are the original image and the strengths.
    """
    rows = []
    strengths = range(1, STRENGTHS + 1)
    for corruption in CORRUPTIONS.values():
        corrupted = [corruption(image, strength, seed=seed, index=0) for strength in strengths]
        rows.append([image, *corrupted])
    heads = ["as it is", *(f"strength {strength}" for strength in strengths)]
    save_table(rows, path, row_heads=list(CORRUPTIONS), column_heads=heads)


MEASUREMENTS.append(measure_robustness)
