"""Find duplicates within a packed file or between two.

Usage: `duet duplicates A.lmdb [B.lmdb] [--similar] [--json]`.
"""

import json
from dataclasses import asdict
from pathlib import Path

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import find, lines, naming
from duetgan.utils.config.cli import Parser


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="duet duplicates",
        description="Report duplicate images within a packed file, or images that are in two packed files.",
    )
    parser.add_argument("path", type=Path, metavar="A.lmdb", help="the packed file to search")
    parser.add_argument(
        "other", type=Path, metavar="B.lmdb", nargs="?", help="a second file to compare with"
    )
    parser.add_argument(
        "--similar", action="store_true", help="also search for images that look alike"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    with LMDBReader(args.path) as reader, LMDBReader(args.other or args.path) as second:
        report = find(reader, second if args.other else None, similar=args.similar)
        if args.json:
            print(json.dumps(asdict(report), indent=2))
        else:
            print("\n".join(lines(report, naming(reader), naming(second))))
