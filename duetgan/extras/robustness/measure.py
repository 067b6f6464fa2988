"""The passes over corrupted images and outliers, and their results."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.opening import dataset_for_model
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.extras.robustness.corruptions import CORRUPTIONS, STRENGTHS, robustness
from duetgan.metrics.classification.answers import Answers, Ranking
from duetgan.metrics.evaluate_classifier import (
    MEASUREMENTS,
    Finish,
    classify,
    draw_records,
    logits_of,
)
from duetgan.metrics.features.extractors import shared_pass
from duetgan.metrics.intervals import Measured
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
    """Classify corrupted images for `--robustness`; return None without this option.

    The returned function adds `robustness` to the results, and draws `robustness.png`.
    """
    if not options.robustness:
        return None
    seed: int = options.seed
    with collectives.raising_together():
        _need_one_label(classifier)
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


def measure_outliers(
    classifier: Classifier,
    checkpoint: Checkpoint,
    dataset: Dataset,
    _out: Path,
    options: Namespace,
) -> Finish | None:
    """Classify the outliers of `--ood`, if any; the returned function adds `ood` to the results."""
    if not options.ood:
        return None
    with collectives.raising_together():
        _need_one_label(classifier)
        outliers = open_outliers(options.ood, checkpoint, dataset)
    with outliers:
        logits = classify(
            classifier,
            outliers,
            batch_size=options.batch_size,
            records=draw_records(outliers, options.n, options.seed),
            progress="outliers",
        )

    def finish(document: Document, answers: Answers) -> None:
        document["ood"] = {"data": outliers.path, **outlier_scores(answers.logits, logits)}

    return finish


def _need_one_label(classifier: Classifier) -> None:
    if classifier.thresholds is not None:
        raise UserError("--robustness and --ood are for one label an image; leave them out")


def corrupted_hits(
    classifier: Classifier, dataset: Dataset, *, seed: int, records: np.ndarray, batch_size: int
) -> Tensor:
    """Return the number of correct predictions on corrupted images, int64 [corruptions, STRENGTHS].

    Rows are in the order of CORRUPTIONS. All ranks must call this; all but rank 0 get zeros.
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
    """Draw an image, uint8 [C, H, W], under each corruption (rows) at each strength (columns)."""
    rows = []
    strengths = range(1, STRENGTHS + 1)
    for corruption in CORRUPTIONS.values():
        corrupted = [corruption(image, strength, seed=seed, index=0) for strength in strengths]
        rows.append([image, *corrupted])
    heads = ["as it is", *(f"strength {strength}" for strength in strengths)]
    save_table(rows, path, row_heads=list(CORRUPTIONS), column_heads=heads)


def open_outliers(path: str, checkpoint: Checkpoint, dataset: Dataset) -> Dataset:
    """Open the out-of-distribution images of `--ood`, of any classes, size and channels.

    Raises UserError if they are the test images.
    """
    outliers = dataset_for_model(path, {"config": {}, "shape": checkpoint["shape"]})
    if outliers.meta.content_hash == dataset.meta.content_hash:
        raise UserError(
            f"--ood {path}: these are the test images themselves; give images of another kind"
        )
    return outliers


def outlier_scores(logits: Tensor, outliers: Tensor) -> Document:
    """Measure how well two scores of logits [n, K] separate test images from outliers.

    `max_probability` is the largest probability (Hendrycks and Gimpel 1610.02136), `energy` the
    logarithm of the sum of e^logit (Liu et al. 2010.03759). Test images should score higher. Each
    score has `auroc`, `auroc_interval` and `fpr95`, the fraction of outliers that reach the
    threshold which 95 % of the test images reach.
    """
    joined = torch.cat([logits, outliers]).double()
    is_test = np.arange(len(joined)) < len(logits)
    document: Document = {"n": len(outliers)}
    for name, scores in (
        ("max_probability", joined.softmax(1).amax(1)),
        ("energy", joined.logsumexp(1)),
    ):
        values = scores.numpy()
        ranking = Ranking(values, is_test)
        threshold = np.sort(values[is_test])[len(logits) - -(-95 * len(logits) // 100)]
        area = Measured.influenced(ranking.auroc(), ranking.auroc_influence())
        passed = float((values[~is_test] >= threshold).mean())
        document[name] = {"auroc": area.value, "auroc_interval": area.interval, "fpr95": passed}
    return document


MEASUREMENTS.extend((measure_robustness, measure_outliers))
