"""What evaluate.py does with a checkpoint: its figures, the images that go with them, and both as text for people."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading.dataset import Dataset
from metrics import GAN_IMAGES, PER_CLASS, SEARCHED
from metrics.classification.run import evaluate_classifier_run
from metrics.comparison.predictions import keep_predictions
from metrics.comparison.samples import SamplePredictions
from metrics.evaluate_gan import evaluate_generator, judge_images
from metrics.features.extractors import ClassifierFeatures, Extractor, Options, build, find_weights, fingerprint
from metrics.features.passes import shared_pass
from metrics.features.sets import select
from metrics.images import SampleBoard
from metrics.intervals import few_images, interval_of, wilson
from metrics.lineage import leaks, load_judge, training_images
from metrics.samples.class_score import class_score
from metrics.samples.copies import neighbour_images
from metrics.tables import classifier_table, heading, interval_words, note_lines
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from utils.checkpoint import Checkpoint, load, resolve
from utils.classes import require_same_classes
from utils.distributed import collectives
from utils.errors import UserError
from utils.images import save_captioned, save_rows
from utils.text import columns, decimal

CLASSIFIER_ONLY = ("robustness", "ood")


def evaluate_gan_run(checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace) -> dict[str, Any]:
    """Figures and images of a generator."""
    for name in CLASSIFIER_ONLY:
        if getattr(options, name):
            raise UserError(f"--{name} is for a classifier, this checkpoint is a GAN's; leave it out")
    with collectives.raising_together():
        if (options.precision, options.fold, options.tta) != ("fp32", False, "off"):
            raise UserError("--precision, --fold, --tta are for classifiers; a GAN's figures are float32's: drop them")
        device = collectives.choose_device(options.device)
        generator = generator_from(checkpoint, device)
        names = checkpoint["classes"] if generator.classes else []
        if names:
            require_same_classes("the generator", names, "the images", reader.classes)
        judge = load_judge(options.classifier, checkpoint, names, device, reader) if options.classifier else None
        train, why = training_images(checkpoint)
    extractors = collectives.main_first(lambda: build_extractors(options, reader.meta.channels, device, judge))
    if collectives.is_main():
        print(f"extractors: {', '.join(extractor.name for extractor in extractors)}", file=sys.stderr)
    board, kept = SampleBoard(names), SamplePredictions()

    def observe(images: Tensor, labels: Tensor, probabilities: Tensor | None) -> None:
        board.observe(images, labels, probabilities)
        kept.observe(images, labels, probabilities)

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
            observe=observe,
        )
        interval = interval_of(figures["recognised"], figures["n"])
        seen = None if judge is None or interval is None else judge_accuracy(judge, reader, figures["n"], options)

        def finish() -> dict[str, Any]:
            images = [*board.save(out), "real.png"]
            if train is not None and figures["memorisation"] is not None:
                pairs = neighbour_images(generator, train, figures["memorisation"], seed=options.seed)
                save_captioned(*pairs, out / "neighbours.png")
                images.append("neighbours.png")
            save_real(reader, names, board.columns, out / "real.png")
            notes = figures["notes"] | leaks(reader, train)
            notes |= {"floor": why, "memorisation": why} if why else {}
            notes |= few_images(figures["n"], interval=interval, distances=True)
            notes |= flattered(extractors, checkpoint.get("teachers", []))
            samples, source = kept.columns(figures["n"]), None if judge is None else fingerprint(judge)
            more = keep_predictions(out, samples, checkpoint, reader, seed=options.seed, judge=source)
            more |= {"recognised_interval": interval, "judge": seen, "notes": notes, "images": images}
            return figures | more

        return collectives.from_main_process(finish)


def flattered(extractors: Sequence[Extractor], teachers: Sequence[str]) -> dict[str, str]:
    """A note for each classifier in whose features samples look better than they are."""
    notes = {}
    for extractor in extractors:
        if extractor.source in teachers:
            note = "this classifier supplied a loss to the generator, whose distance in its features is flattered"
            notes[extractor.name] = note
        elif isinstance(extractor, ClassifierFeatures) and extractor.lineage["synthetic"]:
            note = "this classifier was trained on samples, which seem more real in its features than they are"
            notes[extractor.name] = note
    return notes


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
    """How many of n real test images, drawn by the seed, the judge predicts correctly: what `recognised` is worth; and
    the class score that they have.
    """
    chosen = select(reader.labels(), n=n, seed=options.seed, role="judge")

    def answers_to(rows: range) -> Tensor:
        return judge_images(judge, torch.from_numpy(reader.read(chosen.indices[rows.start : rows.stop])[0]))

    found = list(shared_pass(n, answers_to, side=reader.resolution, batch_size=options.batch_size))

    def figures() -> dict[str, Any]:
        answers = torch.cat(found)
        hits = int((answers.argmax(1) == torch.from_numpy(chosen.labels)).sum())
        score, interval = class_score(answers, seed=options.seed)
        shares = {"accuracy": hits / n, "accuracy_interval": wilson(hits, n), "n": n}
        return shares | {"class_score": score, "class_score_interval": interval}

    return collectives.from_main_process(figures)


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


GAN_FIGURES = {  # key of the document: its name in the table
    "recognised": "recognised",
    "clipped_density": "clipped density (fidelity)",
    "clipped_coverage": "clipped coverage",
    "precision": "precision",
    "recall": "recall",
    "density": "density",
    "coverage": "coverage",
    "intra_class_frechet": "frechet within classes",
    "class_score": "class score",
}


def gan_table(document: dict[str, Any]) -> str:
    """A generator's figures: distances with their floors, what was recognised, how varied the samples are."""
    digits = {"frechet": 3, "floor": 3, "kernel": 6, "kernel_floor": 6, "diversity_ratio": 3}
    distances = [
        [row["extractor"], *(with_error(row, key, count) for key, count in digits.items()), str(row["n"])]
        for row in document["distances"]
    ]
    figures = [
        [name, decimal(document[key]) + interval_words(document[f"{key}_interval"])]
        for key, name in GAN_FIGURES.items()
        if key == "recognised" or document.get(key) is not None
    ]
    place = f"  (smallest class; {document['diversity_extractor']})"
    figures.append(["diversity_ratio", with_error(document, "diversity_ratio") + place])
    if document["judge"] is not None:
        figures.insert(1, ["the judge itself", f"{decimal(document['judge']['accuracy'])}  of the real images"])
    if document.get("memorisation") is not None:
        figures.append(["memorisation", memorisation_line(document["memorisation"])])
    head = ["extractor", "frechet", "floor", "kernel", "floor", "diversity", "n"]
    parts = [heading(document), columns([head, *distances]), "", columns(figures, "<")]
    if document["diversity_by_class"] is not None:
        recognised = document["recognised_by_class"] or {}
        ratios = document["diversity_by_class"].items()
        within = document.get("intra_class_frechet_by_class") or {}
        rows = [[name, *map(decimal, (recognised.get(name), ratio, within.get(name)))] for name, ratio in ratios]
        parts += ["", columns([["class", "recognised", "diversity", "frechet"], *rows])]
    return "\n".join([*parts, *note_lines(document)])


def with_error(figures: dict[str, Any], key: str, digits: int = 4) -> str:
    """`36.345 +-0.263`: a figure and how far the upper end of its 95 % interval lies from it, if it has one."""
    value, interval = figures[key], figures.get(f"{key}_interval")
    if value is None or interval is None:
        return decimal(value, digits)
    return f"{decimal(value, digits)} +-{decimal(interval[1] - value, digits)}"


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
