"""Find duplicates within a packed file or between two.

Usage: `duet duplicates A.lmdb [B.lmdb] [--similar] [--json]`.
"""

import json
import sys
from pathlib import Path

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import MAX_DRAWN, find, lines, save_sheet, write_lines
from duetgan.utils.config.cli import Parser, file
from duetgan.utils.errors import UserError


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
    parser.add_argument(
        "--list", type=Path, metavar="FILE", help="write all groups and pairs to a text file"
    )
    parser.add_argument(
        "--out", type=file(".png"), metavar="PNG", help=f"draw up to {MAX_DRAWN} pairs side by side"
    )
    args = parser.parse_args(argv)
    with LMDBReader(args.path) as reader, LMDBReader(args.other or args.path) as second:
        if args.other and args.other.samefile(args.path):
            raise UserError(
                f"{args.other} and {args.path} are the same file: give it once to search within it"
            )
        report = find(reader, second if args.other else None, similar=args.similar)
        text = lines(report)
        all_lines = lines(report, None)
        if args.list:
            write_lines(args.list, all_lines)
        elif text != all_lines:
            text.append("add --list FILE to write all of them to a file")
        print(json.dumps(report.document(), indent=2) if args.json else "\n".join(text))
        if args.out and (report.exact or report.near):
            save_sheet(report, reader, second, args.out)
            print(f"pairs: {args.out}", file=sys.stderr if args.json else sys.stdout)
        elif args.out:
            print(f"no pairs, so {args.out} was not written", file=sys.stderr)
