"""Pack images into one file for training: `duet pack SOURCE DEST.lmdb`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import cv2

from duetgan.data.lmdb.format import ENCODINGS
from duetgan.data.lmdb.writer import check_target
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import DEPTHS
from duetgan.data.packing.sources import CLASSES_FROM, NAMED, SPLITS, open_source
from duetgan.utils.config.cli import (
    TABLE_OPTIONS,
    Parser,
    add_import_option,
    add_table_options,
    image_size,
    number,
)
from duetgan.utils.errors import explained
from duetgan.utils.image_spec import MOST_CHANNELS
from duetgan.utils.machine import tune_malloc
from duetgan.utils.text import listed, printable

T = TypeVar("T")
RESERVED_BYTES = 128 << 20  # memory that malloc holds in huge pages


def _or_auto(read: Callable[[str], T], auto: str | None) -> Callable[[str], T | str | None]:
    """Return a parser of an option's text, to be passed to `add_argument` as `type`.

    The parser returns the argument `auto` for the text "auto", and `read(text)` for other texts.
    """
    return lambda text: auto if text == "auto" else read(text)


def _range(text: str) -> tuple[float, float]:
    message = f"{text[:40]!r} is not two numbers such as 0,4095"
    with explained(ValueError, lambda _: argparse.ArgumentTypeError(message)):
        low, high = map(float, text.split(","))
    return low, high


def make_parser() -> Parser:
    parser = Parser(prog="duet pack", description="Pack images into one file for training.")
    add = parser.add_argument
    add_import_option(parser)
    text = "folder, .zip, .tar or LMDB file, or table (.csv, .tsv, .parquet)"
    add("source", help=f"{text}, or one of: {', '.join(NAMED)}")
    add("dest", type=Path, metavar="DEST.lmdb", help="the packed file to write")
    add(
        "--size",
        type=image_size,
        metavar="N|WxH",
        help="size of the images in px: a side, or width x height (default: unchanged)",
    )
    add(
        "--pyramid",
        type=int,
        metavar="M",
        dest="smallest",
        help="also store the images at N/2, N/4, ... down to M px",
    )
    add(
        "--encoding",
        choices=ENCODINGS,
        default="raw",
        help="format of the stored images (default: raw)",
    )
    text = "1: grey, 3: RGB, 4: RGB and alpha, other numbers; auto: as many as the images have "
    text += "(default: 3 for image files, else as in the data set)"
    add(
        "--channels",
        type=_or_auto(number(int, 1, MOST_CHANNELS), "auto"),
        metavar="auto|1|3|4|N",
        help=text,
    )
    text = (
        "bits per value, or float; auto: as in the images (default: 8 for image files, else auto)"
    )
    add("--depth", choices=("auto", *DEPTHS), help=text)
    text = "range of 16-bit and float values, mapped to -1 and 1 (default: that of the images)"
    add("--range", type=_range, metavar="LOW,HIGH", dest="value_range", help=text)
    add("--split", choices=tuple(SPLITS), help="part of a source that has splits (default: train)")
    add(
        "--val-share",
        metavar="X",
        help="hold out this fraction of the images (0.1: a tenth), in DEST-val.lmdb",
    )
    add(
        "--val-dest",
        type=Path,
        metavar="FILE",
        help="file for the held-out images, instead of DEST-val.lmdb",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the random choice of held-out images (default: 0)",
    )
    add_table_options(parser)
    add(
        "--classes-from",
        choices=CLASSES_FROM,
        help="take classes from top-level folders, or from the folders that hold the images; none: no classes",
    )
    add(
        "--resize",
        choices=("auto", "crop", "pad"),
        default="auto",
        help="how to resize images, see docs/lmdb.md",
    )
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="reaction to images that cannot be read",
    )
    add(
        "--against",
        type=Path,
        metavar="OTHER.lmdb",
        help="take the classes of this file, and refuse others",
    )
    text = "additional threads (default: auto, one per core)"
    add("--workers", type=_or_auto(number(int, 0), None), metavar="N", help=text)
    add("--overwrite", action="store_true", help="replace DEST.lmdb if it exists")
    return parser


def main(argv: list[str]) -> None:
    options = vars(make_parser().parse_args(argv))
    dest = options["dest"]
    split = options["split"]
    check_target(dest, options["overwrite"])
    tune_malloc(RESERVED_BYTES)
    cv2.setNumThreads(1)  # each thread processes whole images
    del options["debug"]
    names = ("split", "classes_from", *TABLE_OPTIONS)
    source_options = {name: options.pop(name) for name in names}
    with open_source(options.pop("source"), size=options["size"], **source_options) as source:
        if source.splits and options["val_share"] is not None:
            source.remarks.append(
                f"{source.name} has splits of its own ({' and '.join(source.splits)}): --val-share holds out a part"
                f" of its {split or 'train'} images"
            )
        elif split is None and len(source.splits) > 1:
            parts = listed(source.splits)
            source.remarks.append(
                f"{source.name}: only its training images are packed; for the others run this again with --split (of "
                f"{parts}) and another DEST"
            )
        for remark in source.remarks:
            print(printable(remark), file=sys.stderr)
        summary = pack(source, **options)
    print("\n".join(summary.lines(dest)), flush=True)
