"""A first convolution whose filters are made of training images before the first step."""

import numpy as np
import torch

from data.augment.transforms import to_float
from data.reading.dataset import Dataset
from data.reading.loader import read_batch
from models.classifier import Classifier
from utils.distributed import collectives

IMAGES = 5000  # that are looked at, at most
PART, PIXELS = 256, 1 << 22  # images that are in memory at a time, and their pixels, at most
_last: dict[tuple[object, ...], list[float]] = {}  # what was found last: one start of a training builds several tasks


@torch.no_grad()
def fit_first_filters(model: Classifier, reader: Dataset) -> None:
    """Where the backbone wants it, give the first convolution filters of images that lie evenly over the data, without
    augmentation; those that rank 0 finds, on all ranks. Another network stays as it is.
    """
    first_filters = model.backbone.first_filters
    if first_filters is None:
        return

    def found() -> list[float]:
        data, config = (reader.meta.content_hash, reader.resolution, reader.crop is None), model.config
        key = (*data, config.name, config.imagenet_normalised, model.side)
        if key not in _last:
            rows = np.linspace(0, len(reader) - 1, min(IMAGES, len(reader))).astype(np.int64)
            size = max(1, min(PART, PIXELS // max(reader.resolution, model.side or 0) ** 2))
            parts = (read_batch(reader, rows[start : start + size]).images for start in range(0, len(rows), size))
            filters = first_filters(model.prepare(to_float(part)) for part in parts).flatten().tolist()
            _last.clear()
            _last[key] = filters
        return _last[key]

    weight = model.network.get_submodule(model.backbone.first).weight
    weight.copy_(torch.tensor(collectives.from_main_process(found), dtype=weight.dtype).view_as(weight))
