"""Files of samples for training, and what may be done to make them better: selection, spread, several checkpoints.

The ingredients are those of GaFi (Lampis et al. 2023, 2305.10118): its filter keeps what a classifier is sure of, its
recycling draws new samples while training, its expansion draws latents from a wider distribution. StyleGAN2 normalises
z, so that here w is spread, about its class's mean.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.lmdb.record import Layout
from data.lmdb.writer import LMDBWriter
from data.reading.dataset import Dataset
from data.reading.loader import read_batch
from data.records import add_image
from inference.samples import with_styles
from metrics.features.extractors import classifier_input
from metrics.features.precision import device_of, evaluating, full_float32
from metrics.lineage import passport_of
from metrics.samples.memorisation import nearest
from models.classifier import Classifier
from models.gan import draw, generate
from models.restore import generator_from
from utils.checkpoint import load
from utils.config.model import Config, PositiveFloat, PositiveInt
from utils.errors import UserError
from utils.runlog.progress import Bar

BLOCK = 64  # samples a pass, always the same ones together: rounding depends on a batch's size
LEAST_KEPT = 0.02  # of the samples drawn, that a rule must keep
MEAN_OF = 1000  # latents whose mean w is a class's

Rule = Callable[[Tensor, int], Tensor]  # samples uint8 [n, C, H, W] and their class -> which are kept, bool [n]
Band = tuple[float, float]


class Drawing(Config):
    """What is done to samples; the defaults: nothing."""

    recognised: bool = False  # keep those that the selector names as asked
    confidence: Band | None = None  # keep those to whose class it gives a probability from the first to the second
    # keep those whose distance to the nearest training image of their class (the selector's features) lies between two
    # quantiles of what it is for held-out images: [0, 0.95] leaves out what is farther than 95 % of these
    distance: Band | None = None
    fresh: bool = False  # draw as many as training sees images, so that none is seen twice
    checkpoints: PositiveInt = 1  # the last so many of the generator's run take turns
    psi: PositiveFloat = 1.0  # above 1: w is spread about its class's mean

    def check(self) -> None:
        for name in ("confidence", "distance"):
            band = getattr(self, name)
            if band is not None and not 0 <= band[0] < band[1] <= 1:
                raise UserError(f"{name} {list(band)}: give two numbers from 0 to 1, the smaller one first")

    @property
    def selects(self) -> bool:
        return self.recognised or self.confidence is not None or self.distance is not None

    def __str__(self) -> str:
        """In words, for the table and for the samples' passport; "as drawn" where nothing is done."""
        parts = ["recognised as asked"] if self.recognised else []
        for name in ("confidence", "distance"):
            if band := getattr(self, name):
                parts.append(f"{name} {band[0]:g} to {band[1]:g}")
        parts += ["none seen twice"] if self.fresh else []
        parts += [f"{self.checkpoints} checkpoints in turn"] if self.checkpoints > 1 else []
        parts += [f"psi {self.psi:g}"] if self.psi != 1 else []
        return ", ".join(parts) or "as drawn"

    def alone(self) -> dict[str, "Drawing"]:
        """Each of the ingredients that are set, alone."""
        given = self.model_dump(exclude_defaults=True)
        return {name: Drawing(**{name: value}) for name, value in given.items()}


