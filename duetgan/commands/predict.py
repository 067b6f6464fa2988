"""Name what images show with a trained classifier."""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from duetgan.inference.settings import ProjectionConfig
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.config.cli import Parser, add_model_options, add_speed_options, positive
from duetgan.utils.errors import EXIT_OK, EXIT_USER
from duetgan.utils.text import printable

STEPS = ProjectionConfig().steps
SHOWN = 3  # classes of an image in the table


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
        help=f"the K most likely classes (default: all; in the table {SHOWN})",
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
        help="write a row an image: file, label, probability, a column a class",
    )
    add(
        "--errors",
        type=Path,
        metavar="FILE",
        help="write the images that could not be read, and why, as CSV",
    )
    add("--sort-into", type=Path, metavar="DIR", help="link each image into DIR/CLASS")
    add(
        "--gradcam",
        type=Path,
        metavar="DIR",
        help="write each image with the evidence for its class",
    )
    add("--gradcam-class", metavar="NAME", help="the class to explain (default: the predicted one)")
    add(
        "--gradcam-layer",
        metavar="NAME",
        help="whose maps are used (default: a ResNet's last stage of 4x4 or more)",
    )
    add(
        "--counterfactual",
        type=Path,
        metavar="DIR",
        help="write each image on its way to another class: what would have to change (needs --generator)",
    )
    add(
        "--counterfactual-class",
        metavar="NAME",
        help="the other class (default: the second most probable)",
    )
    add(
        "--generator",
        metavar="RUN_OR_FILE",
        help="a GAN with w of the same classes, which draws it",
    )
    add(
        "--steps",
        type=positive,
        default=STEPS,
        help=f"of each image's projection (default: {STEPS})",
    )
    return options


def main(argv: list[str]) -> int:
    """Predict, print; exit code 2 if an image could not be read."""
    options = parser().parse_args(argv)
    path = resolve_for_people(options.checkpoint, options.which)
    # with torch, now that the options are known to be right
    from duetgan.inference import predictions
    from duetgan.inference.inputs import Inputs
    from duetgan.models.fast import faster
    from duetgan.models.restore import classifier_from, read
    from duetgan.reporting.report import refresh
    from duetgan.utils.distributed.collectives import choose_device
    from duetgan.utils.runlog.progress import Bar

    checkpoint = read(path)
    classes = checkpoint["classes"]
    device = choose_device(options.device)
    classifier = classifier_from(checkpoint, device, several=True)
    fast = faster(
        classifier, device, precision=options.precision, fold=options.fold, tta=options.tta
    )
    failed, first = Counter[str](), dict[str, str]()
    quiet = not (options.csv or options.sort_into)  # the answers are printed as they come
    with ExitStack() as stack:
        inputs = Inputs(options.images, stack)
        maps = predictions.gradcam(options, inputs, classes, classifier)
        strips = predictions.counterfactuals(options, inputs, classes, classifier)
        top = options.top or (SHOWN if quiet and not options.json else len(classes))
        how = {
            "resize": options.resize,
            "top": top,
            "batch_size": options.batch_size,
            "maps": maps,
            "fast": fast,
        }
        sinks = [*predictions.open_sinks(options, classes, stack)]
        bar = stack.enter_context(
            Bar(total=len(inputs), desc="predicting", unit="image", disable=quiet)
        )
        for given, answer in predictions.predict(classifier, checkpoint, inputs, **how):
            if strips and "error" not in answer:
                answer["counterfactual"] = strips.draw(
                    given.name, answer["label"], resize=options.resize
                )
            parts = {
                "could not be read": answer,
                "have no counterfactual": answer.get("counterfactual", {}),
            }
            for what in (what for what, part in parts.items() if "error" in part):
                failed[what] += 1
                first.setdefault(what, given.name)
            for sink in sinks:
                sink(given, answer)
            bar.update()
        count, text = len(inputs), bar.text()
    if not quiet:
        print(text, file=sys.stderr)
    for folder in filter(None, (options.gradcam, options.counterfactual)):
        refresh(folder / "maps")
    for path in filter(None, (options.csv, options.errors)):
        print(f"wrote {path}", file=sys.stderr)
    for what, number in failed.items():
        print(
            f"error: {number} of {count} images {what}, the first: {printable(first[what])}",
            file=sys.stderr,
        )
    return EXIT_USER if any(failed.values()) else EXIT_OK
