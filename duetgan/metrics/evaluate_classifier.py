"""Evaluation of a classifier on labelled images: passes that the ranks share, and what evaluate.py
makes of them.
"""

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.data.reading.loader import read_batch
from duetgan.metrics.classification.answers import (
    Answers,
    confused_pairs,
    judged_temperature,
    negative_log_likelihood,
    outliers,
    per_class,
    reliability,
)
from duetgan.metrics.classification.corruptions import CORRUPTIONS, STRENGTHS, robustness
from duetgan.metrics.classification.labels import LabelAnswers, best_thresholds
from duetgan.metrics.comparison.compare import keep_predictions
from duetgan.metrics.features.extractors import classifier_input, shared_pass
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.figures import CLASSIFIER, LABELS, measured
from duetgan.metrics.images import (
    save_confused,
    save_confusion,
    save_corruptions,
    save_evidence,
    save_mistakes,
    save_reliability,
)
from duetgan.metrics.lineage import data_of, leaks, training_images
from duetgan.metrics.tables import few_images
from duetgan.models.classifier import Classifier
from duetgan.models.fast import faster
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.seeding import numpy_generator


def logits_of(classifier: Classifier, images: Tensor) -> Tensor:
    """Logits float32 [n, K] on the CPU of images uint8 [n, C, H, W] of any size and channels; they
    are adapted as for an extractor. Raises UserError where one is not finite.
    """
    with evaluating(classifier), full_float32(device_of(classifier)):
        logits = classifier(classifier_input(classifier, images)).float().cpu()
    if not torch.isfinite(logits).all():
        raise UserError("the classifier's outputs are not finite; take an earlier checkpoint")
    return logits


def classify(
    # unwrapped: wrappers that talk to other ranks in `forward` hang on uneven shares
    classifier: Classifier,
    reader: Dataset,
    *,
    batch_size: int = 256,
    records: np.ndarray | None = None,  # int64 [n]; None: all
    what: str = "",  # the images on a progress bar; empty: there is none
) -> Tensor:
    """Logits of every image of a file exactly once, in their order: float32 [n, K] on rank 0, none
    elsewhere.
    """
    records = np.arange(len(reader)) if records is None else records

    def work(rows: range) -> Tensor:
        return logits_of(classifier, read_batch(reader, records[rows.start : rows.stop]).images)

    parts = shared_pass(len(records), work, side=reader.spec.side, batch_size=batch_size, what=what)
    return torch.cat([torch.empty(0, classifier.classes), *parts])


def answers_of(
    classifier: Classifier, reader: Dataset, logits: Tensor, records: np.ndarray | None = None
) -> Answers:
    """The classifier's answers to these records of a file; None: to all."""
    records = np.arange(len(reader)) if records is None else records
    if classifier.thresholds is not None:
        hot = torch.from_numpy(reader.meta.multi_hot[reader.label_numbers()[records]])
        return LabelAnswers(
            logits, hot, reader.classes, classifier.thresholds.cpu(), records=records
        )
    return Answers(
        logits,
        torch.from_numpy(reader.labels()[records].astype(np.int64)),
        reader.classes,
        records=records,
    )


def drawn(reader: Dataset, n: int | None, seed: int) -> np.ndarray:
    """n records by the key (seed, "eval", "classifier"), in their order; None: all. Files are often
    packed class by class, so the first n are no sample.
    """
    return np.sort(numpy_generator(seed, "eval", "classifier").permutation(len(reader))[:n])


def check_classes(classifier: Classifier, reader: Dataset) -> None:
    """Raise UserError for images without labels, of another number of classes or another kind than
    the classifier's.
    """
    own, given = classifier.classes, len(reader.classes)
    refuse(
        (not given, "the images to evaluate on have no labels; give a labelled file with --data"),
        (given != own, f"the images have {given} classes, the classifier {own}; give its own data"),
        (
            (reader.meta.sets is None) != (classifier.thresholds is None),
            f"{reader.path}: images and classifier differ in whether an image may have several labels",
        ),
    )


