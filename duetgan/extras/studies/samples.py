"""Packed files of a generator's samples for training, all of them or those that a classifier
selects (as in GaFi, Lampis et al. 2023, 2305.10118).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image
from duetgan.metrics.evaluate_classifier import logits_of
from duetgan.metrics.features.precision import full_float32
from duetgan.metrics.lineage import provenance_of
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageGenerator, generate
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.model import Config
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.runlog.progress import Bar

BLOCK = 64  # samples per batch; fixed, because rounding depends on the batch size
MIN_ACCEPTED = 0.02  # smallest fraction of the samples that a selection must accept
Band = tuple[float, float]


class Drawing(Config):
    """Criteria for the selection of samples by a classifier; by default all are used."""

    recognised: bool = False  # use only samples that are predicted as the requested class
    # use only samples whose requested class has a predicted probability in this range
    confidence: Band | None = None

    def check(self) -> None:
        if self.confidence is not None and not 0 <= self.confidence[0] < self.confidence[1] <= 1:
            raise UserError(
                f"confidence {list(self.confidence)}: give two numbers from 0 to 1, the smaller one first"
            )

    @property
    def selects(self) -> bool:
        return self.recognised or self.confidence is not None

    def __str__(self) -> str:
        """Return the criteria as text for the report and the samples' provenance."""
        parts = ["recognised as asked"] if self.recognised else []
        if self.confidence is not None:
            parts.append(f"confidence {self.confidence[0]:g} to {self.confidence[1]:g}")
        return ", ".join(parts) or "as drawn"

    def alone(self) -> dict[str, "Drawing"]:
        """Return name of a criterion -> a Drawing with only this criterion."""
        criteria = self.model_dump(exclude_defaults=True)
        return {name: Drawing(**{name: value}) for name, value in criteria.items()}

    def accepts(self, classifier: Classifier, images: Tensor, label: int) -> tuple[Tensor, Tensor]:
        """Return True for accepted images, bool [n], and each probability of `label`, float64."""
        probabilities = logits_of(classifier, images).double().softmax(1)
        low, high = self.confidence or (0.0, 1.0)
        confidence = probabilities[:, label]
        accepted = (confidence >= low) & (confidence <= high)
        if self.recognised:
            accepted &= probabilities.argmax(1) == label
        return accepted, confidence


def draw_samples(
    files: Mapping[Path, Sequence[int]],  # file -> number of samples of each class
    run: Path,  # run folder of a generator
    classes: Sequence[str],  # class names of the study's images
    *,
    seed: int,
    drawing: Drawing,
    # (images, label=) -> True for accepted images, bool [n], and their scores [n]; None: accept all
    rule: Callable[..., tuple[Tensor, Tensor]] | None = None,
    # largest number of candidates for each requested sample; None: no limit
    pool: int | None = None,
    # prefix of the random keys; None: draw the same samples as generate.py
    stream: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
) -> list[float | None]:
    """Write packed files of samples; return the fraction of accepted candidates of each class.

    For each class, a smaller file has the first samples of a larger file. Existing files are
    replaced. If too few candidates of a `pool` are accepted, a class gets fewer samples, but at
    least the candidate with the best score.

    Raises UserError if the generator is unconditional or has other classes, or if a rule without a
    pool accepts less than MIN_ACCEPTED of the samples.
    """
    content = load(resolve(str(run)))
    generator = generator_from(content, device)
    if not generator.classes:
        raise UserError(f"{run}: is a generator without classes; a study needs labelled samples")
    require_same_classes("the generator", content["classes"], "the study's images", classes)
    selection = None
    if drawing.selects:
        selection = f"{drawing}; the first of {pool} drawn for each" if pool else str(drawing)
    passport = provenance_of(generator, content, seed=seed, selection=selection)
    resize_filter = (content.get("data") or {}).get("resize_filter", "none")
    totals = np.max(list(files.values()), axis=0).tolist()
    fractions: list[float | None] = []
    with (
        ExitStack() as stack,
        Bar(total=sum(totals), desc="samples", unit="image") as bar,
        full_float32(device),
    ):
        writers = {}
        for file, counts in files.items():
            writer = LMDBWriter(
                file,
                Layout.of(generator.spec),
                passport=passport,
                resize_filter=resize_filter,
                classes=classes,
                source="samples for a study",
                overwrite=True,
            )
            writers[stack.enter_context(writer)] = counts
        for label, total in enumerate(totals):
            blocks = _class_samples(generator, label, seed, stream)
            class_rule = rule and partial(rule, label=label)
            samples = _accepted(blocks, classes[label], total, class_rule, pool, fractions)
            for number, image in enumerate(samples):
                pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
                for writer, counts in writers.items():
                    if number < counts[label]:
                        add_image(writer, pixels, label)
                bar.update()
        for writer in writers:
            writer.finish()
    return fractions


def _accepted(
    blocks: Iterator[Tensor],
    name: str,
    total: int,
    rule: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
    pool: int | None,
    fractions: list[float | None],
) -> Iterator[Tensor]:
    """Yield up to `total` accepted samples, or the best one if none is accepted.

    Then append the accepted fraction to `fractions`.
    """
    drawn = accepted = 0
    best_score = -1.0
    best = torch.empty(0)
    while accepted < total and drawn != (pool or -1) * total:
        images = next(blocks)
        if pool:
            images = images[: pool * total - drawn]
        drawn += len(images)
        if rule is not None:
            mask, scores = rule(images)
            if float(scores.max()) > best_score:
                best_score = float(scores.max())
                best = images[int(scores.argmax())]
            images = images[mask]
        yield from images[: total - accepted]
        accepted += len(images)
        if not pool and accepted < min(total, MIN_ACCEPTED * drawn - BLOCK):
            raise UserError(
                f"the selection accepts {accepted} of {drawn:,} samples of class {name}; ask for less, or train "
                "the generator longer"
            )
    if total and not accepted:
        yield best
    fractions.append(accepted / drawn if drawn else None)


def _class_samples(
    generator: ImageGenerator, label: int, seed: int, stream: tuple[str, ...] | None
) -> Iterator[Tensor]:
    """Yield an endless sequence of samples of a class, uint8 [BLOCK, C, H, W]."""
    labels = torch.full((BLOCK,), label)
    if stream is None:
        step = generator.classes
        for start in itertools.count(label, BLOCK * step):
            indices = range(start, start + BLOCK * step, step)
            yield generate(generator, labels=labels, indices=indices, seed=seed)
    else:
        for start in itertools.count(0, BLOCK):
            indices = range(start, start + BLOCK)
            yield generate(
                generator, labels=labels, indices=indices, seed=seed, stream=(*stream, label)
            )
