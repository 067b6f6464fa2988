"""Name what pictures show with a trained classifier."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.pictures import RESIZE_FILTERS, PictureError, decode_file, fit
from metrics.evaluate_gan import judge_pictures
from models.resnet import Classifier
from models.restore import classifier_from
from utils.arguments import add_model_options, positive
from utils.checkpoint import load, resolve
from utils.cli import Parser
from utils.distributed import choose_device
from utils.errors import EXIT_OK, EXIT_USER, run_cli

SHOWN = 3  # classes of a picture in the table


def parser() -> Parser:
    """The options of this script."""
    options = Parser(prog="predict.py", description=__doc__)
    add = options.add_argument
    add("pictures", nargs="+", metavar="PICTURE", help="picture files")
    add_model_options(options)
    add("--top", type=positive, metavar="K", help=f"only the K likeliest classes (default: all; in the table {SHOWN})")
    add("--resize", choices=("crop", "pad"), help="how pictures are brought to size (default: as in training)")
    add("--json", action="store_true", help="print a JSON array instead of a table")
    return options


def main(argv: list[str]) -> int:
    """Predict, print; exit code 2 if a picture could not be read."""
    options = parser().parse_args(argv)
    checkpoint = load(resolve(options.checkpoint, options.which))
    classifier = classifier_from(checkpoint, choose_device(options.device))
    mode = options.resize or training_mode(checkpoint)
    top = options.top or (len(checkpoint["classes"]) if options.json else SHOWN)
    results: list[dict[str, Any]] = []
    for start in range(0, len(options.pictures), options.batch_size):
        files = options.pictures[start : start + options.batch_size]
        results += predict(classifier, checkpoint["classes"], files, mode=mode, top=top)
    print(json.dumps(results, indent=1, allow_nan=False) if options.json else "\n".join(map(line, results)))
    unreadable = sum("error" in result for result in results)
    if unreadable:
        print(f"error: {unreadable} of {len(results)} pictures could not be read", file=sys.stderr)
    return EXIT_USER if unreadable else EXIT_OK


def training_mode(checkpoint: dict[str, Any]) -> str:
    """How the training data was brought to size, `crop` or `pad`, as the checkpoint tells."""
    return "pad" if checkpoint["data"]["resize_filter"].startswith(RESIZE_FILTERS["pad"]) else "crop"


def predict(
    classifier: Classifier, classes: list[str], files: list[str], *, mode: str, top: int
) -> list[dict[str, Any]]:
    """One result a file: `file`, `label`, `probabilities` (the `top` ones, largest first), or `file`, `error`."""
    results: list[dict[str, Any]] = [{"file": file} for file in files]
    pictures, found = [], []
    for file, result in zip(files, results, strict=True):
        try:
            pixels = decode_file(Path(file).read_bytes(), classifier.channels)
            pictures.append(fit(pixels, classifier.resolution, mode).transpose(2, 0, 1))
            found.append(result)
        except OSError as error:
            result["error"] = f"cannot be read: {error.strerror}"
        except PictureError as error:
            result["error"] = str(error)
    if pictures:
        probabilities = judge_pictures(classifier, torch.from_numpy(np.stack(pictures)))
        for result, row in zip(found, probabilities, strict=True):
            order = row.sort(descending=True, stable=True).indices.tolist()
            result["label"] = classes[order[0]]
            result["probabilities"] = {classes[i]: float(row[i]) for i in order[:top]}
    return results


def line(result: dict[str, Any]) -> str:
    """A result as text."""
    if "error" in result:
        return f"{result['file']}: {result['error']}"
    return f"{result['file']}: " + ", ".join(f"{name} {share:.3f}" for name, share in result["probabilities"].items())


if __name__ == "__main__":
    sys.exit(run_cli(main))