def evaluate_classifier(
    classifier: Classifier, reader: Dataset, *, batch_size: int = 256, details: bool = True
) -> dict[str, Any]:
    """The figures over every image of a file; without `details` those that are followed during
    training. The ranks share the images and get the same figures.

    Raises UserError as `check_classes` does, for no image, and for outputs that are not finite.
    """
    check_classes(classifier, reader)
    every = CLASSIFIER if classifier.thresholds is None else LABELS
    rows = [row for row in every if details or row.in_training]
    logits = classify(classifier, reader, batch_size=batch_size)
    # they are of the held-out images
    if not details and (thresholds := classifier.thresholds) is not None:
        found = collectives.from_main_process(
            lambda: best_thresholds(answers_of(classifier, reader, logits))
        )
        thresholds.copy_(torch.tensor(found))
    return collectives.from_main_process(
        lambda: measured(rows, answers_of(classifier, reader, logits), {})
    )


def corrupted_hits(
    classifier: Classifier, reader: Dataset, *, seed: int, records: np.ndarray, batch_size: int
) -> Tensor:
    """Numbers of images predicted correctly, int64 [corruptions, STRENGTHS] in the order of
    CORRUPTIONS, on rank 0.
    """

    def work(rows: range) -> Tensor:
        these = records[rows.start : rows.stop]
        batch = read_batch(reader, these)
        hits = torch.zeros(len(CORRUPTIONS), STRENGTHS, dtype=torch.int64)
        for row, corruption in enumerate(CORRUPTIONS.values()):
            for column in range(STRENGTHS):
                each = zip(batch.images.numpy(), these.tolist(), strict=True)
                spoiled = np.stack(
                    [corruption(image, column + 1, seed=seed, index=index) for image, index in each]
                )
                hits[row, column] = (
                    logits_of(classifier, torch.from_numpy(spoiled)).argmax(1) == batch.labels
                ).sum()
        return hits

    parts = shared_pass(
        len(records), work, side=reader.spec.side, batch_size=batch_size, what="corrupted images"
    )
    return sum(parts, torch.zeros(len(CORRUPTIONS), STRENGTHS, dtype=torch.int64))


# --- evaluate.py


def evaluate_classifier_run(
    checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace
) -> dict[str, Any]:
    speed = {"precision": options.precision, "fold": options.fold, "tta": options.tta}
    with collectives.raising_together():
        device = collectives.choose_device(options.device)
        restored = classifier_from(checkpoint, device, several=True)
        classifier = faster(restored, device, **speed)
        if (options.robustness or options.ood) and classifier.thresholds is not None:
            raise UserError("--robustness and --ood are for one label an image; leave them out")
        if options.robustness:
            classifier.spec.need_plain("--robustness")
        if reader.classes:
            require_same_classes(
                "the classifier", checkpoint["classes"], "the images", reader.classes
            )
        check_classes(classifier, reader)
        others = open_others(options.ood, checkpoint, reader) if options.ood else None
    n, seed, records = options.n, options.seed, drawn(reader, options.n, options.seed)
    how: dict[str, Any] = {"records": records, "batch_size": options.batch_size}
    with others or nullcontext():
        logits = classify(classifier, reader, **how, what="images")
        hits = corrupted_hits(classifier, reader, seed=seed, **how) if options.robustness else None
        how["records"] = drawn(others, n, seed) if others else None
        outside = classify(classifier, others, **how, what="images of others") if others else None

    def finish() -> dict[str, Any]:
        answers = answers_of(classifier, reader, logits, records)
        document = speed | _written(checkpoint, reader, out, answers, seed)
        if not isinstance(answers, LabelAnswers):
            found = save_evidence(restored, reader, answers, out / "evidence.png")
            document["images"] += ["evidence.png"] * found
        if probe := checkpoint["state"].get("probe"):
            document["probe"] = probe
            sure = "{:.3f} ({:.3f} to {:.3f}) by cross-validation".format(
                probe["accuracy"], *probe["interval"]
            )
            document["notes"]["probe"] = (
                f"it began as a logistic regression on its features: {sure}"
            )
        if hits is not None:
            document["robustness"] = robustness(hits, document["n"], reader.spec.side)
            save_corruptions(reader.read([0])[0][0], out / "robustness.png", seed=seed)
            document["images"].append("robustness.png")
        if others is not None and outside is not None:
            document["ood"] = {"data": others.path, **outliers(logits, outside)}
        return document

    return collectives.from_main_process(finish)


