"""Open the images of a training or an evaluation: packed files, tar files, folders, zip files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duetgan.data.images.decode import RandomCrop
from duetgan.data.packing.packed_files import Paths, packed_files
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.machine import cores


def open_dataset(
    path: Paths,
    kind: type[Dataset] = Dataset,
    *,
    resolution: int | str | None = None,
    crop: RandomCrop | None = None,
    workers: int = 0,
) -> Dataset:
    """Open packed files, tar files, or a folder or zip file of images, as a data set.

    Images that are not in packed files are packed first, once, into the user's cache.

    Args:
        path: see `shard_paths` in data/packing/packed_files.py.
        kind: the class of the result, Dataset or a subclass, whose documentation describes the
            other arguments and the errors.
    """
    name = " + ".join(map(str, path)) if isinstance(path, (list, tuple)) else str(path)
    return kind(
        packed_files(path),
        name=name,
        resolution=resolution,
        crop=crop,
        workers=workers,
    )


def dataset_for_model(path: str | Path, checkpoint: Mapping[str, Any]) -> Dataset:
    """Open images at the resolution and with the class order that a checkpoint's model needs.

    The images are read at `data.resolution` of the checkpoint's config. If this key is not set,
    they are read at the model's resolution, provided that they are stored at it or have individual
    sizes. All other images are read as stored, and the caller must refuse a wrong size.

    Labels are renumbered to the model's class order if the images have the same classes as the
    model. For a classifier, the images may lack some of its classes. The labels of images with
    several classes each (label sets) are never renumbered.

    Raises UserError if the images' pixel format is not the model's.
    """
    resolution = (checkpoint["config"].get("data") or {}).get("resolution")
    model_resolution = checkpoint["shape"]["resolution"]
    model_spec = ImageSpec.read(checkpoint["shape"])
    dataset = open_dataset(path)
    spec = dataset.meta.spec
    if model_spec.pixel_format != spec.pixel_format:
        raise UserError(
            f"{path}: its images are {spec.words}, those of the model's training"
            f" {model_spec.words}; pack them alike, with --range where that differs"
        )
    stored = [spec.at(side).resolution for side in dataset.meta.resolutions]
    if resolution is None and (stored == [0] or model_resolution in stored):
        resolution = model_resolution
    if resolution is not None:
        dataset = open_dataset(path, resolution=resolution, workers=cores())
    model_classes = checkpoint.get("classes", [])
    classes = set(dataset.classes)
    same = classes == set(model_classes)
    if checkpoint.get("task") == "classifier":
        same = same or classes < set(model_classes)
    if classes and same and dataset.classes != model_classes and dataset.meta.sets is None:
        dataset.relabel(model_classes)
    return dataset
