"""Find the training images that helped or hurt a prediction most, or that are likely mislabelled.

Example: `duet influence --checkpoint RUN --data train.lmdb --image FILE --out FILE.png`. To find
wrong labels, give `--mislabelled` instead of `--image FILE`. With --image, each checkpoint of the
run gives every training image a score. The scores are added, weighted by the learning rates. A run
keeps several checkpoints if it is trained with `--checkpoint.keep 10`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from duetgan.utils.checkpoint import newest_first, resolve
from duetgan.utils.config.cli import Parser, add_import_option, file, positive
from duetgan.utils.errors import refuse
from duetgan.utils.files import check_writable

TOP = 8  # default number of images that helped, that hurt, or that are mislabelled


def parser() -> Parser:
    options = Parser(prog="duet influence", description=__doc__)
    add_import_option(options)
    add = options.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="RUN_OR_FILE",
        help="run folder (all its checkpoints) or one file",
    )
    add("--data", required=True, metavar="X.lmdb", help="the training images")
    add(
        "--image",
        metavar="FILE",
        help="show the training images that helped and hurt its prediction most",
    )
    add("--label", metavar="NAME", help="the class to explain (default: the predicted one)")
    add(
        "--mislabelled",
        action="store_true",
        help="show the training images whose labels are likely wrong",
    )
    add(
        "--top",
        type=positive,
        default=TOP,
        metavar="N",
        help=f"images of each kind (default: {TOP})",
    )
    add("--out", required=True, type=file(".png"), metavar="FILE.png", help="the image grid")
    add("--json", action="store_true", help="print one JSON document instead of a table")
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="changes speed and memory only (default: 64)",
    )
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    refuse(
        (
            (options.image is None) == (not options.mislabelled),
            "give either --image FILE or --mislabelled",
        ),
        (
            options.label is not None and options.image is None,
            "--label belongs to --image; leave it out",
        ),
    )
    check_writable(options.out.parent)
    files = checkpoint_files(options.checkpoint)
    # torch is slow to import, so the options are checked first.
    from duetgan.extras.influence.scores import answer

    document = {
        "checkpoints": [str(file) for file in files],
        "data": str(options.data),
        **answer(options, files),
    }
    print(json.dumps(document, indent=1, allow_nan=False) if options.json else _table(document))
    print(f"wrote {options.out}", file=sys.stderr)
    return 0


def checkpoint_files(run_or_file: str) -> list[Path]:
    """Return all checkpoints of a run folder, the earliest first.

    If `run_or_file` is a file, return only this file.
    """
    file = resolve(run_or_file)
    return [file] if Path(run_or_file).is_file() else newest_first(file.parent)[::-1]


def _table(document: dict[str, Any]) -> str:
    if "mislabelled" in document:
        lines = [f"confident learning would change {document['issues']} labels; the first:"]
        for item in document["mislabelled"]:
            label = f"{item['label']} {item['given']:.3f}"
            suggestion = f"{item['named']} {item['probability']:.3f}"
            lines.append(f"record {item['record']}: {label}, rather {suggestion}")
        return "\n".join(lines)
    prediction = f"{document['named']} {document['probability']:.3f}"
    lines = [f"{document['image']}: {prediction}; influence on {document['label']}:"]
    for kind in ("helped", "hurt"):
        for item in document[kind]:
            lines.append(f"{kind} {item['score']:+.3g}: record {item['record']}, {item['label']}")
    return "\n".join(lines)
