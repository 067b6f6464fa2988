"""The subject of an export: a network as a function of tensors, and inputs for the check."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.inference.samples import with_styles
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.protocol import Document
from duetgan.models.classifier import Classifier
from duetgan.models.fast import fold_batchnorm
from duetgan.models.gan import ImageGenerator, StyledGenerator, TruncationMean, draw
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.seeding import numpy_generator

Inputs = tuple[Tensor, ...]
Runner = Callable[[Inputs], Tensor]


def as_runner(network: nn.Module) -> Runner:
    """Return a function that calls the network with a tuple of its inputs."""
    return lambda inputs: network(*inputs)


SAMPLES = 64  # number of samples to check a generator with
EXAMPLES = 2  # rows of the inputs for tracing; torch.export would treat a batch of 1 as constant


class Drawing(nn.Module):
    """Module that generates images from z [N, z_dim] and labels, with stored noise.

    w is truncated by `psi` towards the `mean`. The images [N, channels, height, width] are in about
    [-1, 1]. Labels are int64 [N], or multi-hot floats [N, classes] if images may have several
    labels; an unconditional generator takes none.
    """

    centres: Tensor  # centres of the truncation: [labels, w_dim], or [w_dim] for all labels
    label_sets: Tensor  # [labels, classes], multi-hot, if images may have several labels

    def __init__(
        self, generator: ImageGenerator, psi: float = 1.0, mean: TruncationMean = "class"
    ) -> None:
        super().__init__()
        self.generator, self.psi = generator, psi
        if psi != 1:
            labels = (
                generator.conditions(torch.arange(generator.num_labels))
                if generator.num_labels
                else None
            )
            styled = with_styles(generator, "--truncation-psi")
            self.register_buffer(
                "centres", styled.truncation_centre(labels, mean), persistent=False
            )
            self.register_buffer("label_sets", labels, persistent=False)

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.psi == 1:
            return self.generator(z, labels, noise="const")
        generator, centre = cast(StyledGenerator, self.generator), self.centres
        # For several labels an image, use the centre of the nearest existing set of labels.
        if labels is not None and centre.ndim == 2:
            if labels.is_floating_point():
                labels_of_sets = (labels[:, None] - self.label_sets).abs().sum(2).argmin(1)
                centre = centre[labels_of_sets]
            else:
                centre = centre[labels]
        w = centre.lerp(generator.mapping(z, labels), self.psi)
        return generator.synthesis(w[:, None].expand(-1, generator.num_ws, -1), "const")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A trained network on the CPU, its description, and inputs to check an export with."""

    checkpoint: Checkpoint
    network: nn.Module  # in evaluation mode, a function of its inputs
    names: tuple[str, ...]  # names of the inputs
    output: str  # name of the output
    batches: list[Inputs]  # inputs of the check
    # int64 [n], the true classes of all batches' images; None: unknown, or a generator
    labels: Tensor | None = None
    # for a classifier: other images, for the ranges of int8 activations
    calibration: list[Inputs] = field(default_factory=list)
    # for a classifier: the results of `calibrate`, if a temperature was fitted
    temperature: Document | None = None
    # for a generator: the truncation, for the metadata
    truncation: dict[str, str] = field(default_factory=dict)
    licence: str = "unknown"  # licence in the model card

    @property
    def is_classifier(self) -> bool:
        return self.checkpoint["task"] == "classifier"

    def fast(self) -> nn.Module:
        """Return the network with BatchNorm folded into its convolutions.

        A generator has no BatchNorm and is returned unchanged.
        """
        return fold_batchnorm(self.network) if self.is_classifier else self.network

    def rows(self, count: int) -> Inputs:
        """Return `count` inputs of the check as one batch; repeat inputs if there are fewer."""
        columns = [torch.cat(column) for column in zip(*self.batches, strict=True)]
        rows = torch.arange(count) % len(columns[0])
        return tuple(_channels_last(column[rows]) for column in columns)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()


def generator_subject(
    checkpoint: Checkpoint, *, batch_size: int, psi: float, mean: TruncationMean
) -> Subject:
    """Return a GAN's generator with inputs to check an export with.

    `psi` and `mean` are the truncation. The latents are those that evaluation draws for seed 0. The
    labels are all classes (or label sets) in order, repeated until there are SAMPLES labels.
    """
    generator = generator_from(checkpoint, several=True)
    z, _ = draw(generator, range(SAMPLES), 0)
    labels = (
        generator.conditions(torch.arange(SAMPLES) % generator.num_labels)
        if generator.num_labels
        else None
    )
    columns = (z,) if labels is None else (z, labels)
    return Subject(
        checkpoint=checkpoint,
        network=Drawing(generator, psi, mean).eval(),
        truncation={} if psi == 1 else {"truncation_psi": f"{psi:g}", "truncation_mean": mean},
        names=("z", "labels")[: len(columns)],
        output="images",
        batches=list(zip(*(column.split(batch_size) for column in columns), strict=True)),
    )


def classifier_subject(
    checkpoint: Checkpoint,
    images: Dataset,
    *,
    count: int,  # largest number of images for the check
    batch_size: int,
    calibration: Dataset | None,  # images for int8; None: no int8 export
    calibrated: int,  # largest number of images for the calibration
) -> Subject:
    """Return a classifier with random images for the check, and other images to calibrate int8.

    `images` and `calibration` may be the same file. Raises UserError if the images' classes are not
    those of the classifier, or if there are too few images.
    """
    classifier = classifier_from(checkpoint, several=True)
    if images.classes:
        require_same_classes(
            images.path,
            images.classes,
            "the classifier",
            checkpoint["classes"],
            "give images of the same classes with --data",
        )
    order, ranges = _shuffled(images), []
    if calibration is not None:
        if calibration.meta.content_hash == images.meta.content_hash:
            # The check takes records from the beginning of the order, the calibration from its end.
            records = order[::-1][: min(calibrated, len(order) // 2)]
            order = order[: len(order) - len(records)]
        else:
            records = _shuffled(calibration)[:calibrated]
        ranges = _inputs(classifier, calibration, records, batch_size)[0]
    batches, labels = _inputs(classifier, images, order[:count], batch_size)
    if not batches or (calibration is not None and not ranges):
        raise UserError(
            f"{images.path}: too few images to check an export with; give another file with --data"
        )
    return Subject(
        checkpoint=checkpoint,
        network=classifier,
        names=("images",),
        output="logits",
        batches=batches,
        labels=labels if images.classes and images.meta.sets is None else None,
        calibration=ranges,
    )


def _shuffled(dataset: Dataset) -> np.ndarray:
    """Return all record numbers in a fixed random order, as files are often sorted by class."""
    return numpy_generator(0, "eval", "export").permutation(len(dataset))


def _inputs(
    classifier: Classifier, dataset: Dataset, records: np.ndarray, batch_size: int
) -> tuple[list[Inputs], Tensor]:
    """Return the records' images in batches, prepared for the classifier, and their labels."""
    batches: list[Inputs] = []
    labels = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, len(records), batch_size):
        batch = read_batch(dataset, np.sort(records[start : start + batch_size]))
        batches.append((_channels_last(classifier_input(classifier, batch.images)),))
        labels.append(batch.labels)
    return batches, torch.cat(labels)
