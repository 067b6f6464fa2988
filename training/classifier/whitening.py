"""A first convolution whose filters are made of training images before the first step."""

import numpy as np
import torch

from data.augment.transforms import to_float
from data.dataset import Dataset
from data.loader import read_batch
from models.classifier import Classifier
from utils.distributed import collectives

IMAGES = 5000  # that are looked at, at most


@torch.no_grad()
def fit_first_filters(model: Classifier, reader: Dataset) -> None:
    """Where the backbone wants it, give the first convolution filters of images that lie evenly over the data, without
    augmentation; those that rank 0 finds, on all ranks. Another network stays as it is.
    """
    first_filters = model.backbone.first_filters
    if first_filters is None:
        return

    def found() -> list[float]:
        rows = np.linspace(0, len(reader) - 1, min(IMAGES, len(reader))).astype(np.int64)
        images = model.prepare(to_float(read_batch(reader, rows).images))
        return first_filters(images).flatten().tolist()

    weight = model.network.get_submodule(model.backbone.first).weight
    weight.copy_(torch.tensor(collectives.on_main(found), dtype=weight.dtype).view_as(weight))
