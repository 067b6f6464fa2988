"""A classifier that teaches a network in training."""

import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.classifier import fit_images
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from duetgan.utils.provenance import Lineage


class Teacher:
    """The frozen classifier of a run that `option` names: images [N, C, H, W] in [-1, 1] of any
    size -> logits [N, K]. `lineage` is what it makes of its pupil's. Raises UserError if its
    classes differ from those of the images.
    """

    def __init__(self, option: str, run: str, reader: Dataset, device: torch.device) -> None:
        checkpoint, sets = load(resolve(run)), reader.meta.sets is not None
        self.network = network = classifier_from(checkpoint, device, several=sets)
        if (list(checkpoint["classes"]), network.thresholds is not None) != (
            list(reader.classes),
            sets,
        ):
            raise UserError(
                f"{option} {run}: its classes differ from those of {reader.path}; train it on the same classes"
            )
        self.lineage = Lineage.of(
            teachers=[fingerprint(network)], pretrained=network.lineage.pretrained
        )

    def __call__(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(
            fit_images(images, self.network.resolution, self.network.channels)
        )
        return logits
