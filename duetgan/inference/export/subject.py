"""What is exported: a network as a plain function of tensors, and the inputs that it is checked
with. A trained network in one .safetensors file needs nothing else: the weights, and in the
metadata what they are.

The metadata's entry `duet` is the JSON of `contents`, so that what `read_weights` gives goes where
a checkpoint goes: `models.restore`. Other entries are those of `interface`.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.inference.samples import with_styles
from duetgan.metrics.features.extractors import classifier_input
from duetgan.models.classifier import Classifier
from duetgan.models.fast import fold_batchnorm
from duetgan.models.gan import ImageGenerator, StyledGenerator, TruncationMean, draw
from duetgan.models.restore import ENTRY, KEYS, NETWORKS, classifier_from, generator_from, passed_on
from duetgan.utils.errors import UserError, explained, require_same_classes
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import numpy_generator

# the part of its config that builds it
SECTIONS = {"classifier": ("model",), "gan": ("architecture", "generator")}
MORE = ("stage", "teachers", "sets")  # keys that not every checkpoint has


def contents(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a weights file says about its weights: a checkpoint without its state, and without paths
    and settings of the training, since such files are given to others.
    """
    task, config = checkpoint["task"], checkpoint["config"]
    sections = {name: config[name] for name in SECTIONS[task] if name in config}
    sections["data"] = {"resolution": (config.get("data") or {}).get("resolution")}
    data = {"resize_filter": checkpoint.get("data", {}).get("resize_filter", "none")}
    about = {name: checkpoint[name] for name in (*KEYS, *MORE) if name in checkpoint}
    return about | {"config": sections, "data": data, "lineage": passed_on(checkpoint).document()}


def interface(checkpoint: dict[str, Any]) -> dict[str, str]:
    """What a program that runs the network must know, for people and as metadata: `input`,
    `output`, and `classes`, which is JSON; of several labels an image also `thresholds`, JSON: the
    probabilities from which on it has them.
    """
    shape, classes = checkpoint["shape"], list(checkpoint["classes"])
    size = (checkpoint["config"].get("data") or {}).get("resolution") or shape["resolution"]
    spec = ImageSpec.read({**shape, "resolution": size})
    rule = (
        "pixels / 127.5 - 1"
        if spec.plain
        else f"(values - {spec.low:g}) / {(spec.high - spec.low) / 2:g} - 1"
    )
    rule += "; then x becomes a (x + 1) - 1 in the colours, a alpha in [0, 1]" if spec.alpha else ""
    images = (
        f"images: float32 [N, {', '.join(map(str, spec.shape))}] in [-1, 1], {spec.words}: {rule}"
    )
    if checkpoint["task"] == "classifier":
        thresholds = checkpoint["state"][NETWORKS["classifier"]].get("thresholds")
        output = "logits: float32 [N, classes], in the order of `classes`; "
        output += (
            "softmax gives probabilities"
            if thresholds is None
            else "sigmoid gives each label's probability"
        )
        more = {} if thresholds is None else {"thresholds": json.dumps(thresholds.tolist())}
        return {"input": images, "output": output, "classes": json.dumps(classes), **more}
    names = "; labels: int64 [N], places in `classes`" if classes else ""
    names = (
        "; labels: float32 [N, classes], 1 for each of `classes` that is there"
        if checkpoint.get("sets")
        else names
    )
    return {
        "input": f"z: float32 [N, z_dim], normal{names}",
        "output": images,
        "classes": json.dumps(classes),
    }


