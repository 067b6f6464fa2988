"""Find duplicates in a packed file, or between two: `duet duplicates A.lmdb [B.lmdb] [--similar]
[--json]`.
"""

import json
import sys
from pathlib import Path

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import SHOWN, find, lines, save_sheet, write_lines
from duetgan.utils.config.cli import Parser, file
from duetgan.utils.errors import UserError


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="duet duplicates",
        description="Report duplicates within a packed file, or images that two packed files share.",
    )
    parser.add_argument("path", type=Path, metavar="A.lmdb")
    parser.add_argument("other", type=Path, metavar="B.lmdb", nargs="?")
    parser.add_argument(
        "--similar", action="store_true", help="also search for images that look alike"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--list", type=Path, metavar="FILE", help="write all groups and pairs into a text file"
    )
    parser.add_argument(
        "--out", type=file(".png"), metavar="PNG", help=f"draw up to {SHOWN} pairs side by side"
    )
    args = parser.parse_args(argv)
    with LMDBReader(args.path) as reader, LMDBReader(args.other or args.path) as other:
        if args.other and args.other.samefile(args.path):
            raise UserError(
                f"{args.other} and {args.path} are the same file: give it once to search within it"
            )
        report = find(reader, other if args.other else None, similar=args.similar)
        text, all_of_it = lines(report), lines(report, None)
        if args.list:
            write_lines(args.list, all_of_it)
        elif text != all_of_it:
            text.append("all of them: add --list FILE")
        print(json.dumps(report.document(), indent=2) if args.json else "\n".join(text))
        if args.out and (report.exact or report.near):
            save_sheet(report, reader, other, args.out)
            print(f"pairs: {args.out}", file=sys.stderr if args.json else sys.stdout)
        elif args.out:
            print(f"no pairs, so {args.out} was not written", file=sys.stderr)
