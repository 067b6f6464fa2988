"""What evaluate.py does with a classifier's checkpoint: its figures, what it keeps of every image, and images."""

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading.dataset import Dataset, dataset_for_model
from metrics.classification.figures import further_figures, outliers, robustness
from metrics.classification.passes import corrupted_hits, outlier_logits
from metrics.comparison.predictions import keep_predictions
from metrics.evaluate_classifier import evaluate_classifier
from metrics.images import save_confused, save_confusion, save_corruptions, save_mistakes, save_reliability
from metrics.intervals import few_images
from metrics.lineage import leaks, training_images
from models.fast import faster
from models.restore import classifier_from
from utils.checkpoint import Checkpoint
from utils.classes import require_same_classes
from utils.distributed import collectives
from utils.errors import UserError

GAN_ONLY = ("classifier", "extractor", "weights", "per_class", "searched")


def evaluate_classifier_run(checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace) -> dict[str, Any]:
    """Figures and images of a classifier."""
    for name in GAN_ONLY:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is for a GAN, this checkpoint is a classifier's; leave it out")
    speed = {"precision": options.precision, "fold": options.fold, "tta": options.tta}
    with collectives.raising_together():
        device = collectives.choose_device(options.device)
        classifier = faster(classifier_from(checkpoint, device), device, **speed)
        if reader.classes:
            require_same_classes("the classifier", checkpoint["classes"], "the images", reader.classes)
        others = open_others(options.ood, checkpoint, reader) if options.ood else None
    how: dict[str, Any] = {"limit": options.n, "batch_size": options.batch_size}
    logits: list[Tensor] = []
    with others or nullcontext():
        counted = evaluate_classifier(classifier, reader, **how, show=True, kept=logits) | speed
        hits = corrupted_hits(classifier, reader, seed=options.seed, **how) if options.robustness else None
        outside = outlier_logits(classifier, others, **how) if others else None

    def finish() -> dict[str, Any]:
        document = _written(checkpoint, reader, out, counted, torch.cat(logits), options.seed)
        if hits is not None:
            document["robustness"] = robustness(hits, counted["n"], reader.resolution)
            save_corruptions(reader.read([0])[0][0], out / "robustness.png", seed=options.seed)
            document["images"].append("robustness.png")
        if others is not None and outside is not None:
            document["ood"] = {"data": others.path, **outliers(torch.cat(logits), outside)}
        return document

    return collectives.from_main_process(finish)


def open_others(path: str, checkpoint: Checkpoint, reader: Dataset) -> Dataset:
    """The images that are to be told from the test images: of any classes, size and channels, but not the same file."""
    others = dataset_for_model(path, {"config": {}, "shape": checkpoint["shape"]})
    if others.meta.content_hash == reader.meta.content_hash:
        raise UserError(f"--ood {path}: these are the test images themselves; give images of another kind")
    if not len(others):
        raise UserError(f"--ood {path}: there is no image in it; give another file")
    return others


def _written(
    checkpoint: Checkpoint, reader: Dataset, out: Path, counted: dict[str, Any], logits: Tensor, seed: int
) -> dict[str, Any]:
    """The document, once everything that goes beside it is written."""
    labels = torch.from_numpy(reader.labels()[: counted["n"]].copy())
    further, kept = further_figures(counted, logits, labels, seed=seed)
    figures = counted | further
    train, _ = training_images(checkpoint)
    with train or nullcontext():
        notes = few_images(figures["n"], interval=figures["accuracy_interval"]) | leaks(reader, train)
    images = _images(reader, figures, kept, out)
    predictions = keep_predictions(out, kept, checkpoint, reader, seed=seed)
    return {**figures, **predictions, "notes": notes, "images": images}


def _images(reader: Dataset, figures: dict[str, Any], kept: dict[str, np.ndarray], out: Path) -> list[str]:
    """Write the images that go with the figures; returns their names."""
    save_confusion(figures["confusion"], reader.classes, out / "confusion.png")
    save_reliability(figures["reliability"], figures["ece"], out / "reliability.png")
    images = ["confusion.png", "reliability.png"]
    judged = kept["label"], kept["prediction"], kept["confidence"]
    if save_mistakes(reader, *judged, out / "mistakes.png"):
        save_confused(reader, *judged, figures["confused"], out / "confused.png")
        images += ["mistakes.png", "confused.png"]
    return images
