"""Name what images show with a trained classifier."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.images import ImageError
from inference import gradcam
from inference.image_files import read_image
from metrics.evaluate_gan import judge_images
from models.classifier import Classifier
from models.restore import classifier_from
from utils.arguments import add_model_options, positive
from utils.checkpoint import load, resolve
from utils.cli import Parser, did_you_mean
from utils.distributed.collectives import choose_device
from utils.errors import EXIT_OK, EXIT_USER, UserError, run_cli

SHOWN = 3  # classes of an image in the table


def parser() -> Parser:
    """The options of this script."""
    options = Parser(prog="predict.py", description=__doc__)
    add = options.add_argument
    add("images", nargs="+", metavar="IMAGE", help="image files")
    add_model_options(options)
    add("--top", type=positive, metavar="K", help=f"the K most likely classes (default: all; in the table {SHOWN})")
    add("--resize", choices=("crop", "pad"), help="how images are resized (default: as in training)")
    add("--json", action="store_true", help="print a JSON array instead of a table")
    add("--gradcam", type=Path, metavar="DIR", help="write each image with the evidence for its class")
    add("--gradcam-class", metavar="NAME", help="the class to explain (default: the predicted one)")
    add("--gradcam-layer", metavar="NAME", help="whose maps are used (default: of a ResNet layer4; layer3 is finer)")
    return options


def main(argv: list[str]) -> int:
    """Predict, print; exit code 2 if an image could not be read."""
    options = parser().parse_args(argv)
    checkpoint = load(resolve(options.checkpoint, options.which))
    classifier = classifier_from(checkpoint, choose_device(options.device))
    maps = gradcam_options(options, checkpoint["classes"], classifier.backbone.maps)
    top = options.top or (len(checkpoint["classes"]) if options.json else SHOWN)
    results: list[dict[str, Any]] = []
    for start in range(0, len(options.images), options.batch_size):
        files = options.images[start : start + options.batch_size]
        batch = range(start, start + len(files))
        here = None if maps is None else maps._replace(files=[maps.files[i] for i in batch])
        results += predict(classifier, checkpoint, files, resize=options.resize, top=top, maps=here)
    print(json.dumps(results, indent=1, allow_nan=False) if options.json else "\n".join(map(line, results)))
    unreadable = sum("error" in result for result in results)
    if unreadable:
        print(f"error: {unreadable} of {len(results)} images could not be read", file=sys.stderr)
    return EXIT_USER if unreadable else EXIT_OK


class Maps(NamedTuple):
    """Which Grad-CAM images are wanted."""

    files: list[Path]  # where they go, one for each image
    label: int | None  # of the class that is asked for; None: the one that is named
    layer: str


def gradcam_options(options: argparse.Namespace, classes: list[str], layer: str) -> Maps | None:
    """What `--gradcam` asks for; `layer` is the default.

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
    label = None if name is None else classes.index(name)
    return Maps(gradcam.output_files(options.gradcam, options.images), label, options.gradcam_layer or layer)


def predict(
    classifier: Classifier,
    checkpoint: dict[str, Any],
    files: list[str],
    *,
    resize: str | None,
    top: int,
    maps: Maps | None = None,
) -> list[dict[str, Any]]:
    """One result a file: `file`, `label`, `probabilities` (the `top` ones, largest first), or `file`, `error`.

    With `maps` also `gradcam`, the image that was written.
    """
    results: list[dict[str, Any]] = [{"file": file} for file in files]
    classes: list[str] = checkpoint["classes"]
    fitted, found = [], []
    for file, result in zip(files, results, strict=True):
        try:
            fitted.append(read_image(file, checkpoint, resize=resize))
            found.append(result)
        except ImageError as error:
            result["error"] = str(error)
    if fitted:
        images = torch.stack(fitted)
        probabilities = judge_images(classifier, images)
        for result, row in zip(found, probabilities, strict=True):
            order = row.sort(descending=True, stable=True).indices.tolist()
            result["label"] = classes[order[0]]
            result["probabilities"] = {classes[i]: float(row[i]) for i in order[:top]}
        if maps is not None:
            places = [place for result, place in zip(results, maps.files, strict=True) if "error" not in result]
            save_maps(classifier, classes, images, probabilities, maps._replace(files=places))
            for result, place in zip(found, places, strict=True):
                result["gradcam"] = str(place)
    return results


def save_maps(
    classifier: Classifier, classes: list[str], images: torch.Tensor, probabilities: torch.Tensor, maps: Maps
) -> None:
    """Write an image beside its Grad-CAM for each of `images`, uint8 [n, C, H, W]."""
    named = probabilities.argmax(1)
    asked = named if maps.label is None else torch.full_like(named, maps.label)
    heats = gradcam.image_heat(classifier, images, asked, maps.layer)
    for image, heat, row, label, place in zip(images, heats, probabilities, asked.tolist(), maps.files, strict=True):
        best = int(row.argmax())
        what = f"evidence for {classes[label]} {row[label]:.3f}" if heat.any() else f"no evidence for {classes[label]}"
        gradcam.save_overlay(image, heat, [f"named {classes[best]} {row[best]:.3f}", f"{what}\n{maps.layer}"], place)


def line(result: dict[str, Any]) -> str:
    """A result as text."""
    if "error" in result:
        return f"{result['file']}: {result['error']}"
    found = ", ".join(f"{name} {share:.3f}" for name, share in result["probabilities"].items())
    return f"{result['file']}: {found}" + (f" ({result['gradcam']})" if "gradcam" in result else "")


if __name__ == "__main__":
    sys.exit(run_cli(main))
