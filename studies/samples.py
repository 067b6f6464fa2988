"""Files of samples for training, and what may be done to make them better: selection, spread, several checkpoints.

The ingredients are those of GaFi (Lampis et al. 2023, 2305.10118): its filter keeps what a classifier is sure of, its
recycling draws new samples while training, its expansion draws latents from a wider distribution. StyleGAN2 normalises
z, so that here w is spread, about its class's mean.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.data.records import add_image
from duetgan.inference.samples import with_styles
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.lineage import provenance_of
from duetgan.metrics.samples.memorisation import nearest
from duetgan.models.classifier import Classifier
from duetgan.models.gan import draw, generate
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, newest_first
from duetgan.utils.config.model import Config, PositiveFloat, PositiveInt
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_rows
from duetgan.utils.runlog.progress import Bar

BLOCK = 64  # samples a pass, always the same ones together: rounding depends on a batch's size
LEAST_KEPT = 0.02  # of the samples drawn, that a rule must keep
MEAN_OF = 1000  # latents whose mean w is a class's
COLUMNS = 12  # of the pictures

# (images uint8 [n, C, H, W], label=their class) -> which are kept, bool [n], and how well each fits, [n]
Rule = Callable[..., tuple[Tensor, Tensor]]
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
        """In words, for the table and for the samples' provenance; "as drawn" where nothing is done."""
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

    def __init__(self, drawing: Drawing, classifier: Classifier, training: Path, held_out: Path) -> None:
        self.drawing, self.classifier = drawing, classifier
        self.references: list[Tensor] = []  # features of each class's training images
        self.bounds: list[tuple[float, float]] = []  # distances, by class
        if drawing.distance is None:
            return
        self.references, queries = (self._features_by_class(file) for file in (training, held_out))
        for own, other in zip(self.references, queries, strict=True):
            near = nearest(other, own).distances
            low, high = near.quantile(torch.tensor(drawing.distance, dtype=near.dtype)).tolist()
            self.bounds.append((low if drawing.distance[0] else 0.0, high))

    def __call__(self, images: Tensor, label: int) -> tuple[Tensor, Tensor]:
        features, probabilities = self._answers(images)
        kept, sure = torch.ones(len(images), dtype=torch.bool), probabilities[:, label]
        if self.drawing.recognised:
            kept &= probabilities.argmax(1) == label
        if self.drawing.confidence is not None:
            low, high = self.drawing.confidence
            kept &= (sure >= low) & (sure <= high)
        if self.references and kept.any():
            low, high = self.bounds[label]
            near = nearest(features[kept], self.references[label]).distances
            kept[kept.clone()] = (near >= low) & (near <= high)
        return kept, sure

    def _answers(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features float32 [n, F] and probabilities float64 [n, K], on the CPU."""
        with evaluating(self.classifier), full_float32(device_of(self.classifier)):
            features = self.classifier.features(classifier_input(self.classifier, images))
            return features.float().cpu(), self.classifier.head(features).cpu().double().softmax(1)

    def _features_by_class(self, file: Path) -> list[Tensor]:
        with Dataset(file) as reader:
            blocks = np.array_split(np.arange(len(reader)), -(-len(reader) // BLOCK))
            features = torch.cat([self._answers(read_batch(reader, block).images)[0] for block in blocks])
            labels = torch.from_numpy(reader.labels().copy())
        by_class = [features[labels == label] for label in range(self.classifier.classes)]
        if lacking := [reader.classes[label] for label, rows in enumerate(by_class) if not len(rows)]:
            raise UserError(f"{file}: no image of class {lacking[0]}, which drawing.distance needs")
        return by_class


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """The checkpoints of the `count` last steps of a run. Raises UserError where it kept fewer."""
    files = newest_first(run / "checkpoints")[::-1]
    if len(files) < count:
        raise UserError(f"{run} keeps {len(files)} checkpoints, {count} are asked for; raise its checkpoint.keep")
    return files[-count:]


def draw_samples(
    files: Mapping[Path, Sequence[int]],  # to write, each with its samples of each class
    checkpoints: Sequence[Path],  # of a generator
    classes: Sequence[str],  # of the study's images
    *,
    seed: int,
    drawing: Drawing,
    rule: Rule | None = None,  # the drawing's Selector
    pool: int | None = None,  # samples drawn for each that is wanted, at most; None: as many as it takes
    stream: tuple[str, ...] | None = None,  # of the draws' keys; None: samples are those of generate.py
    device: torch.device | str = "cpu",
) -> list[float | None]:
    """Write packed files of samples, class by class, a smaller one the beginning of a larger one; one that is there is
    replaced. Returns the share of the drawn samples of each class that was kept.

    Before the selection, samples 64 i to 64 i + 63 of a class are of checkpoint i modulo their number. With a pool that
    has too few, a class gets fewer, but one at least, the best. Raises UserError for an unconditional generator, other
    classes, and, without a pool, a rule that keeps less than `LEAST_KEPT`.
    """
    contents = [load(file) for file in checkpoints]
    generators: list[Any] = [generator_from(content, device) for content in contents]
    last, content = generators[-1], contents[-1]
    if not last.classes:
        raise UserError(f"{checkpoints[-1]}: is a generator without classes; a study needs labelled samples")
    require_same_classes("the generator", content["classes"], "the study's images", classes)
    about = None if drawing == Drawing() else str(drawing) + (f"; the first of {pool} drawn for each" if pool else "")
    how: dict[str, Any] = {
        "passport": provenance_of(last, content, seed=seed, truncation_psi=drawing.psi, selection=about),
        "resize_filter": (content.get("data") or {}).get("resize_filter", "none"),
    }
    layout = Layout.of(last.spec)
    how |= {"classes": classes, "source": "samples for a study", "overwrite": True}
    most = np.max(list(files.values()), axis=0).tolist()
    shares: list[float | None] = []
    with ExitStack() as stack, Bar(total=sum(most), desc="samples", unit="image") as bar, full_float32(device):
        writers = {stack.enter_context(LMDBWriter(file, layout, **how)): counts for file, counts in files.items()}
        for label, wanted in enumerate(most):
            blocks = _of_class(generators, label, seed, drawing.psi, stream)
            keep = rule and partial(rule, label=label)
            for number, image in enumerate(_kept(blocks, classes[label], wanted, keep, pool, shares)):
                for writer, counts in writers.items():
                    if number < counts[label]:
                        add_image(writer, np.ascontiguousarray(image.permute(1, 2, 0).numpy()), label)
                bar.update()
        for writer in writers:
            writer.finish()
    return shares


def _kept(
    blocks: Iterator[Tensor], name: str, wanted: int, rule: Any, pool: int | None, shares: list[float | None]
) -> Iterator[Tensor]:
    """So many samples of those that the rule keeps; appends the share that it kept."""
    drawn = taken = 0
    best = -1.0, torch.empty(0)
    while wanted > taken and drawn != (pool or -1) * wanted:
        images = next(blocks)
        images = images[: pool * wanted - drawn] if pool else images
        drawn += len(images)
        if rule is not None:
            kept, fits = rule(images)
            best = max(best, (float(fits.max()), images[int(fits.argmax())]), key=lambda pair: pair[0])
            images = images[kept]
        yield from images[: wanted - taken]
        taken += len(images)
        if not pool and taken < min(wanted, LEAST_KEPT * drawn - BLOCK):
            what = f"{taken} of {drawn:,} samples of class {name}"
            raise UserError(f"the selection keeps {what}; ask for less, or train the generator longer")
    if wanted and not taken:
        yield best[1]
    shares.append(taken / drawn if drawn else None)


def _of_class(
    generators: Sequence[Any], label: int, seed: int, psi: float, stream: tuple[str, ...] | None
) -> Iterator[Tensor]:
    """Samples of a class without end, uint8 [BLOCK, C, H, W], the generators in turn."""
    for generator in generators if psi != 1 else ():
        _centre(generator, label)
    how: dict[str, Any] = {"labels": torch.full((BLOCK,), label), "seed": seed, "truncation_psi": psi}
    for number, generator in enumerate(itertools.cycle(generators)):
        numbers = range(number * BLOCK, (number + 1) * BLOCK)
        if stream is None:
            yield generate(generator, indices=[i * generator.classes + label for i in numbers], **how)
        else:
            yield generate(generator, indices=numbers, stream=(*stream, label), **how)


@torch.no_grad()
def _centre(generator: Any, label: int) -> None:
    """Let `w_avg`, from which psi is measured, be the mean w of a class: key (0, "study", "mean")."""
    with_styles(generator, "a psi other than 1")
    z, _ = draw(generator, range(MEAN_OF), 0, ("study", "mean"))
    labels = torch.full((MEAN_OF,), label, device=generator.w_avg.device)
    generator.w_avg.copy_(generator.mapping(z.to(labels.device), labels).mean(0))


def save_table(rows: Mapping[str, Any], out: Path) -> None:
    """A picture of rows of images uint8 [n, C, H, W], each with its name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    save_rows([list(torch.as_tensor(row)) for row in rows.values()], out, columns=COLUMNS, captions=list(rows))
