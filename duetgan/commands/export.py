"""Write a trained network to one file for use elsewhere, checked against the original before it is
left behind.
"""

import json
import sys
from pathlib import Path
from typing import Any

from duetgan.inference.settings import FORMATS
from duetgan.utils import threads
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.config.cli import Parser, add_import_option, add_truncation_options, positive

FORMAT_HELP = (
    "safetensors: weights for hubconf.py; onnx and torch-export: a program; int8: a classifier's ONNX program in 8-bit "
    "integers, smaller and faster on CPUs; executorch: a program for phones and small devices; nvidia and rosinality: "
    "StyleGAN2's weights by those programs' names; folder: "
    "weights, a model card and a page of Python that needs torch and safetensors alone"
)


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
        help="which checkpoint of a run folder (default: last)",
    )
    add("--format", required=True, choices=FORMATS, help=FORMAT_HELP)
    add("--out", required=True, type=Path, metavar="FILE", help="the file, or folder, to write")
    add("--overwrite", action="store_true", help="replace --out if it exists (files only)")
    add(
        "--licence",
        "--license",
        default="unknown",
        help="that a model card names (default: unknown)",
    )
    add(
        "--data",
        metavar="X.lmdb",
        help="images of the check (default: the run's held-out, else training images)",
    )
    add(
        "--calibration",
        metavar="X.lmdb",
        help="images for int8's ranges (default: the run's training images)",
    )
    add("--n", type=positive, default=1000, metavar="N", help="images of the check, at most")
    add_truncation_options(options)
    add(
        "--calibrated",
        type=positive,
        default=256,
        metavar="N",
        help="images for int8's ranges, at most",
    )
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="the larger batch that is timed",
    )
    add(
        "--no-benchmark",
        action="store_true",
        help="do not time it, nor compare with folded and bf16 networks; the file is checked all the same",
    )
    add("--repeats", type=positive, default=5, metavar="N", help="of the timing, medians")
    add(
        "--json",
        action="store_true",
        help="print one JSON document instead of a table; logs go to stderr",
    )
    return options


def main(argv: list[str]) -> int:
    """Export, print what the check found; CheckFailed (exit code 4) where the file is not as good
    as the original.
    """
    options = parser().parse_args(argv)
    path = resolve_for_people(options.checkpoint, options.which)
    import torch  # now that the options are known to be right

    from duetgan.inference.export.check import CheckFailed, document, export, table
    from duetgan.models.restore import read
    from duetgan.reporting.report import refresh

    threads.settle()
    checkpoint = read(path)
    rows, subject, wrong = export(options, checkpoint)
    checked = sum(len(batch[0]) for batch in subject.batches)
    if options.json:
        head: dict[str, Any] = {
            "checkpoint": str(path),
            "step": checkpoint["step"],
            "task": checkpoint["task"],
        }
        head |= {
            "format": options.format,
            "file": str(options.out),
            "passed": wrong is None,
            "reason": wrong,
        }
        head |= {
            "checked": checked,
            "batch_size": options.batch_size,
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(head | {"rows": document(rows)}, indent=1, allow_nan=False))
    else:
        what = "images" if subject.is_classifier else "samples"
        speeds = (
            "; speeds not measured (--no-benchmark)"
            if options.no_benchmark
            else "; speeds against fp32 eager"
        )
        print(f"checked on {checked} {what}; {torch.get_num_threads()} threads{speeds}")
        print(table(rows, batch=options.batch_size))
    if wrong is not None:
        kept = "; the one that was there is as it was" if options.out.exists() else ""
        remedy = (
            ", or calibrate with more or other images (--calibration)"
            if options.format == "int8"
            else ""
        )
        raise CheckFailed(
            f"{options.out}: not written, {wrong}{kept}; choose another --format{remedy}"
        )
    print(f"wrote {options.out}, {rows[-1].bytes / 2**20:.2f} MiB", file=sys.stderr)
    refresh(options.out)
    return 0
