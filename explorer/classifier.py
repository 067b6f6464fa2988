"""What a classifier is asked for: an image's classes, the evidence, and the training images that spoke for it."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.explorer.generator import address
from duetgan.explorer.runs import Shown
from duetgan.inference.influence import checkpoint_files
from duetgan.inference.influence_scores import Part, check_data, images_of, influence, most, passes, snapshot
from duetgan.inference.inputs import Transform
from duetgan.inference.predictions import default_layer, image_heat, overlay
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.precision import device_of
from duetgan.utils.errors import UserError

CLASSES = 5  # the most likely ones, which are told
SPOKE = 8  # training images
MOST_KEPT = 500_000  # training images times checkpoints: about a gigabyte


def name(shown: Shown, content: bytes) -> dict[str, Any]:
    """The likely classes of the image in `content`, largest first, and the evidence for the first (Grad-CAM).

    Raises ImageError for what is no image.
    """
    classifier, image = shown.model, Transform.of(shown.checkpoint).read(content)
    row = judge_images(classifier, image[None])[0]
    order = row.sort(descending=True, stable=True).indices[:CLASSES].tolist()
    layer = default_layer(classifier)
    heat = image_heat(classifier, image[None], torch.tensor(order[:1]), layer)[0]
    seen, evidence = overlay(image, heat)
    return {
        "classes": [{"name": shown.classes[label], "probability": float(row[label])} for label in order],
        "image": address(seen),
        "evidence": address(evidence),
        "layer": layer if heat.any() else "",
    }


def spoke_for(shown: Shown, content: bytes, data: str | None = None) -> dict[str, Any]:
    """The training images that spoke most for the class that the image is given, by TracInCP over the run's
    checkpoints. `data`: these images in place of those that the config names.

    Raises ImageError for what is no image, UserError where the training images are not there or have other classes.
    """
    image = Transform.of(shown.checkpoint).read(content)
    label = int(judge_images(shown.model, image[None])[0].argmax())
    files, path = tuple(checkpoint_files(str(shown.path))), data or training_images(shown)
    with dataset_for_model(path, shown.checkpoint) as reader:
        check_data(reader, shown.checkpoint, path)
        few = len(reader) * len(files) <= MOST_KEPT
        parts = _kept(shown, files, path) if few else _parts(shown, files, reader)
        scores = influence(parts, len(reader), image, label)
        rows = most(scores, SPOKE)
        found = [
            {"record": row, "class": reader.classes[reader.labels()[row]], "score": float(scores[row])}
            | {"address": address(picture)}
            for row, picture in zip(rows, images_of(reader, rows), strict=True)
        ]
    return {"class": shown.classes[label], "found": found}


def _parts(shown: Shown, files: Sequence[Path], reader: Dataset) -> Iterator[Part]:
    return passes([snapshot(file, device_of(shown.model)) for file in files], reader)


@lru_cache(1)  # of the last run that was asked for
def _kept(shown: Shown, files: Sequence[Path], path: str) -> list[Part]:
    with dataset_for_model(path, shown.checkpoint) as reader:
        return list(_parts(shown, files, reader))


def training_images(shown: Shown) -> str:
    """The packed file that the config names: seen from here, else beside the run, where a quickstart lays it.

    Raises UserError where none is named.
    """
    named = (shown.checkpoint["config"].get("data") or {}).get("path")
    if named is None:
        raise UserError(f"{shown.name}: its config names no training images; start with --data X.lmdb")
    beside = shown.path.resolve().parent / "data" / Path(named).name
    return str(beside) if beside.exists() and not Path(named).exists() else str(named)
