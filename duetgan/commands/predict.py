"""Classify images with a trained classifier."""

import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from duetgan.inference.additions import ADDITIONS
from duetgan.utils.checkpoint import resolve
from duetgan.utils.config.cli import Parser, add_model_options, add_speed_options, positive
from duetgan.utils.errors import EXIT_OK, EXIT_USER
from duetgan.utils.text import printable

TABLE_CLASSES = 3  # classes per image in the table


def parser() -> Parser:
    options = Parser(prog="predict.py", description=__doc__)
    add = options.add_argument
    add(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="image files, folders, patterns ('a/**/*.jpg'), zip, tar, CSV, Parquet or LMDB files, .txt lists",
    )
    add_model_options(options)
    add(
        "--top",
        type=positive,
        metavar="K",
        help=f"print the K most likely classes (default: all; in the table {TABLE_CLASSES})",
    )
    add(
        "--resize", choices=("crop", "pad"), help="how images are resized (default: as in training)"
    )
    add_speed_options(options, "auto")
    add("--json", action="store_true", help="print a JSON array instead of a table")
    add(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write a CSV row for each image: file, label, probability, and a column for each class",
    )
    add(
        "--errors",
        type=Path,
        metavar="FILE",
        help="write the images that could not be read, with the reasons, as CSV",
    )
    add("--sort-into", type=Path, metavar="DIR", help="link each image into DIR/CLASS")
    add(
        "--gradcam",
        type=Path,
        metavar="DIR",
        help="write each image with a heat map of the evidence for its class (Grad-CAM)",
    )
    add("--gradcam-class", metavar="NAME", help="the class to explain (default: the predicted one)")
    add(
        "--gradcam-layer",
        metavar="NAME",
        help="layer whose feature maps are used (default: a ResNet's last stage of 4x4 or more)",
    )
    for addition in ADDITIONS.values():
        addition.add_options(add)
    return options


def main(argv: list[str]) -> int:
    """Classify images, and print or write the predictions; return the exit code.

    The exit code is 2 if an image could not be read, or if an additional result that an option
    requests could not be computed for an image. Otherwise it is 0.
    """
    options = parser().parse_args(argv)
    path = resolve(options.checkpoint, options.which)
    # These import torch, which takes seconds, so the options are checked first.
    from duetgan.inference import predictions
    from duetgan.inference.inputs import Inputs
    from duetgan.models.fast import faster
    from duetgan.models.restore import classifier_from, read
    from duetgan.utils.distributed.collectives import choose_device
    from duetgan.utils.runlog.progress import Bar

    checkpoint = read(path)
    classes = checkpoint["classes"]
    device = choose_device(options.device)
    classifier = classifier_from(checkpoint, device, several=True)
    fast = faster(
        classifier, device, precision=options.precision, fold=options.fold, tta=options.tta
    )
    failures = defaultdict[str, list[str]](list)  # kind of failure -> names of images

    def note(answer: predictions.Answer, failure: str, name: str) -> None:
        if "error" in answer:
            failures[failure].append(name)

    quiet = not (options.csv or options.sort_into)  # predictions are printed as they come
    with ExitStack() as stack:
        inputs = Inputs(options.images, stack)
        maps = predictions.gradcam(options, inputs, classes, classifier)
        additions = {}
        for kind, addition in ADDITIONS.items():
            extend = addition.prepare(options, inputs, classes, classifier)
            if extend is not None:
                additions[kind] = extend
        top = options.top
        if not top:
            top = TABLE_CLASSES if quiet and not options.json else len(classes)
        sinks = [*predictions.open_sinks(options, classes, stack)]
        bar = stack.enter_context(
            Bar(total=len(inputs), desc="predicting", unit="image", disable=quiet)
        )
        answers = predictions.predict(
            classifier,
            checkpoint,
            inputs,
            resize=options.resize,
            top=top,
            batch_size=options.batch_size,
            maps=maps,
            fast=fast,
        )
        for image, answer in answers:
            note(answer, "could not be read", image.name)
            for kind, extend in additions.items():
                if "error" not in answer:
                    answer[kind] = extend(image.name, answer)
                    note(answer[kind], ADDITIONS[kind].failure, image.name)
            for sink in sinks:
                sink(image, answer)
            bar.update()
        count = len(inputs)
    for path in filter(None, (options.csv, options.errors)):
        print(f"wrote {path}", file=sys.stderr)
    for failure, names in failures.items():
        first = printable(names[0])
        print(
            f"error: {len(names)} of {count} images {failure}, the first: {first}", file=sys.stderr
        )
    return EXIT_USER if failures else EXIT_OK
