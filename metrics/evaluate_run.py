"""What evaluate.py does with a checkpoint: its figures, the images that go with them, and both as text for people."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.reading.dataset import Dataset
from metrics.comparison.predictions import keep_predictions
from metrics.evaluate_classifier import evaluate_classifier_run
from metrics.evaluate_gan import gather, judge_images
from metrics.features.extractors import ClassifierFeatures, Extractor, Options, build, find_weights, fingerprint
from metrics.features.passes import shared_pass
from metrics.features.sets import select
from metrics.images import SampleBoard
from metrics.intervals import Measured
from metrics.lineage import leaks, load_judge, training_images
from metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from metrics.samples.copies import neighbour_images
from metrics.samples.judged import class_score
from metrics.tables import classifier_table, few_images, gan_table
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from utils.checkpoint import Checkpoint, load, resolve
from utils.classes import require_same_classes
from utils.distributed import collectives
from utils.errors import UserError
from utils.images import save_captioned, save_rows

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
    board = SampleBoard(names)
    with train or nullcontext():
        gathered = gather(
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
        samples = gathered.samples[0]
        seen = judge_accuracy(judge, reader, samples.n, options) if judge is not None and names else None

        def finish() -> dict[str, Any]:
            document = gathered.document(details=True)
            images = [*board.save(out), "real.png"]
            if train is not None and document["memorisation"] is not None:
                pairs = neighbour_images(generator, train, document["memorisation"], seed=options.seed)
                save_captioned(*pairs, out / "neighbours.png")
                images.append("neighbours.png")
            save_real(reader, names, board.columns, out / "real.png")
            notes = document["notes"] | leaks(reader, train)
            notes |= {"floor": why, "memorisation": why} if why else {}
            notes |= few_images(samples.n, interval=document["recognised_interval"], distances=True)
            notes |= flattered(extractors, checkpoint.get("teachers", []))
            columns = {"label": samples.labels[: samples.n].numpy()}
            if samples.probabilities is not None:
                confidence, predicted = samples.probabilities.max(1)
                columns |= {"prediction": predicted.numpy(), "confidence": confidence.numpy()}
            source = None if judge is None else fingerprint(judge)
            kept = keep_predictions(out, columns, checkpoint, reader, seed=options.seed, judge=source)
            return document | kept | {"judge": seen, "notes": notes, "images": images}

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
    how: dict[str, int] = {"side": reader.resolution, "batch_size": options.batch_size}
    parts = list(shared_pass(n, lambda rows: judge_images(judge, chosen.images(reader, rows)), **how))

    def figures() -> dict[str, Any]:
        answers = torch.cat(parts)
        hits = Measured.share(answers.argmax(1) == torch.from_numpy(chosen.labels))
        score = class_score(answers)
        shares = {"accuracy": hits.value, "accuracy_interval": hits.interval, "n": n}
        return shares | {"class_score": score.value, "class_score_interval": score.interval}

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


Evaluate = Callable[[Checkpoint, Dataset, Path, Namespace], dict[str, Any]]
TASKS: dict[str, tuple[Evaluate, Callable[[dict[str, Any]], str]]] = {
    "gan": (evaluate_gan_run, gan_table),
    "classifier": (evaluate_classifier_run, classifier_table),
}
