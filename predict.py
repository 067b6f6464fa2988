"""Name what images show with a trained classifier."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duetgan.inference.settings import ProjectionConfig, label_of
from duetgan.utils.checkpoint import load, resolve_for_people
from duetgan.utils.config.cli import Parser, add_model_options, add_speed_options, positive
from duetgan.utils.errors import EXIT_OK, EXIT_USER, UserError
from duetgan.utils.script import run_cli
from duetgan.utils.text import printable

if TYPE_CHECKING:
    from duetgan.inference.predictions import Maps
    from duetgan.inference.strips import Counterfactuals
    from duetgan.models.classifier import Classifier

STEPS = ProjectionConfig().steps
SHOWN = 3  # classes of an image in the table


def parser() -> Parser:
    """The options of this script."""
    options = Parser(prog="predict.py", description=__doc__)
    add = options.add_argument
    add("images", nargs="+", metavar="IMAGE", help="image files")
    add_model_options(options)
    add("--top", type=positive, metavar="K", help=f"the K most likely classes (default: all; in the table {SHOWN})")
    add("--resize", choices=("crop", "pad"), help="how images are resized (default: as in training)")
    add_speed_options(options, "auto")
    add("--json", action="store_true", help="print a JSON array instead of a table")
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
    from duetgan.inference.predictions import predict  # with torch, now that the options are known to be right
    from duetgan.models.fast import faster
    from duetgan.models.restore import classifier_from
    from duetgan.reporting.report import refresh
    from duetgan.utils.distributed.collectives import choose_device

    checkpoint = load(path)
    device = choose_device(options.device)
    classifier = classifier_from(checkpoint, device)
    fast = faster(classifier, device, precision=options.precision, fold=options.fold, tta=options.tta)
    maps = gradcam_options(options, checkpoint["classes"], classifier)
    top = options.top or (len(checkpoint["classes"]) if options.json else SHOWN)
    how = {"resize": options.resize, "top": top, "batch_size": options.batch_size, "maps": maps, "fast": fast}
    strips = counterfactual_options(options, checkpoint["classes"], classifier)
    results = predict(classifier, checkpoint, options.images, **how)
    for result in results:
        if strips and "error" not in result:
            result["counterfactual"] = strips.draw(result["file"], result["label"], resize=options.resize)
    print(json.dumps(results, indent=1, allow_nan=False) if options.json else "\n".join(map(line, results)))
    for folder in filter(None, (options.gradcam, options.counterfactual)):
        refresh(folder / "maps")
    failed = {
        "could not be read": sum("error" in result for result in results),
        "have no counterfactual": sum("error" in result.get("counterfactual", {}) for result in results),
    }
    for what, count in failed.items():
        if count:
            print(f"error: {count} of {len(results)} images {what}", file=sys.stderr)
    return EXIT_USER if any(failed.values()) else EXIT_OK


def gradcam_options(options: Namespace, classes: list[str], classifier: "Classifier") -> "Maps | None":
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
    return Maps(output_files(options.gradcam, options.images), label, layer)


def counterfactual_options(
    options: Namespace, classes: list[str], classifier: "Classifier"
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
    name = options.counterfactual_class
    target = None if name is None else label_of(name, classes, "--counterfactual-class")
    from duetgan.inference.predictions import output_files
    from duetgan.inference.strips import Counterfactuals

    files = output_files(options.counterfactual, options.images, "counterfactual")
    how = {"target": target, "steps": options.steps, "batch_size": options.batch_size}
    places = dict(zip(options.images, files, strict=True))
    return Counterfactuals(options.generator, classifier, classes, places, **how)


def line(result: dict[str, Any]) -> str:
    """A result as text."""
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
