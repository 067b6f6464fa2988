"""Pack images into one file for training: `duet pack SOURCE DEST.lmdb`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2

from duetgan.data.lmdb.format import ENCODINGS
from duetgan.data.lmdb.writer import check_target
from duetgan.data.packing.pack import pack
from duetgan.data.packing.split import summary_lines
from duetgan.data.records import DEPTHS
from duetgan.data.sources import CLASSES_FROM, NAMED, SPLITS, open_source
from duetgan.utils.config.cli import (
    TABLE_OPTIONS,
    Parser,
    add_import_option,
    add_table_options,
    number,
)
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import MOST_CHANNELS, ImageSpec
from duetgan.utils.memory import tune_malloc
from duetgan.utils.text import listed, printable

KEPT_BYTES = 128 << 20  # of freed memory


def _size(text: str) -> int | str:
    with explained(UserError, lambda why: argparse.ArgumentTypeError(str(why))):
        return (
            int(text)
            if text.isdecimal() and int(text) >= 4
            else ImageSpec.of(1, text[:40]).resolution
        )


def _or_auto(read: Callable[[str], Any], auto: str | None) -> Callable[[str], Any]:
    """An option's type: what `read` takes, or the word auto, which stands for `auto`."""
    return lambda text: auto if text == "auto" else read(text)


def _range(text: str) -> tuple[float, float]:
    told = f"{text[:40]!r} is not two numbers such as 0,4095"
    with explained(ValueError, lambda _: argparse.ArgumentTypeError(told)):
        low, high = map(float, text.split(","))
    return low, high


def make_parser() -> Parser:
    parser = Parser(prog="duet pack", description="Pack images into one file for training.")
    add = parser.add_argument
    add_import_option(parser)
    told = "folder, .zip, .tar or LMDB file, table (.csv, .tsv, .jsonl, .parquet), URL"
    add("source", help=f"{told}, or one of: {', '.join(NAMED)}")
    add("dest", type=Path, metavar="DEST.lmdb", help="the file to make")
    add(
        "--size",
        type=_size,
        metavar="N|WxH",
        help="the images' side in px, or width x height; default: their own",
    )
    add(
        "--pyramid",
        type=int,
        metavar="M",
        dest="smallest",
        help="also store the images at N/2, N/4, ... down to M px",
    )
    add("--encoding", choices=ENCODINGS, default="raw", help="how images are stored (default: raw)")
    told = "1: grey, 3: RGB, 4: RGB and alpha, others; auto: the images' own; default: the data set's own, 3 for files"
    add(
        "--channels",
        type=_or_auto(number(int, 1, MOST_CHANNELS), "auto"),
        metavar="auto|1|3|4|N",
        help=told,
    )
    told = "bits of a value, or floats; auto: the images' own; default: 8 for image files, else their own"
    add("--depth", choices=("auto", *DEPTHS), help=told)
    told = "of 16 bits and floats, seen as -1 and 1; default: found in the images"
    add("--range", type=_range, metavar="LOW,HIGH", dest="value_range", help=told)
    add("--split", choices=tuple(SPLITS), help="of a source that has splits (default: train)")
    add("--val-share", metavar="X", help="hold this share out (0.1: a tenth), into DEST-val.lmdb")
    add(
        "--val-dest",
        type=Path,
        metavar="FILE",
        help="for the held-out images, instead of DEST-val.lmdb",
    )
    add("--seed", type=int, default=0, help="of the draw of held-out images (default: 0)")
    add_table_options(parser)
    add(
        "--classes-from",
        choices=CLASSES_FROM,
        help="classes: folders at the top, folders that hold the images, files' names; none: all images without",
    )
    add(
        "--stack",
        metavar="PATTERN",
        help="files that hold a channel each, by name: {name}_{channel}.tif",
    )
    add("--resize", choices=("auto", "crop", "pad"), default="auto", help="see docs/lmdb.md")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="for images that cannot be read",
    )
    add(
        "--max-skipped",
        type=number(int, 0),
        metavar="N",
        help="what skip leaves out at most; default: 100 or 1 %%, if more",
    )
    add(
        "--against",
        type=Path,
        metavar="OTHER.lmdb",
        help="take its classes, refuse others; report images in both",
    )
    add(
        "--apart",
        type=Path,
        metavar="OTHER.lmdb",
        help="leave out images that it holds, or that look like one of its",
    )
    add("--similar", action="store_true", help="also report images that look alike")
    add("--drop-duplicates", action="store_true", help="keep only the first of equal images")
    add(
        "--no-duplicates",
        action="store_false",
        dest="duplicates",
        help="do not report equal images",
    )
    told = "threads besides this one; default: auto, one a core"
    add("--workers", type=_or_auto(number(int, 0), None), metavar="N", help=told)
    add("--overwrite", action="store_true", help="replace DEST.lmdb if it exists")
    return parser


def main(argv: list[str]) -> None:
    options = vars(make_parser().parse_args(argv))
    dest, split, val_share = options["dest"], options["split"], options["val_share"]
    check_target(dest, options["overwrite"])
    tune_malloc(KEPT_BYTES)
    cv2.setNumThreads(1)  # images go to threads whole
    del options["debug"]
    of_source = {
        name: options.pop(name) for name in ("split", "classes_from", "stack", *TABLE_OPTIONS)
    }
    with open_source(options.pop("source"), size=options["size"], **of_source) as source:
        if source.splits and val_share is not None:
            splits = f"{source.name} has splits of its own ({' and '.join(source.splits)})"
            if split is not None:
                raise UserError(
                    f"{splits}: drop --val-share to pack --split {split}, or drop --split to hold out a part of its"
                    " training images"
                )
            source.remarks.append(f"{splits}: --val-share holds out a part of its training images")
        elif split is None and len(source.splits) > 1:
            parts = listed(source.splits)
            source.remarks.append(
                f"{source.name}: only its training images are packed; for the others run this again with --split (of "
                f"{parts}) and another DEST"
            )
        warnings = [remark for remark in source.remarks if remark.startswith("warning: ")]
        for remark in source.remarks:
            if remark not in warnings:
                print(printable(remark), file=sys.stderr)
        summary = pack(source, **options)
    print("\n".join(summary_lines(summary, dest)), flush=True)
    for warning in warnings:  # last, where they are seen
        print(printable(warning), file=sys.stderr)
