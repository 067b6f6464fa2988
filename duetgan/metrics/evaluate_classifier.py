"""Evaluate a classifier on labelled images, which the processes (ranks) share.

The functions below the comment `evaluate.py` write the results and pictures of that script.
"""

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.metrics.classification.answers import (
    Answers,
    confused_pairs,
    judged_temperature,
    per_class,
    reliability,
)
from duetgan.metrics.classification.labels import LabelAnswers, best_thresholds
from duetgan.metrics.features.extractors import classifier_input, shared_pass
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.figures import CLASSIFIER, LABELS, measured
from duetgan.metrics.images import (
    save_confusion,
    save_evidence,
    save_mistakes,
    save_reliability,
)
from duetgan.metrics.lineage import TOLERATED, data_of, leaks, overlap, training_images
from duetgan.metrics.protocol import Document
from duetgan.metrics.tables import few_images
from duetgan.models.classifier import Classifier
from duetgan.models.fast import faster
from duetgan.models.restore import NETWORKS, classifier_from
from duetgan.utils import extras
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.seeding import numpy_generator

Finish = Callable[[Document, Answers], None]
"""A function that rank 0 calls to add a further measurement to an evaluation's results."""
# Functions of extras that make further measurements for evaluate.py. All ranks call each function
# before the test images are classified. It returns None if its measurement was not requested.
MEASUREMENTS: list[Callable[[Classifier, Checkpoint, Dataset, Path, Namespace], Finish | None]] = []


def logits_of(classifier: Classifier, images: Tensor) -> Tensor:
    """Return the logits float32 [n, K], on the CPU, of unnormalised images [n, C, H, W].

    `classifier_input` first converts the images to the format that the classifier takes. Raises
    UserError if a logit is not finite.
    """
    with evaluating(classifier), full_float32(device_of(classifier)):
        logits = classifier(classifier_input(classifier, images)).float().cpu()
    if not torch.isfinite(logits).all():
        raise UserError("the classifier's outputs are not finite; take an earlier checkpoint")
    return logits


def classify(
    # not wrapped in DDP, which would wait for ranks that have fewer chunks
    classifier: Classifier,
    dataset: Dataset,
    *,
    batch_size: int = 256,
    records: np.ndarray | None = None,  # record numbers, int64 [n]; None means all images
    progress: str = "",  # caption of the progress bar; if empty, there is no bar
) -> Tensor:
    """Classify images and return their logits, in the order of `records`.

    Rank 0 gets float32 [n, K], other ranks get [0, K]. All ranks must call this function.
    """
    records = np.arange(len(dataset)) if records is None else records

    def work(rows: range) -> Tensor:
        return logits_of(classifier, read_batch(dataset, records[rows.start : rows.stop]).images)

    parts = shared_pass(
        len(records), work, side=dataset.spec.side, batch_size=batch_size, progress=progress
    )
    return torch.cat([torch.empty(0, classifier.classes), *parts])


def answers_of(
    classifier: Classifier, dataset: Dataset, logits: Tensor, records: np.ndarray | None = None
) -> Answers:
    """Return the logits [n, K] of images, joined with the labels of these images.

    The result is a `LabelAnswers` if images may have several labels, else an `Answers`. `records`
    are the record numbers of the images, int64 [n]; None means all images of the dataset.
    """
    records = np.arange(len(dataset)) if records is None else records
    if classifier.thresholds is not None:
        labels = torch.from_numpy(dataset.meta.multi_hot[dataset.label_numbers()[records]])
        return LabelAnswers(
            logits, labels, dataset.classes, classifier.thresholds.cpu(), records=records
        )
    return Answers(
        logits,
        torch.from_numpy(dataset.labels()[records].astype(np.int64)),
        dataset.classes,
        records=records,
    )


def draw_records(dataset: Dataset, n: int | None, seed: int) -> np.ndarray:
    """Draw n record numbers and return them in ascending order; all record numbers if n is None.

    The random key is (seed, "eval", "classifier"). The first n records would not be a fair choice,
    because files are often packed class by class.
    """
    return np.sort(numpy_generator(seed, "eval", "classifier").permutation(len(dataset))[:n])


def check_classes(classifier: Classifier, dataset: Dataset) -> None:
    """Raise UserError unless the images' labels fit the classifier.

    Images and classifier must have the same number of classes. Either both or neither must allow
    several labels per image.
    """
    classes = len(dataset.classes)
    refuse(
        (not classes, "the images to evaluate on have no labels; give a labelled file with --data"),
        (
            classes != classifier.classes,
            f"the images have {classes} classes, the classifier {classifier.classes}; give its own data",
        ),
        (
            (dataset.meta.sets is None) != (classifier.thresholds is None),
            f"{dataset.path}: images and classifier differ in whether an image may have several labels",
        ),
    )


def evaluate_classifier(
    classifier: Classifier, dataset: Dataset, *, batch_size: int, details: bool
) -> Document:
    """Compute a classifier's metrics over all images of a dataset; return them by key.

    The ranks share the images, and all ranks return the same metrics. If `details` is False, only
    the metrics that are logged during training are computed. In that case, a classifier that
    predicts several labels first gets new thresholds, those of `best_thresholds` for these images.

    Raises:
        UserError: If labels and classifier do not fit (`check_classes`), there is no image, or an
            output is not finite.
    """
    check_classes(classifier, dataset)
    figures = CLASSIFIER if classifier.thresholds is None else LABELS
    rows = [row for row in figures if details or row.in_training]
    logits = classify(classifier, dataset, batch_size=batch_size)
    # during training, thresholds are chosen on the validation images, which `dataset` has
    if not details and (thresholds := classifier.thresholds) is not None:
        best = collectives.from_main_process(
            lambda: best_thresholds(answers_of(classifier, dataset, logits))
        )
        thresholds.copy_(torch.tensor(best))
    return collectives.from_main_process(
        lambda: measured(rows, answers_of(classifier, dataset, logits), {})
    )


