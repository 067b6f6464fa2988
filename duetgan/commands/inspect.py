"""Describe a packed file: `duet inspect X.lmdb [--verify] [--json] [--out grid.png]`.

The command also writes a grid of images, to X.grid.png next to the file or to `--out`. With
`--json` or `--verify` it does so only if `--out` is given. With `--json` stdout is one document.
"""

import json
import sys
from pathlib import Path

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.inspect import labels_document, lines, report, save_grid, verify
from duetgan.utils.config.cli import Parser, file


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="duet inspect", description="Describe a packed file: its images, classes and sizes."
    )
    parser.add_argument("path", type=Path, metavar="X.lmdb", help="the packed file")
    parser.add_argument(
        "--verify", action="store_true", help="check every record; exit code 2 if one is damaged"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--out",
        type=file(".png"),
        metavar="PNG",
        help="file for the grid of images (default: X.grid.png)",
    )
    args = parser.parse_args(argv)
    with LMDBReader(args.path) as reader:
        damage = verify(reader) if args.verify else None
        document = {
            "file": str(reader.path),
            "bytes": reader.path.stat().st_size,
            **reader.meta.model_dump(),
        }
        document["size"] = reader.meta.spec.resolution or None
        document |= labels_document(document.pop("sets"), reader.meta)
        if damage is not None:
            document["damaged"] = sorted(damage.records)
        print(
            json.dumps(document, indent=2) if args.json else "\n".join(lines(document, reader.meta))
        )
        if damage is not None:
            report(damage, reader)
        if args.out or not (args.json or args.verify):
            out = args.out or args.path.with_name(f"{args.path.stem}.grid.png")
            save_grid(reader, out)
            print(f"image grid: {out}", file=sys.stderr if args.json else sys.stdout)