class Selector:
    """A rule: a classifier's answers, and distances in its features.

    The training images are those of the generator; the held-out ones give the distances' quantiles. Raises UserError
    where a class has no image of either kind.
    """

    def __init__(self, drawing: Drawing, classifier: Classifier, training: Dataset, held_out: Dataset) -> None:
        self.drawing, self.classifier = drawing, classifier
        self.references: list[Tensor] = []  # features of each class's training images
        self.bounds: list[tuple[float, float]] = []  # distances, by class
        if drawing.distance is None:
            return
        references, queries = (self._features_by_class(reader) for reader in (training, held_out))
        for own, other in zip(references, queries, strict=True):
            near = nearest(other, own).distances
            low, high = near.quantile(torch.tensor(drawing.distance, dtype=near.dtype)).tolist()
            self.bounds.append((low if drawing.distance[0] else 0.0, high))
        self.references = references

    def __call__(self, images: Tensor, label: int) -> Tensor:
        features, probabilities = self._answers(images)
        kept = torch.ones(len(images), dtype=torch.bool)
        if self.drawing.recognised:
            kept &= probabilities.argmax(1) == label
        if self.drawing.confidence is not None:
            low, high = self.drawing.confidence
            kept &= (probabilities[:, label] >= low) & (probabilities[:, label] <= high)
        if self.references and kept.any():
            low, high = self.bounds[label]
            near = nearest(features[kept], self.references[label]).distances
            kept[kept.clone()] = (near >= low) & (near <= high)
        return kept

    def _answers(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features float32 [n, F] and probabilities float64 [n, K], on the CPU."""
        with evaluating(self.classifier), full_float32(device_of(self.classifier)):
            features = self.classifier.features(classifier_input(self.classifier, images))
            return features.float().cpu(), self.classifier.head(features).double().softmax(1).cpu()

    def _features_by_class(self, reader: Dataset) -> list[Tensor]:
        parts = np.array_split(np.arange(len(reader)), -(-len(reader) // BLOCK))
        features = torch.cat([self._answers(read_batch(reader, part).images)[0] for part in parts])
        labels = torch.from_numpy(reader.labels().copy())
        found = [features[labels == label] for label in range(self.classifier.classes)]
        if lacking := [reader.classes[label] for label, rows in enumerate(found) if not len(rows)]:
            raise UserError(f"{reader.path}: no image of class {lacking[0]}, which drawing.distance needs")
        return found


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """The checkpoints of the `count` last steps of a run. Raises UserError where it kept fewer."""
    found = sorted((run / "checkpoints").glob("step-*.pt"))
    if len(found) < count:
        raise UserError(f"{run} keeps {len(found)} checkpoints, {count} are asked for; raise its checkpoint.keep")
    return found[-count:]


def draw_samples(
    out: Path,
    files: Sequence[Path],  # checkpoints of a generator
    counts: Sequence[int],  # samples of each class
    *,
    seed: int,
    drawing: Drawing,
    rule: Rule | None = None,  # the drawing's Selector
    device: torch.device | str = "cpu",
) -> list[float]:
    """Write a packed file of samples, class by class; returns the share that was kept of each class.

    Sample i of class c, before the selection, has the key (seed, "study", "sample", c, i) and is of checkpoint
    (i // 64) modulo their number. Raises UserError for an unconditional generator, other classes than there are
    counts, and a rule that keeps less than `LEAST_KEPT`.
    """
    checkpoints = [load(file) for file in files]
    generators = [generator_from(checkpoint, device) for checkpoint in checkpoints]
    last: Any = generators[-1]
    if last.classes != len(counts):
        raise UserError(f"{files[-1]}: a generator of {last.classes} classes, the images have {len(counts)}")
    about = str(drawing) if drawing != Drawing() else None
    passport = passport_of(last, checkpoints[-1], seed=seed, truncation_psi=drawing.psi, selection=about)
    layout = Layout(channels=last.channels, resolutions=(last.resolution,), encoding="raw")
    classes, shares = list(checkpoints[-1]["classes"]), []
    writer = LMDBWriter(out, layout, classes=classes, source="samples of a study", passport=passport, overwrite=True)
    with writer, Bar(total=sum(counts), desc="samples", unit="image") as bar, full_float32(device):
        for label, wanted in enumerate(counts):
            drawn = taken = 0
            for images in _of_class(generators, label, seed, drawing.psi) if wanted else ():
                drawn += len(images)
                kept = images if rule is None else images[rule(images, label)]
                for image in kept[: wanted - taken]:
                    add_image(writer, np.ascontiguousarray(image.permute(1, 2, 0).numpy()), label)
                    bar.update()
                taken += len(kept)
                if taken >= wanted:
                    break
                if taken < LEAST_KEPT * drawn - BLOCK:
                    what = f"{taken} of {drawn:,} samples of class {classes[label]}"
                    raise UserError(f"drawing ({drawing}) keeps {what}; ask for less, or train the generator longer")
            shares.append(taken / drawn if drawn else 1.0)
        writer.finish()
    return shares


def _of_class(generators: Sequence[Any], label: int, seed: int, psi: float) -> Iterator[Tensor]:
    """Samples of a class without end, uint8 [BLOCK, C, H, W], the generators in turn."""
    for generator in generators if psi != 1 else ():
        _centre(generator, label)
    labels = torch.full((BLOCK,), label)
    for number, generator in enumerate(itertools.cycle(generators)):
        indices = range(number * BLOCK, (number + 1) * BLOCK)
        yield generate(
            generator, labels=labels, indices=indices, seed=seed, truncation_psi=psi, stream=("study", "sample", label)
        )


@torch.no_grad()
def _centre(generator: Any, label: int) -> None:
    """Let `w_avg`, from which psi is measured, be the mean w of a class: key (0, "study", "mean")."""
    with_styles(generator, "a psi other than 1")
    z, _ = draw(generator, range(MEAN_OF), 0, ("study", "mean"))
    labels = torch.full((MEAN_OF,), label, device=generator.w_avg.device)
    generator.w_avg.copy_(generator.mapping(z.to(labels.device), labels).mean(0))
