"""Name what images show with a trained classifier."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duetgan.inference.settings import ProjectionConfig, label_of
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.config.cli import Parser, add_model_options, add_speed_options, positive
from duetgan.utils.errors import EXIT_OK, EXIT_USER, UserError
from duetgan.utils.script import run_cli
from duetgan.utils.text import printable

if TYPE_CHECKING:
    from duetgan.inference.inputs import Inputs
    from duetgan.inference.outputs import Sink
    from duetgan.inference.predictions import Maps
    from duetgan.inference.strips import Counterfactuals
    from duetgan.models.classifier import Classifier

STEPS = ProjectionConfig().steps
SHOWN = 3  # classes of an image in the table


def parser() -> Parser:
    options = Parser(prog="predict.py", description=__doc__)
    add = options.add_argument
    kinds = "image files, folders, patterns ('a/**/*.jpg'), zip, tar, CSV, Parquet or LMDB files, .txt lists"
    add("images", nargs="+", metavar="IMAGES", help=kinds)
    add_model_options(options)
    add("--top", type=positive, metavar="K", help=f"the K most likely classes (default: all; in the table {SHOWN})")
    add("--resize", choices=("crop", "pad"), help="how images are resized (default: as in training)")
    add_speed_options(options, "auto")
    add("--json", action="store_true", help="print a JSON array instead of a table")
    add("--csv", type=Path, metavar="FILE", help="write a row an image: file, label, probability, a column a class")
    add("--errors", type=Path, metavar="FILE", help="write the images that could not be read, and why, as CSV")
    add("--sort-into", type=Path, metavar="DIR", help="link each image into DIR/CLASS")
    add("--gradcam", type=Path, metavar="DIR", help="write each image with the evidence for its class")
    add("--gradcam-class", metavar="NAME", help="the class to explain (default: the predicted one)")
    add("--gradcam-layer", metavar="NAME", help="whose maps are used (default: a ResNet's last stage of 4x4 or more)")
    text = "write each image on its way to another class: what would have to change (needs --generator)"
    add("--counterfactual", type=Path, metavar="DIR", help=text)
    add("--counterfactual-class", metavar="NAME", help="the other class (default: the second most probable)")
    add("--generator", metavar="RUN_OR_FILE", help="a GAN with w of the same classes, which draws it")
    add("--steps", type=positive, default=STEPS, help=f"of each image's projection (default: {STEPS})")
    return options


def main(argv: list[str]) -> int:
    """Predict, print; exit code 2 if an image could not be read."""
    options = parser().parse_args(argv)
    path = resolve_for_people(options.checkpoint, options.which)
    from duetgan.inference.inputs import Inputs  # with torch, now that the options are known to be right
    from duetgan.inference.predictions import predict
    from duetgan.models.fast import faster
    from duetgan.models.ready_made import read
    from duetgan.models.restore import classifier_from
    from duetgan.reporting.report import refresh
    from duetgan.utils.distributed.collectives import choose_device
    from duetgan.utils.runlog.progress import Bar

    checkpoint = read(path)
    classes = checkpoint["classes"]
    device = choose_device(options.device)
    classifier = classifier_from(checkpoint, device)
    fast = faster(classifier, device, precision=options.precision, fold=options.fold, tta=options.tta)
    failed = Counter[str]()
    quiet = not (options.csv or options.sort_into)  # the answers are printed as they come
    with ExitStack() as stack:
        inputs = stack.enter_context(Inputs(options.images))
        maps = gradcam_options(options, list(inputs.names()) if options.gradcam else [], classes, classifier)
        strips = counterfactual_options(options, inputs, classes, classifier)
        top = options.top or (SHOWN if quiet and not options.json else len(classes))
        how = {"resize": options.resize, "top": top, "batch_size": options.batch_size, "maps": maps, "fast": fast}
        sinks = [*open_sinks(options, classes, stack)]
        bar = stack.enter_context(Bar(total=len(inputs), desc="predicting", unit="image", disable=quiet))
        for given, answer in predict(classifier, checkpoint, inputs, **how):
            if strips and "error" not in answer:
                answer["counterfactual"] = strips.draw(given.name, answer["label"], resize=options.resize)
            failed["could not be read"] += "error" in answer
            failed["have no counterfactual"] += "error" in answer.get("counterfactual", {})
            for sink in sinks:
                sink(given, answer)
            bar.update()
        count, text = len(inputs), bar.text()
    if not quiet:
        print(text, file=sys.stderr)
    for folder in filter(None, (options.gradcam, options.counterfactual)):
        refresh(folder / "maps")
    for what, number in failed.items():
        if number:
            print(f"error: {number} of {count} images {what}", file=sys.stderr)
    return EXIT_USER if any(failed.values()) else EXIT_OK


def open_sinks(options: Namespace, classes: list[str], stack: ExitStack) -> "Iterator[Sink]":
    from duetgan.inference import outputs

    if options.json:
        yield stack.enter_context(outputs.json_array(sys.stdout))
    elif not (options.csv or options.sort_into):
        yield lambda _, answer: print(line(answer))
    if options.csv:
        yield stack.enter_context(outputs.csv_file(options.csv, classes, options.top))
    if options.errors:
        yield stack.enter_context(outputs.error_file(options.errors))
    if options.sort_into:
        yield outputs.sorter(options.sort_into)


def gradcam_options(
    options: Namespace, names: list[str], classes: list[str], classifier: "Classifier"
) -> "Maps | None":
    """What `--gradcam` asks for.

    Raises UserError for an unknown class and a folder that cannot be written.
    """
    if options.gradcam is None:
        if options.gradcam_class is not None or options.gradcam_layer is not None:
            raise UserError("--gradcam-class and --gradcam-layer belong to --gradcam DIR; add it")
        return None
    name = options.gradcam_class
    label = None if name is None else label_of(name, classes, "--gradcam-class")
    from duetgan.inference.predictions import Maps, default_layer, output_files

    layer = options.gradcam_layer or default_layer(classifier)
    return Maps(iter(output_files(options.gradcam, names)), label, layer)


def counterfactual_options(
    options: Namespace, inputs: "Inputs", classes: list[str], classifier: "Classifier"
) -> "Counterfactuals | None":
    """What `--counterfactual` asks for.

    Raises UserError for an unknown class, a generator that does not fit, and a folder that cannot be written.
    """
    if options.counterfactual is None:
        if options.counterfactual_class is not None or options.generator is not None:
            raise UserError("--counterfactual-class and --generator belong to --counterfactual DIR; add it")
        return None
    if options.generator is None:
        raise UserError("--counterfactual draws with a generator of the same classes; add --generator RUN")
    if not inputs.are_files:
        raise UserError("--counterfactual is for image files and folders; unpack the images first")
    name = options.counterfactual_class
    target = None if name is None else label_of(name, classes, "--counterfactual-class")
    from duetgan.inference.predictions import output_files
    from duetgan.inference.strips import Counterfactuals

    names = list(inputs.names())
    files = output_files(options.counterfactual, names, "counterfactual")
    how = {"target": target, "steps": options.steps, "batch_size": options.batch_size}
    places = dict(zip(names, files, strict=True))
    return Counterfactuals(options.generator, classifier, classes, places, **how)


def line(result: dict[str, Any]) -> str:
    if "error" in result:
        return printable(f"{result['file']}: {result['error']}")
    text = ", ".join(f"{name} {share:.3f}" for name, share in result["probabilities"].items())
    text = f"{result['file']}: {text}" + (f" ({result['gradcam']})" if "gradcam" in result else "")
    strip = result.get("counterfactual")
    if strip and "error" in strip:
        text += f"; no counterfactual: {strip['error']}"
    elif strip:
        where = "" if strip["arrived"] else "never there, at best "
        text += f"; {where}{strip['class']} {strip['probability']:.3f}"
        text += f", pixels change by {strip['pixel_change']:.3f} ({strip['image']})"
    return printable(text)


if __name__ == "__main__":
    sys.exit(run_cli(main))
