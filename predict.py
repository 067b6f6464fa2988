"""Name what images show with a trained classifier."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import load, resolve_for_people
from utils.cli import Parser, add_model_options, add_speed_options, did_you_mean, positive
from utils.door import printable
from utils.errors import EXIT_OK, EXIT_USER, UserError, run_cli

if TYPE_CHECKING:
    from inference.predictions import Maps
    from models.classifier import Classifier

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
    return options


def main(argv: list[str]) -> int:
    """Predict, print; exit code 2 if an image could not be read."""
    options = parser().parse_args(argv)
    path = resolve_for_people(options.checkpoint, options.which)
    from inference.predictions import predict  # with torch, now that the options are known to be right
    from models.fast import hasten
    from models.restore import classifier_from
    from reporting.report import refresh
    from utils.distributed.collectives import choose_device

    checkpoint = load(path)
    device = choose_device(options.device)
    classifier = classifier_from(checkpoint, device)
    fast = hasten(classifier, device, precision=options.precision, fold=options.fold)
    maps = gradcam_options(options, checkpoint["classes"], classifier)
    top = options.top or (len(checkpoint["classes"]) if options.json else SHOWN)
    how = {"resize": options.resize, "top": top, "batch_size": options.batch_size, "maps": maps, "fast": fast}
    results = predict(classifier, checkpoint, options.images, **how)
    print(json.dumps(results, indent=1, allow_nan=False) if options.json else "\n".join(map(line, results)))
    if options.gradcam is not None:
        refresh(options.gradcam / "maps")
    unreadable = sum("error" in result for result in results)
    if unreadable:
        print(f"error: {unreadable} of {len(results)} images could not be read", file=sys.stderr)
    return EXIT_USER if unreadable else EXIT_OK


def gradcam_options(options: Namespace, classes: list[str], classifier: "Classifier") -> "Maps | None":
    """What `--gradcam` asks for.

    Raises UserError for an unknown class and a folder that cannot be written.
    """
    name = options.gradcam_class
    if options.gradcam is None:
        if name is not None or options.gradcam_layer is not None:
            raise UserError("--gradcam-class and --gradcam-layer belong to --gradcam DIR; add it")
        return None
    if name is not None and name not in classes:
        known = ", ".join(classes)
        raise UserError(f"--gradcam-class {name}: no class{did_you_mean(name, classes)}; choose one of {known}")
    from inference.predictions import Maps, default_layer, output_files

    label = None if name is None else classes.index(name)
    layer = options.gradcam_layer or default_layer(classifier)
    return Maps(output_files(options.gradcam, options.images), label, layer)


def line(result: dict[str, Any]) -> str:
    """A result as text."""
    if "error" in result:
        return printable(f"{result['file']}: {result['error']}")
    found = ", ".join(f"{name} {share:.3f}" for name, share in result["probabilities"].items())
    return printable(f"{result['file']}: {found}" + (f" ({result['gradcam']})" if "gradcam" in result else ""))


if __name__ == "__main__":
    sys.exit(run_cli(main))
