"""Label images with a classifier's confident predictions, to train another classifier on them.

The method is "Pseudo-Label" (Lee 2013). Example: `duet pseudo-labels --checkpoint RUN --data
unlabelled.lmdb --labelled few.lmdb --out more.lmdb`. The new file has all images of `few.lmdb` with
their labels. It also has the images of `unlabelled.lmdb` whose predicted class has at least the
probability `--threshold`; this class becomes their label. If `unlabelled.lmdb` has labels already,
they are not used. The command only prints how many of them agree with the predictions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.utils.checkpoint import file_sha256, resolve
from duetgan.utils.config.cli import Parser, add_model_options, file, number
from duetgan.utils.errors import UserError, require_same_classes

THRESHOLD = 0.95  # the threshold of FixMatch (2001.07685)


def parser() -> Parser:
    options = Parser(prog="duet pseudo-labels", description=__doc__)
    add = options.add_argument
    add_model_options(options)
    add("--data", required=True, metavar="X.lmdb", help="the images without labels")
    add("--labelled", metavar="X.lmdb", help="images with labels, which come first with their own")
    add(
        "--threshold",
        type=number(float, 0, 1),
        default=THRESHOLD,
        metavar="P",
        help=f"least probability (default: {THRESHOLD})",
    )
    add("--out", required=True, type=file(".lmdb"), metavar="FILE.lmdb", help="the file to make")
    add("--overwrite", action="store_true", help="replace it if it exists")
    add("--json", action="store_true", help="print one JSON document instead of lines")
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    path = resolve(options.checkpoint, options.which)
    from duetgan.data.lmdb.writer import check_target
    from duetgan.data.opening import dataset_for_model
    from duetgan.inference.dataset import predicted_labels, write_labelled
    from duetgan.models.restore import classifier_from, read
    from duetgan.utils.distributed.collectives import choose_device

    check_target(options.out, options.overwrite)
    checkpoint = read(path)
    classifier = classifier_from(checkpoint, choose_device(options.device))
    classes: list[str] = checkpoint["classes"]
    first = dataset_for_model(options.labelled, checkpoint) if options.labelled else None
    with dataset_for_model(options.data, checkpoint) as dataset:
        if first is not None:
            require_same_classes(options.labelled, first.classes, "the classifier", classes)
        labels, confidence = predicted_labels(classifier, dataset, batch_size=options.batch_size)
        records = (confidence >= options.threshold).nonzero()[0]
        if not len(records):
            raise UserError(
                f"--threshold {options.threshold:g}: no image of {options.data} reaches it; lower it"
            )
        counts = np.bincount(labels[records], minlength=len(classes)).tolist()
        accuracy = None
        if dataset.classes == classes:  # otherwise the true labels are unknown
            accuracy = float((dataset.labels() == labels)[records].mean())
        summary: dict[str, Any] = {
            "images": len(dataset),
            "threshold": options.threshold,
            "kept": len(records),
            "by_class": dict(zip(classes, counts, strict=True)),
            "right": accuracy,
        }
        parts = [(dataset, records, labels[records])]
        if first is not None:
            parts.insert(0, (first, range(len(first)), first.labels()))
            summary["labelled"] = len(first)
        labeller = "/".join(path.parts[-3:])
        if path.is_file():
            labeller += f" sha256 {file_sha256(path)[:16]}"
        meta = write_labelled(
            options.out,
            parts,
            classes,
            source=f"{options.data} labelled by {labeller} from {options.threshold:g} on",
            overwrite=options.overwrite,
        )
    summary["count"] = meta.count
    if options.json:
        print(json.dumps(summary, indent=1, allow_nan=False))
    else:
        print("\n".join(lines(summary, options.out)))
    return 0


def lines(summary: dict[str, Any], out: Path) -> list[str]:
    """Return the summary of `duet pseudo-labels` as lines of text."""
    count, images = summary["kept"], summary["images"]
    text = [
        f"{count:,} of {images:,} images ({count / images:.1%}) reach the threshold of {summary['threshold']:g}"
    ]
    text += [f"  {name}: {number:,}" for name, number in summary["by_class"].items()]
    if summary["right"] is not None:
        text.append(f"{summary['right']:.1%} of these labels agree with those of the file")
    return [*text, f"wrote {out}: {summary['count']:,} images"]
