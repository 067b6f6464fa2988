"""Which training images helped or hurt a prediction, and whose labels are likely wrong.

`python -m inference.influence --checkpoint RUN --data train.lmdb (--image FILE | --mislabelled) --out FILE.png`.
Every checkpoint that the run has kept counts, by its learning rate; train with `--checkpoint.keep 10` to have some.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duetgan.inference.settings import check_suffix, label_of
from duetgan.utils.checkpoint import load, newest_first, resolve
from duetgan.utils.classes import require_same_classes
from duetgan.utils.config.cli import Parser, add_import_option, positive
from duetgan.utils.errors import UserError
from duetgan.utils.files import check_writable
from duetgan.utils.script import run_cli

if TYPE_CHECKING:  # what needs torch is imported when the options are known to be right
    from torch import Tensor, device

    from duetgan.data.reading.dataset import Dataset
    from duetgan.inference.influence_scores import Part, Snapshot
    from duetgan.models.classifier import Classifier

TOP = 8  # images of each kind
MEASURES = ("self-influence", "probability")


def parser() -> Parser:
    options = Parser(prog="python -m inference.influence", description=__doc__)
    add_import_option(options)
    add = options.add_argument
    add("--checkpoint", required=True, metavar="RUN_OR_FILE", help="run folder (all its checkpoints) or one file")
    add("--data", required=True, metavar="X.lmdb", help="the training images")
    add("--image", metavar="FILE", help="show the training images that helped and hurt its prediction most")
    add("--label", metavar="NAME", help="the class to explain (default: the predicted one)")
    add("--mislabelled", action="store_true", help="show the training images whose labels are likely wrong")
    add("--by", choices=MEASURES, help="measure of --mislabelled (default: probability)")
    add("--top", type=positive, default=TOP, metavar="N", help=f"images of each kind (default: {TOP})")
    add("--out", required=True, type=Path, metavar="FILE.png", help="the image grid")
    add("--json", action="store_true", help="print one JSON document instead of a table")
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add("--batch-size", type=positive, default=64, metavar="N", help="changes speed and memory only (default: 64)")
    return options


def main(argv: list[str]) -> int:
    """Score all training images, write the grid, print the list."""
    options = parser().parse_args(argv)
    _check_options(options)
    files = checkpoint_files(options.checkpoint)
    from duetgan.data.reading.dataset import dataset_for_model
    from duetgan.inference.influence_scores import passes
    from duetgan.utils.distributed.collectives import choose_device

    last = load(files[-1])
    snapshots = [snapshot(file, choose_device(options.device)) for file in files]
    with dataset_for_model(options.data, last) as reader:
        check_data(reader, last, options.data)
        parts = passes(snapshots, reader, batch_size=options.batch_size)
        if options.mislabelled:
            answer = _mislabelled(options, parts, reader)
        else:
            answer = _explain(options, parts, reader, last, snapshots[-1].load())
    document = {"checkpoints": [str(file) for file in files], "data": str(options.data), **answer}
    print(json.dumps(document, indent=1, allow_nan=False) if options.json else _table(document))
    print(f"wrote {options.out}", file=sys.stderr)
    return 0


def _check_options(options: Namespace) -> None:
    if (options.image is None) == (not options.mislabelled):
        raise UserError("give either --image FILE or --mislabelled")
    if options.label is not None and options.image is None:
        raise UserError("--label belongs to --image; leave it out")
    if options.by is not None and not options.mislabelled:
        raise UserError("--by belongs to --mislabelled; leave it out")
    check_suffix(options.out, ".png")
    check_writable(options.out.parent)


def checkpoint_files(run_or_file: str) -> list[Path]:
    """All checkpoints of a run, the earliest first, or the one file."""
    file = resolve(run_or_file)
    return [file] if Path(run_or_file).is_file() else newest_first(file.parent)[::-1]


def snapshot(file: Path, device: "device") -> "Snapshot":
    """A classifier's checkpoint. Raises UserError for another task's."""
    from duetgan.inference.influence_scores import Snapshot, rate_of
    from duetgan.models.restore import classifier_from

    checkpoint = load(file, verify=False)
    if checkpoint["task"] != "classifier":
        raise UserError(f"{file}: is a checkpoint of task {checkpoint['task']!r}; give one of a classifier")
    # read again when its turn comes: all of a run's networks at once may not fit into memory
    return Snapshot(rate_of(checkpoint), lambda: classifier_from(load(file, verify=False), device))


def check_data(reader: "Dataset", checkpoint: dict[str, Any], path: str) -> None:
    """Raise UserError unless the images have the classifier's classes; note where they are not its training's."""
    remedy = "give the images that it was trained on"
    require_same_classes(path, reader.classes, "the classifier", checkpoint["classes"], remedy)
    if reader.meta.content_hash != (checkpoint.get("data") or {}).get("content_hash"):
        print(f"note: {path} is not what the classifier was trained on", file=sys.stderr)


# --- one prediction


def _explain(
    options: Namespace, parts: "Iterable[Part]", reader: "Dataset", checkpoint: dict[str, Any], model: "Classifier"
) -> dict[str, Any]:
    from duetgan.data.errors import ImageError
    from duetgan.inference.influence_scores import influence, most
    from duetgan.inference.predictions import judge_images, read_image
    from duetgan.utils.images import save_captioned

    classes, top = reader.classes, options.top
    try:
        image = read_image(options.image, checkpoint)
    except ImageError as error:
        raise UserError(f"{options.image}: {error}; give an image file") from error
    probabilities = judge_images(model, image[None])[0]
    named = int(probabilities.argmax())
    label = named if options.label is None else label_of(options.label, classes, "--label")
    scores = influence(parts, len(reader), image, label)
    kinds = {"helped": most(scores, top), "hurt": most(-scores, top)}
    names = [classes[number] for number in reader.labels()]
    blank = image.new_full(image.shape, 255)
    images, captions = [], []
    for first, head, (kind, rows) in zip(
        (image, blank), (f"named {classes[named]} {probabilities[named]:.2f}", ""), kinds.items(), strict=True
    ):
        empty = top - len(rows)
        images += [first, *images_of(reader, rows), *[blank] * empty]
        captions += [f"{head}\n{kind} {classes[label]}:", *(f"{row}: {names[row]}\n{scores[row]:+.3g}" for row in rows)]
        captions += [""] * empty
    save_captioned(images, captions, options.out, columns=top + 1)
    return {
        "image": options.image,
        "named": classes[named],
        "probability": float(probabilities[named]),
        "label": classes[label],
        **{
            kind: [{"record": row, "label": names[row], "score": float(scores[row])} for row in rows]
            for kind, rows in kinds.items()
        },
    }


# --- likely wrong labels


def _mislabelled(options: Namespace, parts: "Iterable[Part]", reader: "Dataset") -> dict[str, Any]:
    from duetgan.inference.influence_scores import suspicion
    from duetgan.utils.images import save_captioned

    result, classes = suspicion(parts, reader), reader.classes
    measure = options.by or "probability"
    rows = result.order(measure)[: options.top].tolist()
    others = result.probabilities.scatter(1, result.labels[:, None], -1).max(1)  # the likeliest class but the given
    suspects = [
        {
            "record": row,
            "label": classes[int(result.labels[row])],
            "given": float(result.given[row]),
            "named": classes[int(others.indices[row])],
            "probability": float(others.values[row]),
            "self_influence": float(result.self_influence[row]),
        }
        for row in rows
    ]
    captions = [f"{item['record']}: {item['label']} {item['given']:.2f}\n{item['named']}?" for item in suspects]
    save_captioned(images_of(reader, rows), captions, options.out, columns=min(10, len(rows)))
    return {"measure": measure, "issues": int((result.issues() >= 0).sum()), "mislabelled": suspects}


def images_of(reader: "Dataset", rows: list[int]) -> "list[Tensor]":
    """Records of a packed file, uint8 [C, H, W]."""
    import torch

    return list(torch.from_numpy(reader.read(rows)[0])) if rows else []


def _table(document: dict[str, Any]) -> str:
    if "mislabelled" in document:
        lines = [f"confident learning would change {document['issues']} labels; the first by {document['measure']}:"]
        for item in document["mislabelled"]:
            rather = f"rather {item['named']} {item['probability']:.3f}"
            lines.append(f"record {item['record']}: {item['label']} {item['given']:.3f}, {rather}")
        return "\n".join(lines)
    lines = [f"{document['image']}: {document['named']} {document['probability']:.3f}; for {document['label']}"]
    for kind in ("helped", "hurt"):
        lines += [f"{kind} {item['score']:+.3g}: record {item['record']}, {item['label']}" for item in document[kind]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_cli(main))
