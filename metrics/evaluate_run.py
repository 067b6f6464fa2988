"""What evaluate.py does with a checkpoint: its figures, the images that go with them, and both as text for people."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.dataset import Dataset, dataset_for_model
from metrics.copies import neighbour_images
from metrics.evaluate_classifier import evaluate_classifier
from metrics.evaluate_gan import evaluate_generator, judge_images
from metrics.evidence import few_images, interval_of, leaks, wilson
from metrics.extractors import ClassifierFeatures, Extractor, Options, build, find_weights
from metrics.features import select
from metrics.images import MistakeBoard, SampleBoard, save_confusion
from metrics.judge import load_judge
from metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from utils.checkpoint import Checkpoint, load, resolve
from utils.classes import require_same_classes
from utils.distributed.collectives import choose_device
from utils.errors import UserError
from utils.image_tables import save_captioned, save_rows
from utils.text import columns, decimal

GAN_ONLY = ("classifier", "extractor", "weights", "per_class", "searched")


def evaluate_classifier_run(checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace) -> dict[str, Any]:
    """Figures and images of a classifier."""
    for name in GAN_ONLY:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is for a GAN, this checkpoint is a classifier's; leave it out")
    classifier = classifier_from(checkpoint, choose_device(options.device))
    classes = reader.classes
    if classes:
        require_same_classes("the classifier", checkpoint["classes"], "the images", classes)
    board = MistakeBoard(classes)
    figures = evaluate_classifier(
        classifier,
        reader,
        batch_size=options.batch_size,
        limit=options.n,
        show=True,
        observe=board.observe,
    )
    save_confusion(figures["confusion"], classes, out / "confusion.png")
    interval = interval_of(figures["accuracy"], figures["n"])
    train, _ = training_images(checkpoint)
    with train or nullcontext():
        notes = few_images(figures["n"], interval=interval) | leaks(reader, train)
    figures |= {"accuracy_interval": interval, "notes": notes}
    return {**figures, "images": ["confusion.png", *board.save(out)]}


def evaluate_gan_run(checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace) -> dict[str, Any]:
    """Figures and images of a generator."""
    device = choose_device(options.device)
    generator = generator_from(checkpoint, device)
    names = checkpoint["classes"] if generator.classes else []
    if names:
        require_same_classes("the generator", names, "the images", reader.classes)
    judge = load_judge(options.classifier, checkpoint, names, device, reader) if options.classifier else None
    extractors = build_extractors(options, reader.meta.channels, device, judge)
    print(f"extractors: {', '.join(extractor.name for extractor in extractors)}", file=sys.stderr)
    train, why = training_images(checkpoint)
    board = SampleBoard(names)
    with train or nullcontext():
        figures = evaluate_generator(
            generator,
            reader,
            n=options.n or GAN_IMAGES,
            seed=options.seed,
            extractors=extractors,
            classifier=judge,
            train_reader=train,
            per_class=options.per_class or PER_CLASS,
            searched=SEARCHED if options.searched is None else options.searched,
            batch_size=options.batch_size,
            show=True,
            observe=board.observe,
        )
        images = [*board.save(out), "real.png"]
        if train is not None and figures["memorisation"] is not None:
            pairs = neighbour_images(generator, train, figures["memorisation"], seed=options.seed)
            save_captioned(*pairs, out / "neighbours.png")
            images.append("neighbours.png")
        figures["notes"] |= leaks(reader, train)
    if why:
        figures["notes"] |= {"floor": why, "memorisation": why}
    interval = interval_of(figures["recognised"], figures["n"])
    figures["notes"] |= few_images(figures["n"], interval=interval, distances=True)
    seen = None if judge is None or interval is None else judge_accuracy(judge, reader, figures["n"], options)
    figures |= {"recognised_interval": interval, "judge": seen}
    teachers = checkpoint.get("teachers", [])
    for extractor in extractors:
        if extractor.source in teachers:
            note = "this classifier supplied a loss to the generator, whose distance in its features is flattered"
            figures["notes"][extractor.name] = note
        elif isinstance(extractor, ClassifierFeatures) and extractor.lineage["synthetic"]:
            note = "this classifier was trained on samples, which seem more real in its features than they are"
            figures["notes"][extractor.name] = note
    save_real(reader, names, board.columns, out / "real.png")
    return {**figures, "images": images}


def build_extractors(
    options: Namespace, channels: int, device: torch.device, judge: Classifier | None
) -> list[Extractor]:
    """The named extractors; the judge is not loaded a second time."""
    given = options.classifier

    def load_classifier(run: str) -> Classifier:
        return judge if judge is not None and run == given else classifier_from(load(resolve(run)), device)

    how = {"device": device, "channels": channels, "weights": options.weights, "classifier": given}
    return build(named_extractors(options), Options(**how, load_classifier=load_classifier))


def named_extractors(options: Namespace) -> list[str]:
    """The extractors that were asked for, else those that can be had without asking."""
    if options.extractor:
        return [name.strip() for text in options.extractor for name in text.split(",")]
    names = ["classifier"] if options.classifier else []
    if find_weights(options.weights) is not None:
        names.append("resnet50")
    if not names:
        raise UserError(
            "no feature extractor is available; give --classifier RUN, or a ResNet-50 weights file with --weights, "
            "or --extractor pixels for a rough figure"
        )
    return names


def judge_accuracy(judge: Classifier, reader: Dataset, n: int, options: Namespace) -> dict[str, Any]:
    """How many of n real test images, drawn by the seed, the judge predicts correctly: what `recognised` is worth."""
    chosen = select(reader.labels(), n=n, seed=options.seed, role="judge")
    hits, size = 0, options.batch_size
    for start in range(0, n, size):
        images, labels = reader.read(chosen.indices[start : start + size])
        predicted = judge_images(judge, torch.from_numpy(images)).argmax(1)
        hits += int((predicted == torch.as_tensor(labels)).sum())
    return {"accuracy": hits / n, "accuracy_interval": wilson(hits, n), "n": n}


def training_images(checkpoint: Checkpoint) -> tuple[Dataset | None, str]:
    """The images the generator was trained on, the second real set of the floor; or None and the reason."""
    path = checkpoint["config"].get("data", {}).get("path")
    if not path:
        return None, "the run's config names no data.path to be the second real set"
    try:
        return dataset_for_model(path, checkpoint), ""
    except UserError as error:
        return None, f"the training images cannot be the second real set: {error}"


def save_real(reader: Dataset, names: Sequence[str], columns: int, path: Path) -> None:
    """Write a grid of real test images, laid out like the grid of samples."""
    labels = reader.labels() if names else np.zeros(len(reader), dtype=np.int64)
    most = columns if names else columns * columns
    rows = []
    for label in range(max(1, len(names))):
        images, _ = reader.read(np.flatnonzero(labels == label)[:most])
        rows.append(list(torch.from_numpy(images)))
    save_rows(rows, path, columns=columns, captions=names)


# --- for people


def _heading(document: dict[str, Any]) -> str:
    what = f"{document['checkpoint']} (step {document['step']}, {document['task']})"
    return f"{what}\non {document['n']} images of {document['data']}, seed {document['seed']}\n"


def classifier_table(document: dict[str, Any]) -> str:
    """A classifier's figures, then those of each class."""
    names = {"accuracy": "accuracy", "top5_accuracy": "top-5 accuracy", "ece": "calibration error (ECE)"}
    figures = [(name, decimal(document[key])) for key, name in names.items() if document[key] is not None]
    figures[0] = ("accuracy", decimal(document["accuracy"]) + interval_words(document["accuracy_interval"]))
    measures = ("precision", "recall", "f1")
    classes = [
        [name, *(decimal(row[key]) for key in measures), str(row["support"])]
        for name, row in document["per_class"].items()
    ]
    per_class = columns([["class", "precision", "recall", "F1", "images"], *classes])
    return "\n".join([_heading(document), columns(figures, "<"), "", per_class, *_notes(document)])


