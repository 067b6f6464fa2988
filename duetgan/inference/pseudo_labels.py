"""Label images with what a classifier is sure of, for another training (Lee 2013, "Pseudo-Label").

`duet pseudo-labels --checkpoint RUN --data rest.lmdb --labelled few.lmdb --out more.lmdb`: those of
`rest.lmdb` whose likeliest class has the probability `--threshold` or more, with that class, behind
the images of `few.lmdb` with their own. Labels that `rest.lmdb` may have are not used; how many
guesses agree with them is told.
"""

import json
from pathlib import Path
from typing import Any

from duetgan.utils.checkpoint import file_sha256, resolve_for_people
from duetgan.utils.config.cli import Parser, add_model_options, file, number
from duetgan.utils.errors import UserError, require_same_classes

THRESHOLD = 0.95  # that of FixMatch (2001.07685)


def parser() -> Parser:
    options = Parser(prog="duet pseudo-labels", description=__doc__)
    add = options.add_argument
    add_model_options(options)
    add("--data", required=True, metavar="X.lmdb", help="the images without labels")
    add("--labelled", metavar="X.lmdb", help="images with labels, which come first with their own")
    add(
        "--spread",
        action="store_true",
        help="by neighbours of --labelled in its features; threshold: a share",
    )
    add(
        "--threshold",
        type=number(float, 0, 1),
        metavar="P",
        help=f"least probability ({THRESHOLD}), or share (0.5)",
    )
    add("--out", required=True, type=file(".lmdb"), metavar="FILE.lmdb", help="the file to make")
    add("--overwrite", action="store_true", help="replace it if it exists")
    add("--json", action="store_true", help="print one JSON document instead of lines")
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    if options.spread and not options.labelled:
        raise UserError("--spread needs the images whose labels spread: give --labelled X.lmdb")
    if options.threshold is None:
        options.threshold = 0.5 if options.spread else THRESHOLD
    path = resolve_for_people(options.checkpoint, options.which)
    from duetgan.data.lmdb.writer import check_target
    from duetgan.data.reading.dataset import dataset_for_model
    from duetgan.inference.dataset import guesses, spread_guesses, write_labelled
    from duetgan.models.restore import classifier_from, read
    from duetgan.utils.distributed.collectives import choose_device

    check_target(options.out, options.overwrite)
    checkpoint = read(path)
    classifier = classifier_from(checkpoint, choose_device(options.device))
    classes: list[str] = checkpoint["classes"]
    first = dataset_for_model(options.labelled, checkpoint) if options.labelled else None
    with dataset_for_model(options.data, checkpoint) as reader:
        if first is not None:
            require_same_classes(options.labelled, first.classes, "the classifier", classes)
        if options.spread and first is not None:
            labels, sure = spread_guesses(classifier, reader, first, batch_size=options.batch_size)
        else:
            labels, sure = guesses(classifier, reader, batch_size=options.batch_size)
        kept = (sure >= options.threshold).nonzero()[0]
        if not len(kept):
            raise UserError(
                f"--threshold {options.threshold:g}: no image of {options.data} reaches it; lower it"
            )
        known = reader.classes == classes  # then the share of right labels is
        summary: dict[str, Any] = {
            "images": len(reader),
            "threshold": options.threshold,
            "kept": len(kept),
            "by_class": {
                name: int((labels[kept] == label).sum()) for label, name in enumerate(classes)
            },
            "right": float((reader.labels() == labels)[kept].mean()) if known else None,
        }
        parts = [(reader, kept, labels[kept])]
        if first is not None:
            parts.insert(0, (first, range(len(first)), first.labels()))
            summary["labelled"] = len(first)
        by = "/".join(path.parts[-3:]) + (
            f" sha256 {file_sha256(path)[:16]}" if path.is_file() else ""
        )
        meta = write_labelled(
            options.out,
            parts,
            classes,
            source=f"{options.data} labelled by {by} from {options.threshold:g} on",
            overwrite=options.overwrite,
        )
    summary["count"] = meta.count
    print(
        json.dumps(summary, indent=1, allow_nan=False)
        if options.json
        else "\n".join(lines(summary, options.out))
    )
    return 0


def lines(summary: dict[str, Any], out: Path) -> list[str]:
    kept, images, least = summary["kept"], summary["images"], summary["threshold"]
    text = [f"{kept:,} of {images:,} images ({kept / images:.1%}) are labelled from {least:g} on"]
    text += [f"  {name}: {count:,}" for name, count in summary["by_class"].items()]
    text += (
        [f"{summary['right']:.1%} of these labels are those of the file"]
        if summary["right"] is not None
        else []
    )
    return [*text, f"wrote {out}: {summary['count']:,} images"]
