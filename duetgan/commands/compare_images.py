"""Compare two sets of images: `duet compare-images IMAGES REFERENCE`."""

import json

from duetgan.metrics.protocol import GAN_IMAGES
from duetgan.utils.config.cli import Parser, add_import_option, image_size, number, positive


def parser() -> Parser:
    options = Parser(
        prog="duet compare-images",
        description="Compare two sets of images, such as samples and real images "
        "(docs/evaluation.md).",
    )
    add_import_option(options)
    add = options.add_argument
    add("images", metavar="IMAGES", help="folder, zip, tar or packed file of images")
    add("reference", metavar="REFERENCE", help="the images to compare with, in any of these forms")
    add(
        "--training",
        metavar="IMAGES",
        help="training images of the generator; floors compare them with the reference, and copies "
        "of them are searched for (default: floors compare two halves of the reference, and copies "
        "of the reference are searched for)",
    )
    add(
        "--extractor",
        action="append",
        dest="extractors",
        metavar="NAME",
        help="features: resnet50, inception, pixels or classifier:RUN_OR_FILE; may be repeated "
        "(default: resnet50)",
    )
    add(
        "--weights",
        metavar="FILE",
        help="weights of resnet50 or inception (default for resnet50: $DUET_WEIGHTS)",
    )
    add(
        "--n",
        type=positive,
        default=GAN_IMAGES,
        help=f"number of images of each set (default: at most {GAN_IMAGES:,})",
    )
    add("--seed", type=number(int), default=0, help="seed of the random choice of images")
    add(
        "--size",
        type=image_size,
        metavar="N|WxH",
        help="size in px that images are cropped and scaled to (default: unchanged)",
    )
    add("--batch-size", type=positive, default=64, metavar="N", help="images per batch")
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    return options


def main(argv: list[str]) -> None:
    options = vars(parser().parse_args(argv))
    is_json = options.pop("json")
    del options["debug"]
    # These import torch, which takes seconds, so the options are checked first.
    from duetgan.metrics.image_sets import compare_images
    from duetgan.metrics.tables import comparison_text

    extractors = options.pop("extractors") or ["resnet50"]
    document = compare_images(**options, extractors=extractors, progress=True).document
    text = json.dumps(document, indent=1, allow_nan=False) if is_json else comparison_text(document)
    print(text)
