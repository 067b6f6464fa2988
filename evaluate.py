"""Evaluate a checkpoint by the protocol in docs/evaluation.md: figures into metrics.json, images beside it."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.dataset import Dataset, dataset_for_model
from metrics.copies import SEARCHED, neighbour_images
from metrics.diversity import IMAGES
from metrics.evaluate_classifier import evaluate_classifier
from metrics.evaluate_gan import evaluate_generator
from metrics.extractors import Extractor, Options, build, fingerprint
from metrics.images import MistakeBoard, SampleBoard, save_confusion
from metrics.resnet50 import find_weights
from metrics.tables import classifier_table, gan_table
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from reporting.report import write_report
from utils.arguments import add_model_options, positive
from utils.checkpoint import load, resolve
from utils.classes import require_same_classes
from utils.cli import Parser
from utils.distributed.collectives import choose_device
from utils.errors import UserError, run_cli
from utils.files import check_writable, write_atomic
from utils.image_tables import save_captioned, save_rows
from utils.progress import Bars

GAN_IMAGES = 5000  # n of a distance unless the real sets are smaller
GAN_ONLY = ("classifier", "extractor", "weights", "per_class", "searched")


@dataclass(frozen=True)
class Job:
    """One evaluation: what is evaluated on what, where the results go, and how."""

    checkpoint: dict[str, Any]
    reader: Dataset
    out: Path
    options: argparse.Namespace
    device: torch.device
    progress: Bars


def parser() -> Parser:
    """The options of this script."""
    options = Parser(prog="evaluate.py", description=__doc__)
    add = options.add_argument
    add_model_options(options)
    add("--data", metavar="X.lmdb", help="test images (default: data.val_path of the run's config)")
    add("--out", metavar="D", help="folder for the results (default: RUN/eval)")
    add("--n", type=positive, help=f"images to evaluate on (default: all; for a GAN at most {GAN_IMAGES})")
    add("--seed", type=int, default=0, help="of samples and draws (default: 0)")
    add("--json", action="store_true", help="print metrics.json instead of a table; logs go to stderr")
    add("--classifier", metavar="RUN_OR_FILE", help="GAN: independent classifier that judges the samples")
    extractors = "GAN: classifier, classifier:RUN_OR_FILE, resnet50, inception or pixels; repeat it or use commas "
    default = "(default: classifier if one is given, resnet50 if its weights are there)"
    add("--extractor", action="append", metavar="NAME", help=extractors + default)
    add("--weights", metavar="FILE", help="GAN: weights of resnet50 or inception (default for resnet50: $DUET_WEIGHTS)")
    add("--per-class", type=positive, help=f"GAN: images of a class for the diversity (default: {IMAGES})")
    searched = f"GAN: training images that are searched for copies; 0: none (default: at most {SEARCHED:,})"
    add("--searched", type=not_negative, metavar="N", help=searched)
    return options


def main(argv: list[str]) -> int:
    """Evaluate, write the results, print them."""
    options = parser().parse_args(argv)
    path = resolve(options.checkpoint, options.which)
    checkpoint = load(path)
    out = Path(options.out) if options.out else run_folder(path) / "eval"
    data = options.data or (checkpoint["config"].get("data") or {}).get("val_path")
    if not data:
        raise UserError(f"{path}: its config names no data.val_path; give the test images with --data X.lmdb")
    if checkpoint["task"] not in TASKS:
        raise UserError(f"{path}: its task {checkpoint['task']!r} is none of {', '.join(TASKS)}; update Duet")
    evaluate, table = TASKS[checkpoint["task"]]
    check_writable(out)
    with images_for(checkpoint, data) as reader:
        job = Job(checkpoint, reader, out, options, choose_device(options.device), Bars())
        figures = evaluate(job)
    head = {"checkpoint": str(path), "step": checkpoint["step"], "task": checkpoint["task"], "data": str(data)}
    document = {**head, "seed": options.seed, **figures}
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomic(out / "metrics.json", f"{text}\n".encode())
    command = shlex.join(["python", "evaluate.py", *argv])
    write_atomic(out / "command.txt", f"{command}\n".encode())  # not in the document, which depends on the model alone
    print(text if options.json else table(document))
    print(f"wrote metrics.json, {', '.join(document['images'])} into {out}", file=sys.stderr)
    if options.out is None and (run_folder(path) / "config.yaml").is_file():
        print(f"report: {write_report(run_folder(path))}", file=sys.stderr)
    return 0


def not_negative(text: str) -> int:
    """A whole number that is 0 or more."""
    return 0 if text == "0" else positive(text)


def run_folder(checkpoint: Path) -> Path:
    """The run that a checkpoint file belongs to; for a file outside a run the folder that it lies in."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def evaluate_classifier_run(job: Job) -> dict[str, Any]:
    """Figures and images of a classifier."""
    for name in GAN_ONLY:
        if getattr(job.options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is for a GAN, this checkpoint is a classifier's; leave it out")
    classifier = classifier_from(job.checkpoint, job.device)
    classes = job.reader.classes
    if classes:
        require_same_classes("the classifier", job.checkpoint["classes"], "the images", classes)
    board = MistakeBoard(classes)
    figures = evaluate_classifier(
        classifier,
        job.reader,
        batch_size=job.options.batch_size,
        limit=job.options.n,
        progress=job.progress,
        observe=board.observe,
    )
    save_confusion(figures["confusion"], classes, job.out / "confusion.png")
    return {**figures, "images": ["confusion.png", *board.save(job.out)]}


def evaluate_gan_run(job: Job) -> dict[str, Any]:
    """Figures and images of a generator."""
    options = job.options
    generator = generator_from(job.checkpoint, job.device)
    names = job.checkpoint["classes"] if generator.classes else []
    if names:
        require_same_classes("the generator", names, "the images", job.reader.classes)
    judge = load_judge(options.classifier, job.checkpoint, names, job.device) if options.classifier else None
    extractors = build_extractors(job, judge)
    print(f"extractors: {', '.join(extractor.name for extractor in extractors)}", file=sys.stderr)
    train, why = training_images(job.checkpoint)
    board = SampleBoard(names)
    with train or nullcontext():
        figures = evaluate_generator(
            generator,
            job.reader,
            n=options.n or GAN_IMAGES,
            seed=options.seed,
            extractors=extractors,
            classifier=judge,
            train_reader=train,
            per_class=options.per_class or IMAGES,
            searched=SEARCHED if options.searched is None else options.searched,
            batch_size=options.batch_size,
            progress=job.progress,
            observe=board.observe,
        )
        images = [*board.save(job.out), "real.png"]
        if train is not None and figures["memorisation"] is not None:
            pairs = neighbour_images(generator, train, figures["memorisation"], seed=options.seed)
            save_captioned(*pairs, job.out / "neighbours.png")
            images.append("neighbours.png")
    if why:
        figures["notes"] |= {"floor": why, "memorisation": why}
    teachers = job.checkpoint.get("teachers", [])
    for extractor in extractors:
        if extractor.source in teachers:
            note = "this classifier supplied a loss to the generator, whose distance in its features is flattered"
            figures["notes"][extractor.name] = note
    save_real(job.reader, names, board.columns, job.out / "real.png")
    return {**figures, "images": images}


TASKS: dict[str, tuple[Callable[[Job], dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    "gan": (evaluate_gan_run, gan_table),
    "classifier": (evaluate_classifier_run, classifier_table),
}


def build_extractors(job: Job, judge: Classifier | None) -> list[Extractor]:
    """The named extractors; the judge is not loaded a second time."""
    given = job.options.classifier

    def load_classifier(run: str) -> Classifier:
        return judge if judge is not None and run == given else classifier_from(load(resolve(run)), job.device)

    options = Options(
        device=job.device,
        channels=job.reader.meta.channels,
        weights=job.options.weights,
        classifier=given,
        load_classifier=load_classifier,
    )
    return build(named_extractors(job.options), options)


def named_extractors(options: argparse.Namespace) -> list[str]:
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


def load_judge(run: str, checkpoint: dict[str, Any], names: list[str], device: torch.device) -> Classifier:
    """The classifier that names the samples. UserError if it helped to train the generator or knows other classes.

    A teacher is known by the path in the config and by its weights' fingerprint, wherever the file lies now.
    """
    helper = (checkpoint["config"].get("loss") or {}).get("classifier")
    file = resolve(run)
    taught = helper and run_folder(file).resolve() in (Path(helper).resolve(), run_folder(Path(helper)).resolve())
    judge = load(file)
    classifier = classifier_from(judge, device)
    if taught or fingerprint(classifier) in checkpoint.get("teachers", []):
        raise UserError(f"--classifier {run} supplied a loss to this generator, so it cannot judge it; give another")
    if names:
        require_same_classes("the generator", names, f"the classifier {run}", judge["classes"])
    return classifier


def images_for(checkpoint: dict[str, Any], path: str) -> Dataset:
    """A packed file, read as the run of this checkpoint reads it."""
    trained = (checkpoint["config"].get("data") or {}).get("resolution")
    return dataset_for_model(path, trained, checkpoint["shape"]["resolution"])


def training_images(checkpoint: dict[str, Any]) -> tuple[Dataset | None, str]:
    """The images the generator was trained on, the second real set of the floor; or None and the reason."""
    path = checkpoint["config"].get("data", {}).get("path")
    if not path:
        return None, "the run's config names no data.path to be the second real set"
    try:
        return images_for(checkpoint, path), ""
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


if __name__ == "__main__":
    sys.exit(run_cli(main))
