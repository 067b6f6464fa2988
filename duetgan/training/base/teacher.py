"""A trained classifier whose predictions train another network."""

import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.preparation import fit_images
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.errors import UserError


class Teacher:
    """The frozen classifier of a run, whose logits train another network.

    It maps images [N, C, H, W] in [-1, 1] of any size to logits [N, classes]. The attribute
    `lineage` is what the other network's lineage gains from this teacher. `option` is the config
    key whose value is `run`, for messages.

    Raises UserError if the classifier's classes differ from those of the images.
    """

    def __init__(self, option: str, run: str, dataset: Dataset, device: torch.device) -> None:
        checkpoint = load(resolve(run))
        has_label_sets = dataset.meta.sets is not None
        network = classifier_from(checkpoint, device, several=has_label_sets)
        same_classes = list(checkpoint["classes"]) == list(dataset.classes)
        if not same_classes or (network.thresholds is not None) != has_label_sets:
            raise UserError(
                f"{option} {run}: its classes differ from those of {dataset.path}; train it on the "
                "same classes"
            )
        self.network = network
        self.lineage = Lineage.of(
            teachers=[fingerprint(network)], pretrained=network.lineage.pretrained
        )

    def __call__(self, images: Tensor) -> Tensor:
        fitted = fit_images(images, self.network.resolution, self.network.channels)
        logits: Tensor = self.network(fitted)
        return logits
