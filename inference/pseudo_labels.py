"""Label images with what a classifier is sure of, for another training (Lee 2013, "Pseudo-Label").

`python -m inference.pseudo_labels --checkpoint RUN --data rest.lmdb --labelled few.lmdb --out more.lmdb`: those of
`rest.lmdb` whose likeliest class has the probability `--threshold` or more, with that class, behind the images of
`few.lmdb` with their own. Labels that `rest.lmdb` may have are not used; how many guesses agree with them is told.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duetgan.inference.settings import check_suffix
from duetgan.utils.checkpoint import file_sha256, load, resolve_for_people
from duetgan.utils.classes import require_same_classes
from duetgan.utils.config.cli import Parser, add_model_options, number
from duetgan.utils.errors import UserError
from duetgan.utils.script import run_cli

if TYPE_CHECKING:  # what needs torch is imported when the options are known to be right
    import numpy as np

    from duetgan.data.lmdb.format import Meta
    from duetgan.data.reading.dataset import Dataset
    from duetgan.models.classifier import Classifier

THRESHOLD = 0.95  # that of FixMatch (2001.07685)


def parser() -> Parser:
    options = Parser(prog="python -m inference.pseudo_labels", description=__doc__)
    add = options.add_argument
    add_model_options(options)
    add("--data", required=True, metavar="X.lmdb", help="the images without labels")
    add("--labelled", metavar="X.lmdb", help="images with labels, which come first with their own")
    add("--threshold", type=number(float, 0, 1), default=THRESHOLD, metavar="P", help="least probability")
    add("--out", required=True, type=Path, metavar="FILE.lmdb", help="the file to make")
    add("--overwrite", action="store_true", help="replace it if it exists")
    add("--json", action="store_true", help="print one JSON document instead of lines")
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    check_suffix(options.out, ".lmdb", "a data set is one LMDB file")
    path = resolve_for_people(options.checkpoint, options.which)
    from duetgan.data.lmdb.writer import check_target
    from duetgan.data.reading.dataset import dataset_for_model
    from duetgan.models.restore import classifier_from
    from duetgan.utils.distributed.collectives import choose_device

    check_target(options.out, options.overwrite)
    checkpoint = load(path)
    classifier = classifier_from(checkpoint, choose_device(options.device))
    classes: list[str] = checkpoint["classes"]
    with dataset_for_model(options.data, checkpoint) as reader:
        labels, sure = guesses(classifier, reader, batch_size=options.batch_size)
        summary = summarise(reader, classes, labels, sure, options.threshold)
        if not summary["kept"]:
            raise UserError(f"--threshold {options.threshold:g}: no image of {options.data} reaches it; lower it")
        kept = (sure >= options.threshold).nonzero()[0]
        parts = [(reader, kept, labels[kept])]
        if options.labelled:
            first = dataset_for_model(options.labelled, checkpoint)
            require_same_classes(options.labelled, first.classes, "the classifier", classes)
            parts.insert(0, (first, range(len(first)), first.labels()))
            summary["labelled"] = len(first)
        by = f"{'/'.join(path.parts[-3:])} sha256 {file_sha256(path)[:16]}"
        source = f"{options.data} labelled by {by} from {options.threshold:g} on"
        meta = write_labelled(options.out, parts, classes, source=source, overwrite=options.overwrite)
    summary["count"] = meta.count
    print(json.dumps(summary, indent=1, allow_nan=False) if options.json else "\n".join(lines(summary, options.out)))
    return 0


def guesses(classifier: "Classifier", reader: "Dataset", *, batch_size: int) -> "tuple[np.ndarray, np.ndarray]":
    """The likeliest class of every image, int64 [n], and its probability, float64 [n]."""
    import numpy as np
    import torch

    from duetgan.data.reading.loader import read_batch
    from duetgan.metrics.evaluate_gan import judge_images
    from duetgan.utils.runlog.progress import Bar

    labels, sure = [], []
    with Bar(total=len(reader), desc="labelling", unit="image") as bar:
        for start in range(0, len(reader), batch_size):
            batch = read_batch(reader, np.arange(start, min(start + batch_size, len(reader))))
            largest, likeliest = judge_images(classifier, batch.images).max(dim=1)
            labels.append(likeliest)
            sure.append(largest)
            bar.update(len(largest))
    return torch.cat(labels).numpy(), torch.cat(sure).numpy()


def summarise(
    reader: "Dataset", classes: list[str], labels: "np.ndarray", sure: "np.ndarray", threshold: float
) -> dict[str, Any]:
    """Of the images: how many there are and are kept, by class, and the share of right ones where that is known."""
    import numpy as np

    kept = sure >= threshold
    counts = np.bincount(labels[kept], minlength=len(classes)).tolist()
    known = reader.classes == classes and bool(kept.any())
    return {
        "images": len(reader),
        "threshold": threshold,
        "kept": int(kept.sum()),
        "by_class": dict(zip(classes, counts, strict=True)),
        "right": float((reader.labels() == labels)[kept].mean()) if known else None,
    }


def write_labelled(
    out: Path,
    parts: "Sequence[tuple[Dataset, Sequence[int] | np.ndarray, np.ndarray]]",  # images, which of them, their labels
    classes: Sequence[str],
    *,
    source: str,  # what the file says of where it comes from
    encoding: str | None = None,  # without loss; None: raw where the first file is, else PNG
    overwrite: bool = False,
) -> "Meta":
    """Pack images of one or several files with labels that they need not have there. A passport of samples stays.
    Raises UserError where the files' images differ in size.
    """
    from duetgan.data.lmdb.record import Layout
    from duetgan.data.lmdb.writer import LMDBWriter
    from duetgan.data.records import add_image

    first = parts[0][0]
    for reader, _, _ in parts:
        if (reader.resolution, reader.meta.channels) != (first.resolution, first.meta.channels):
            raise UserError(
                f"{reader.path}: images of {reader.resolution} px with {reader.meta.channels} channels, those of "
                f"{first.path} have {first.resolution} px and {first.meta.channels}; pack both alike"
            )
    encoding = encoding or ("raw" if first.meta.encoding == "raw" else "png")
    layout = Layout(channels=first.meta.channels, resolutions=(first.resolution,), encoding=encoding)
    passport = next((reader.meta.passport for reader, _, _ in parts if reader.meta.passport), None)
    more: dict[str, Any] = {"resize_filter": first.meta.resize_filter, "passport": passport, "overwrite": overwrite}
    with LMDBWriter(out, layout, classes=classes, source=source, **more) as writer:
        for reader, records, labels in parts:
            for record, label in zip(records, labels, strict=True):
                add_image(writer, reader.read([int(record)])[0][0].transpose(1, 2, 0), int(label))
        return writer.finish()


def lines(summary: dict[str, Any], out: Path) -> list[str]:
    kept, images, least = summary["kept"], summary["images"], summary["threshold"]
    text = [f"{kept:,} of {images:,} images ({kept / images:.1%}) are labelled from {least:g} on"]
    text += [f"  {name}: {count:,}" for name, count in summary["by_class"].items()]
    text += [f"{summary['right']:.1%} of these labels are those of the file"] if summary["right"] is not None else []
    return [*text, f"wrote {out}: {summary['count']:,} images"]


if __name__ == "__main__":
    sys.exit(run_cli(main))