def calibrate(checkpoint: Checkpoint, dataset: Dataset, *, batch_size: int) -> Document:
    """Fit a temperature on held-out images, and store it in the checkpoint's state.

    The new temperature replaces an earlier one. Returns the results of `judged_temperature`.

    Raises:
        UserError: If the classifier gives several labels, labels and classifier do not fit
            (`check_classes`), there are fewer than 4 images, or the network was trained on more
            than the fraction TOLERATED of the images.
    """
    state = checkpoint["state"][NETWORKS["classifier"]]
    state.pop("temperature", None)
    classifier = classifier_from(checkpoint)
    check_classes(classifier, dataset)
    train, _ = training_images(checkpoint)
    with train or nullcontext():
        if train is not None and (count := overlap(dataset, train)) > TOLERATED * len(dataset):
            raise UserError(
                f"{dataset.path}: {count} of {len(dataset)} images were trained on; a temperature "
                "needs held-out images: give some with --data"
            )
    logits = classify(classifier, dataset, batch_size=batch_size, progress="images")
    fitted = judged_temperature(answers_of(classifier, dataset, logits), seed=0)
    if fitted is None:
        raise UserError(f"{dataset.path}: a temperature needs at least 4 images; give more")
    state["temperature"] = torch.tensor(fitted["value"])
    return fitted


# --- evaluate.py


def evaluate_classifier_run(
    checkpoint: Checkpoint, dataset: Dataset, out: Path, options: Namespace
) -> Document:
    """Evaluate a classifier for evaluate.py: return the results, write pictures into `out`."""
    speed = {"precision": options.precision, "fold": options.fold, "tta": options.tta}
    with collectives.raising_together():
        device = collectives.choose_device(options.device)
        restored = classifier_from(checkpoint, device, several=True)
        classifier = faster(restored, device, **speed)
        if dataset.classes:
            require_same_classes(
                "the classifier", checkpoint["classes"], "the images", dataset.classes
            )
        check_classes(classifier, dataset)
    records = draw_records(dataset, options.n, options.seed)
    further = [measure(classifier, checkpoint, dataset, out, options) for measure in MEASUREMENTS]
    logits = classify(
        classifier, dataset, batch_size=options.batch_size, records=records, progress="images"
    )

    def finish() -> Document:
        answers = answers_of(classifier, dataset, logits, records)
        document = speed | _write_evaluation(checkpoint, dataset, out, answers, options.seed)
        if not isinstance(answers, LabelAnswers):
            saved = save_evidence(restored, dataset, answers, out / "evidence.png")
            document["images"] += ["evidence.png"] * saved
        if probe := checkpoint["state"].get("probe"):
            document["probe"] = probe
            low, high = probe["interval"]
            document["notes"]["probe"] = (
                f"training began with a logistic regression on the features, of accuracy "
                f"{probe['accuracy']:.3f} ({low:.3f} to {high:.3f}) by cross-validation"
            )
        for finish_measurement in filter(None, further):
            finish_measurement(document, answers)
        return document

    return collectives.from_main_process(finish)


def document_of(answers: Answers, *, seed: int) -> Document:
    """Return a classifier's metrics, ready for JSON.

    `seed` decides how images are split into the two halves on which the temperature is tested.
    """
    classes = per_class(answers)
    figures: Document = {"n": len(answers.labels)}
    for row in LABELS if isinstance(answers, LabelAnswers) else CLASSIFIER:
        result = row.measure(answers)
        figures |= row.keys(result, answers.names)
        for values, value in zip(classes.values(), result.by_class, strict=False):
            values[row.key] = value
    figures["per_class"] = classes
    if isinstance(answers, LabelAnswers):
        for values, threshold in zip(classes.values(), answers.thresholds.tolist(), strict=True):
            values["threshold"] = threshold
        return figures
    return figures | {
        "majority_class_rate": float(answers.confusion.sum(1).max() / len(answers.labels)),
        "reliability": reliability(answers),
        "confusion": answers.confusion.tolist(),
        "temperature": judged_temperature(answers, seed=seed),
        "confused": confused_pairs(answers),
    }


def _write_evaluation(
    checkpoint: Checkpoint, dataset: Dataset, out: Path, answers: Answers, seed: int
) -> Document:
    """Write pictures into `out`; return the results, whose key `images` lists the pictures."""
    figures = document_of(answers, seed=seed)
    train, reason = training_images(checkpoint)
    with train or nullcontext():
        metric = "exact match" if isinstance(answers, LabelAnswers) else "accuracy"
        interval = figures[f"{metric.replace(' ', '_')}_interval"]
        notes = few_images(figures["n"], interval=interval, metric=metric)
        notes |= leaks(dataset, train, reason)
    images = ["mistakes.png"] if save_mistakes(dataset, answers, out / "mistakes.png") else []
    if not isinstance(answers, LabelAnswers):
        save_confusion(figures["confusion"], dataset.classes, out / "confusion.png")
        save_reliability(figures["reliability"], figures["ece"], out / "reliability.png")
        images = ["confusion.png", "reliability.png", *images]
    elif data_of(checkpoint, "val_path") == dataset.path:
        notes["thresholds"] = (
            "they were chosen on these images, which flatters F1 and exact match; give others"
        )
    return {**figures, "notes": notes, "images": images}


extras.attach(__name__)