def open_others(path: str, checkpoint: Checkpoint, reader: Dataset) -> Dataset:
    """The images that are to be told from the test images: of any classes, size and channels, but
    not the same file.
    """
    others = dataset_for_model(path, {"config": {}, "shape": checkpoint["shape"]})
    if others.meta.content_hash == reader.meta.content_hash:
        raise UserError(
            f"--ood {path}: these are the test images themselves; give images of another kind"
        )
    return others


def document_of(answers: Answers, *, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a classifier's document says of its answers, and what is kept of every image: the
    columns of `metrics.comparison.compare`, each [n]. `seed`: of the halves for the temperature.
    """
    results = {
        row: row.measure(answers)
        for row in (LABELS if isinstance(answers, LabelAnswers) else CLASSIFIER)
    }
    ranked = {row.key: result.by_class for row, result in results.items() if result.by_class}
    rows = per_class(answers)
    for place, row in enumerate(rows.values()):
        row |= {key: by_class[place] for key, by_class in ranked.items()}
        row |= (
            {"threshold": float(answers.thresholds[place])}
            if isinstance(answers, LabelAnswers)
            else {}
        )
    influences = {
        row.key: each.influence for row, each in results.items() if each.influence is not None
    }
    figures = {
        "n": len(answers.labels),
        **{
            key: value
            for row, result in results.items()
            for key, value in row.keys(result, answers.names).items()
        },
        "per_class": rows,
    }
    if isinstance(answers, LabelAnswers):
        return figures, influences
    figures |= {
        "majority_class_rate": float(answers.confusion.sum(1).max() / len(answers.labels)),
        "reliability": reliability(answers),
        "confusion": answers.confusion.tolist(),
        "temperature": judged_temperature(answers.logits, answers.labels, seed=seed),
        "confused": confused_pairs(answers),
    }
    losses = negative_log_likelihood(answers.logits, answers.labels)
    columns = {
        "label": answers.labels,
        "prediction": answers.predicted,
        "confidence": answers.confidence,
    }
    kept = {name: column.numpy() for name, column in (columns | {"loss": losses}).items()}
    return figures, kept | influences


def _written(
    checkpoint: Checkpoint, reader: Dataset, out: Path, answers: Answers, seed: int
) -> dict[str, Any]:
    """The document, once everything that goes beside it is written."""
    figures, kept = document_of(answers, seed=seed)
    train, why = training_images(checkpoint)
    with train or nullcontext():
        sure = figures[
            "exact_match_interval" if isinstance(answers, LabelAnswers) else "accuracy_interval"
        ]
        what = "exact match" if isinstance(answers, LabelAnswers) else "accuracy"
        notes = few_images(figures["n"], interval=sure, what=what) | leaks(reader, train, why)
    images = ["mistakes.png"] if save_mistakes(reader, answers, out / "mistakes.png") else []
    if not isinstance(answers, LabelAnswers):
        save_confusion(figures["confusion"], reader.classes, out / "confusion.png")
        save_reliability(figures["reliability"], figures["ece"], out / "reliability.png")
        if images:
            save_confused(reader, answers, figures["confused"], out / "confused.png")
            images.append("confused.png")
        images = ["confusion.png", "reliability.png", *images]
    elif data_of(checkpoint, "val_path") == reader.path:
        notes["thresholds"] = (
            "they were chosen on these images, which flatters F1 and exact match; give others"
        )
    predictions = keep_predictions(out, kept, checkpoint, reader, seed=seed)
    return {**figures, **predictions, "notes": notes, "images": images}