def write_weights(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write the network that `checkpoint` is used for, its average one, and what it is. Raises
    OSError.
    """
    state = checkpoint["state"][NETWORKS[checkpoint["task"]]]
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_tensors(path, tensors, {ENTRY: json.dumps(contents(checkpoint)), **interface(checkpoint)})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    # it hides the system's error in its text
    with explained(SafetensorError, lambda why: OSError(f"{path}: {why}")):
        save_file(tensors, str(path), {"format": "pt"} | metadata)


Inputs = tuple[Tensor, ...]
Runner = Callable[[Inputs], Tensor]


def as_runner(network: nn.Module) -> Runner:
    """A network as a function of its tuple of inputs."""
    return lambda inputs: network(*inputs)


SAMPLES = 64  # of a generator, that it is checked with
EXAMPLES = 2  # rows that a network is traced with; a batch of one would be taken for a constant


class Drawing(nn.Module):
    """A generator as a function of z [N, z_dim] and labels [N] (int64; float [N, classes] of
    several an image; left out without classes): images [N, channels, height, width], about [-1, 1],
    with its stored noise, truncated to `psi`.
    """

    centres: Tensor  # w towards which it truncates: one for each label, or one for all
    sets: Tensor  # [labels, classes] of several an image

    def __init__(
        self, generator: ImageGenerator, psi: float = 1.0, mean: TruncationMean = "class"
    ) -> None:
        super().__init__()
        self.generator, self.psi = generator, psi
        if psi != 1:
            labels = (
                generator.conditions(torch.arange(generator.kinds)) if generator.kinds else None
            )
            styled = with_styles(generator, "--truncation-psi")
            self.register_buffer(
                "centres", styled.truncation_centre(labels, mean), persistent=False
            )
            self.register_buffer("sets", labels, persistent=False)

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.psi == 1:
            return self.generator(z, labels, noise="const")
        generator, centre = cast(StyledGenerator, self.generator), self.centres
        # of the nearest of the sets of labels that its images have
        if labels is not None and centre.ndim == 2:
            several = labels.is_floating_point()
            centre = centre[
                (labels[:, None] - self.sets).abs().sum(2).argmin(1) if several else labels
            ]
        w = centre.lerp(generator.mapping(z, labels), self.psi)
        return generator.synthesis(w[:, None].expand(-1, generator.num_ws, -1), "const")


class InBfloat16(nn.Module):
    """A network in bfloat16 that takes and gives float32: a copy whose weights are reduced, too, or
    under autocast, where what may be reduced without harm is for its layers to say.
    """

    def __init__(self, model: nn.Module, *, autocast: bool = False) -> None:
        super().__init__()
        self.autocast = autocast
        self.model = model if autocast else copy.deepcopy(model).eval().to(torch.bfloat16)

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            return self.model(
                *(inputs if self.autocast else (x.to(torch.bfloat16) for x in inputs))
            ).float()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A trained network on the CPU and what is known of it."""

    checkpoint: dict[str, Any]
    network: nn.Module  # in evaluation mode, a function of its inputs
    names: tuple[str, ...]  # of the inputs
    output: str  # name of the output
    batches: list[Inputs]  # what it is checked with
    # int64 [n], the true classes of all batches' images; None: unknown, or a generator
    labels: Tensor | None = None
    # a classifier's: other images, for the ranges of int8
    calibration: list[Inputs] = field(default_factory=list)
    # of a generator: entries of the program's metadata
    truncation: dict[str, str] = field(default_factory=dict)
    licence: str = "unknown"  # that a model card names

    @property
    def is_classifier(self) -> bool:
        return self.checkpoint["task"] == "classifier"

    def fast(self) -> nn.Module:
        """The network with BatchNorm folded; a generator, which has none, itself."""
        return fold_batchnorm(self.network) if self.is_classifier else self.network

    def rows(self, count: int) -> Inputs:
        """Inputs of `count` rows, those of the check over and over."""
        columns = [torch.cat(column) for column in zip(*self.batches, strict=True)]
        wanted = torch.arange(count) % len(columns[0])
        return tuple(_channels_last(column[wanted]) for column in columns)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()


def generator_subject(
    checkpoint: dict[str, Any], *, batch_size: int, psi: float = 1.0, mean: TruncationMean = "class"
) -> Subject:
    """A GAN's generator, with the latents of the samples that evaluation draws, seed 0, its classes
    in turn.
    """
    generator = generator_from(checkpoint, several=True)
    z, _ = draw(generator, range(SAMPLES), 0)
    labels = (
        generator.conditions(torch.arange(SAMPLES) % generator.kinds) if generator.kinds else None
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
    checkpoint: dict[str, Any],
    images: Dataset,
    *,
    count: int,  # images of the check, at most
    batch_size: int,
    calibration: Dataset | None = None,  # None: no int8 is wanted
    calibrated: int = 0,  # images of the calibration, at most
) -> Subject:
    """A classifier, with images drawn from the file, and others, from the same or another one, to
    calibrate with.
    Raises UserError if the images' classes are not the classifier's, or if too few are there.
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
        same = calibration.meta.content_hash == images.meta.content_hash
        others = order[::-1] if same else _shuffled(calibration)
        calibrated = min(calibrated, len(order) // 2 if same else len(others))
        order = order[: len(order) - calibrated] if same else order
        ranges = _inputs(classifier, calibration, others[:calibrated], batch_size)[0]
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


def _shuffled(reader: Dataset) -> np.ndarray:
    """All records in a random order: files are often packed class by class."""
    return numpy_generator(0, "eval", "export").permutation(len(reader))


def _inputs(
    classifier: Classifier, reader: Dataset, records: np.ndarray, batch_size: int
) -> tuple[list[Inputs], Tensor]:
    """The records' images as the classifier takes them, in batches, and their labels."""
    batches: list[Inputs] = []
    labels = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, len(records), batch_size):
        batch = read_batch(reader, np.sort(records[start : start + batch_size]))
        batches.append((_channels_last(classifier_input(classifier, batch.images)),))
        labels.append(batch.labels)
    return batches, torch.cat(labels)
