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
from metrics.evaluate_audit import audit_gan_run
from metrics.evaluate_classifier import evaluate_classifier_run
from metrics.evaluate_gan import gather, judge_images
from metrics.features.extractors import Extractor, build_extractors, fingerprint
from metrics.features.passes import shared_pass
from metrics.features.sets import select
from metrics.images import SampleBoard
from metrics.intervals import Measured
from metrics.lineage import leaks, load_judge, training_images
from metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from metrics.samples.copies import neighbour_images
from metrics.samples.judged import class_score
from metrics.samples.membership_inference import audit_table
from metrics.tables import classifier_table, few_images, gan_table
from models.classifier import Classifier
from models.restore import generator_from
from utils.checkpoint import Checkpoint
from utils.classes import require_same_classes
from utils.distributed import collectives
from utils.errors import UserError
from utils.images import save_captioned, save_rows
from utils.provenance import Lineage, recorded

SPEED = {"precision": "fp32", "fold": False, "tta": "off"}
NOT_FOR = {  # what is evaluated: options that it does not take and their defaults, and whose they are
    "gan": (SPEED | {"robustness": False, "ood": None}, "for a classifier, this checkpoint is a GAN's"),
    "classifier": (
        {"audit": False} | dict.fromkeys(("classifier", "extractor", "weights", "per_class", "searched")),
        "for a GAN, this checkpoint is a classifier's",
    ),
    "audit": (SPEED | dict.fromkeys(("classifier", "per_class")), "not for --audit"),
}


def check_options(options: Namespace, task: str) -> str:
    """What is evaluated, a key of EVALUATIONS. Raises UserError for an option that is not for it."""
    kind = "audit" if options.audit and task == "gan" else task
    unwanted, whose = NOT_FOR[kind]
    for name, default in unwanted.items():
        if getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} is {whose}; leave it out")
    return kind


def evaluate_gan_run(checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace) -> dict[str, Any]:
    """Figures and images of a generator."""
    with collectives.raising_together():
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
    board, learnt_from = SampleBoard(names), recorded(checkpoint)
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
            notes |= flattered(extractors, learnt_from)
            if judge is not None and judge.lineage.related(learnt_from):
                notes["judge"] = "a classifier that supplied a loss to the generator began with the same weights"
            columns = {"label": samples.labels[: samples.n].numpy()}
            if samples.probabilities is not None:
                confidence, predicted = samples.probabilities.max(1)
                columns |= {"prediction": predicted.numpy(), "confidence": confidence.numpy()}
            source = None if judge is None else fingerprint(judge)
            kept = keep_predictions(out, columns, checkpoint, reader, seed=options.seed, judge=source)
            return document | kept | {"judge": seen, "notes": notes, "images": images}

        return collectives.from_main_process(finish)


def flattered(extractors: Sequence[Extractor], generator: Lineage) -> dict[str, str]:
    """A note for each extractor in whose features samples look better than they are."""
    notes = {}
    for extractor in extractors:
        if extractor.source in generator.teachers:
            why = "this classifier supplied a loss to the generator, whose distance in its features is flattered"
        elif extractor.lineage.synthetic:
            why = "this classifier was trained on samples, which seem more real in its features than they are"
        elif extractor.lineage.related(generator):
            why = "a classifier that supplied a loss to the generator began with the same weights: it may be flattered"
        else:
            continue
        notes[extractor.name] = why
    return notes


def judge_accuracy(judge: Classifier, reader: Dataset, n: int, options: Namespace) -> dict[str, Any]:
    """How many of n real test images, drawn by the seed, the judge predicts correctly: what `recognised` is worth; and
    the class score that they have.
    """
    chosen = select(reader.labels(), n=n, seed=options.seed, role="judge")
    work = lambda rows: judge_images(judge, chosen.images(reader, rows))  # noqa: E731
    parts = list(shared_pass(n, work, side=reader.resolution, batch_size=options.batch_size))

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
EVALUATIONS: dict[str, tuple[Evaluate, Callable[[dict[str, Any]], str]]] = {  # and its table for people
    "gan": (evaluate_gan_run, gan_table),
    "classifier": (evaluate_classifier_run, classifier_table),
    "audit": (audit_gan_run, audit_table),
}
