"""Export a trained network to a file for use in other programs.

The file is compared with the original network before it is kept.
"""

import json
import sys
from pathlib import Path

from duetgan.inference.export.formats import FORMATS
from duetgan.utils import machine
from duetgan.utils.checkpoint import resolve
from duetgan.utils.checkpoint.provenance import describe_history
from duetgan.utils.config.cli import Parser, add_import_option, add_truncation_options, positive
from duetgan.utils.text import columns


def parser() -> Parser:
    options = Parser(prog="export.py", description=__doc__)
    add_import_option(options)
    add = options.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="RUN_OR_FILE",
        help="run folder, checkpoint or .safetensors file",
    )
    add(
        "--which",
        choices=("last", "best"),
        default="last",
        help="checkpoint of a run folder: the last one, or the one with the best evaluation "
        "(default: last)",
    )
    described = "; ".join(f"{name}: {form.help}" for name, form in FORMATS.items())
    add("--format", required=True, choices=tuple(FORMATS), help=described)
    add("--out", required=True, type=Path, metavar="FILE", help="the file, or folder, to write")
    add("--overwrite", action="store_true", help="replace --out if it exists (files only)")
    add(
        "--licence",
        "--license",
        default="unknown",
        help="licence in the model card (default: unknown)",
    )
    add(
        "--data",
        metavar="X.lmdb",
        help="images for the comparison (default: the run's held-out images, else its training images)",
    )
    add(
        "--fit-temperature",
        action="store_true",
        help="calibrate a classifier's probabilities: divide its logits by a temperature that is "
        "fitted on held-out images, those of --data",
    )
    add(
        "--calibration",
        metavar="X.lmdb",
        help="images for the calibration of int8 (default: the run's training images)",
    )
    add(
        "--n",
        type=positive,
        default=1000,
        metavar="N",
        help="largest number of images for the comparison",
    )
    add_truncation_options(options)
    add(
        "--calibrated",
        type=positive,
        default=256,
        metavar="N",
        help="largest number of images for the calibration of int8",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON document instead of a table; logs go to stderr",
    )
    return options


def main(argv: list[str]) -> int:
    """Export a network, check the file, print the result of the check, and return 0.

    Raises CheckFailed (exit code 4) if the file does not agree with the original network. In this
    case `--out` is not written.
    """
    options = parser().parse_args(argv)
    path = resolve(options.checkpoint, options.which)
    # These imports take seconds, so the options are checked first.
    from duetgan.inference.export.check import CheckFailed, document, export, table
    from duetgan.metrics.tables import temperature_table
    from duetgan.models.restore import read

    machine.settle()
    checkpoint = read(path)
    if history := describe_history(checkpoint):
        print(history, file=sys.stderr)
    rows, subject, failure = export(options, checkpoint)
    checked = sum(len(batch[0]) for batch in subject.batches)
    if options.json:
        head = {
            "checkpoint": str(path),
            "step": checkpoint["step"],
            "task": checkpoint["task"],
            "format": options.format,
            "file": str(options.out),
            "passed": failure is None,
            "reason": failure,
            "checked": checked,
        }
        head |= {"temperature": subject.temperature, "rows": document(rows)}
        print(json.dumps(head, indent=1, allow_nan=False))
    else:
        if subject.temperature is not None:
            header, cells = temperature_table({"temperature": subject.temperature})
            print(columns([header, *cells]))
        print(f"checked on {checked} inputs")
        print(table(rows))
    if failure is not None:
        message = f"{options.out}: not written, {failure}; choose another --format"
        if FORMATS[options.format].quantized:
            message += ", or calibrate with more or other images (--calibration)"
        raise CheckFailed(message)
    print(f"wrote {options.out}, {rows[-1].bytes / 2**20:.2f} MiB", file=sys.stderr)
    return 0