def gan_table(document: dict[str, Any]) -> str:
    """A generator's figures: distances with their floors, what was recognised, how varied the samples are."""
    digits = {"frechet": 3, "floor": 3, "kernel": 6, "kernel_floor": 6, "diversity_ratio": 3}
    distances = [
        [row["extractor"], *(decimal(row[key], count) for key, count in digits.items()), str(row["n"])]
        for row in document["distances"]
    ]
    figures = [
        ["recognised", decimal(document["recognised"]) + interval_words(document["recognised_interval"])],
        [
            "diversity_ratio",
            f"{decimal(document['diversity_ratio'])}  (smallest class; {document['diversity_extractor']})",
        ],
    ]
    if document["judge"] is not None:
        figures.insert(1, ["the judge itself", f"{decimal(document['judge']['accuracy'])}  of the real images"])
    if document.get("memorisation") is not None:
        figures.append(["memorisation", memorisation_line(document["memorisation"])])
    head = ["extractor", "frechet", "floor", "kernel", "floor", "diversity", "n"]
    parts = [_heading(document), columns([head, *distances]), "", columns(figures, "<")]
    if document["diversity_by_class"] is not None:
        recognised = document["recognised_by_class"] or {}
        ratios = document["diversity_by_class"].items()
        rows = [[name, decimal(recognised.get(name)), decimal(ratio)] for name, ratio in ratios]
        parts += ["", columns([["class", "recognised", "diversity"], *rows])]
    return "\n".join([*parts, *_notes(document)])


def _notes(document: dict[str, Any]) -> list[str]:
    return [f"{key}: {note}" for key, note in document["notes"].items()]


def interval_words(interval: list[float] | None) -> str:
    """`  (95 %: 0.8541 to 0.8799)`, nothing where there is no interval."""
    return "" if interval is None else f"  (95 %: {decimal(interval[0])} to {decimal(interval[1])})"


def memorisation_line(copies: dict[str, Any]) -> str:
    """What the search for copies found, in one line."""
    verdict = "COPIES TRAINING IMAGES" if copies["copies"] else "no sign of copies"
    return (
        f"{verdict} (p {copies['p_value']:.2g}): {copies['share']:.1%} of the samples unusually near to training "
        f"images, {copies['expected']:.1%} expected; C_T {decimal(copies['c_t'], 1)} ({copies['extractor']}, "
        f"{copies['searched']} training images searched)"
    )


Evaluate = Callable[[Checkpoint, Dataset, Path, Namespace], dict[str, Any]]
TASKS: dict[str, tuple[Evaluate, Callable[[dict[str, Any]], str]]] = {
    "gan": (evaluate_gan_run, gan_table),
    "classifier": (evaluate_classifier_run, classifier_table),
}
