"""Files of samples for training, as they are drawn or selected by a classifier (as in GaFi, Lampis
et al. 2023, 2305.10118).
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
from duetgan.data.records import add_image
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

BLOCK = 64  # samples a pass, always the same ones together: rounding depends on a batch's size
LEAST_KEPT = 0.02  # of the samples drawn, that a rule must keep
Band = tuple[float, float]


class Drawing(Config):
    """Which samples are kept; the defaults: all."""

    recognised: bool = False  # those that the selector names as asked
    confidence: Band | None = None  # those to whose class it gives a probability between these

    def check(self) -> None:
        if self.confidence is not None and not 0 <= self.confidence[0] < self.confidence[1] <= 1:
            raise UserError(
                f"confidence {list(self.confidence)}: give two numbers from 0 to 1, the smaller one first"
            )

    @property
    def selects(self) -> bool:
        return self.recognised or self.confidence is not None

    def __str__(self) -> str:
        """In words, for the table and for the samples' provenance; "as drawn" where all are kept."""
        parts = ["recognised as asked"] if self.recognised else []
        if self.confidence is not None:
            parts.append(f"confidence {self.confidence[0]:g} to {self.confidence[1]:g}")
        return ", ".join(parts) or "as drawn"

    def alone(self) -> dict[str, "Drawing"]:
        """Each of the ingredients that are set, alone."""
        return {
            name: Drawing(**{name: value})
            for name, value in self.model_dump(exclude_defaults=True).items()
        }

    def keeps(self, classifier: Classifier, images: Tensor, label: int) -> tuple[Tensor, Tensor]:
        """The rule of a classifier's answers."""
        probabilities = logits_of(classifier, images).double().softmax(1)
        (low, high), sure = self.confidence or (0.0, 1.0), probabilities[:, label]
        kept = (sure >= low) & (sure <= high)
        return (kept & (probabilities.argmax(1) == label) if self.recognised else kept), sure


def draw_samples(
    files: Mapping[Path, Sequence[int]],  # to write, each with its samples of each class
    run: Path,  # a generator's
    classes: Sequence[str],  # of the study's images
    *,
    seed: int,
    drawing: Drawing,
    # (images, label=) -> which are kept, how well each fits
    rule: Callable[..., tuple[Tensor, Tensor]] | None = None,
    # samples drawn for each that is wanted, at most; None: as many as it takes
    pool: int | None = None,
    # of the draws' keys; None: samples are those of generate.py
    stream: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
) -> list[float | None]:
    """Write packed files of samples, class by class, a smaller one the beginning of a larger one;
    one that is there is replaced. Returns the share of the drawn samples of each class that was
    kept.

    With a pool that has too few, a class gets fewer, but one at least, the best. Raises UserError
    for an unconditional generator, other classes, and, without a pool, a rule that keeps less than
    `LEAST_KEPT`.
    """
    content = load(resolve(str(run)))
    generator = generator_from(content, device)
    if not generator.classes:
        raise UserError(f"{run}: is a generator without classes; a study needs labelled samples")
    require_same_classes("the generator", content["classes"], "the study's images", classes)
    about = (
        str(drawing) + (f"; the first of {pool} drawn for each" if pool else "")
        if drawing.selects
        else None
    )
    how: dict[str, Any] = {
        "passport": provenance_of(generator, content, seed=seed, selection=about),
        "resize_filter": (content.get("data") or {}).get("resize_filter", "none"),
    }
    layout = Layout.of(generator.spec)
    how |= {"classes": classes, "source": "samples for a study", "overwrite": True}
    most = np.max(list(files.values()), axis=0).tolist()
    shares: list[float | None] = []
    with (
        ExitStack() as stack,
        Bar(total=sum(most), desc="samples", unit="image") as bar,
        full_float32(device),
    ):
        writers = {
            stack.enter_context(LMDBWriter(file, layout, **how)): counts
            for file, counts in files.items()
        }
        for label, wanted in enumerate(most):
            blocks = _of_class(generator, label, seed, stream)
            keep = rule and partial(rule, label=label)
            for number, image in enumerate(
                _kept(blocks, classes[label], wanted, keep, pool, shares)
            ):
                for writer, counts in writers.items():
                    if number < counts[label]:
                        add_image(
                            writer, np.ascontiguousarray(image.permute(1, 2, 0).numpy()), label
                        )
                bar.update()
        for writer in writers:
            writer.finish()
    return shares


def _kept(
    blocks: Iterator[Tensor],
    name: str,
    wanted: int,
    rule: Any,
    pool: int | None,
    shares: list[float | None],
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
            best = max(
                best, (float(fits.max()), images[int(fits.argmax())]), key=lambda pair: pair[0]
            )
            images = images[kept]
        yield from images[: wanted - taken]
        taken += len(images)
        if not pool and taken < min(wanted, LEAST_KEPT * drawn - BLOCK):
            raise UserError(
                f"the selection keeps {taken} of {drawn:,} samples of class {name}; ask for less, or train the "
                "generator longer"
            )
    if wanted and not taken:
        yield best[1]
    shares.append(taken / drawn if drawn else None)


def _of_class(
    generator: ImageGenerator, label: int, seed: int, stream: tuple[str, ...] | None
) -> Iterator[Tensor]:
    """Samples of a class without end, uint8 [BLOCK, C, H, W]."""
    how: dict[str, Any] = {"labels": torch.full((BLOCK,), label), "seed": seed}
    first, step = label, generator.classes
    if stream is not None:
        first, step, how["stream"] = 0, 1, (*stream, label)
    for start in itertools.count(first, BLOCK * step):
        yield generate(generator, indices=range(start, start + BLOCK * step, step), **how)
