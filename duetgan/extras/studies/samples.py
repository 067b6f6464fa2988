"""Packed files of a generator's samples for training."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image
from duetgan.metrics.features.precision import full_float32
from duetgan.metrics.lineage import provenance_of
from duetgan.models.gan import ImageGenerator, generate
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.runlog.progress import Bar

BLOCK = 64  # samples per batch; fixed, because rounding depends on the batch size


def draw_samples(
    files: Mapping[Path, Sequence[int]],  # file -> number of samples of each class
    run: Path,  # run folder of a generator
    classes: Sequence[str],  # class names of the study's images
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> None:
    """Write packed files of samples, which are those of generate.py.

    For each class, a smaller file has the first samples of a larger file. Existing files are
    replaced. Raises UserError if the generator is unconditional or has other classes.
    """
    content = load(resolve(str(run)))
    generator = generator_from(content, device)
    if not generator.classes:
        raise UserError(f"{run}: is a generator without classes; a study needs labelled samples")
    require_same_classes("the generator", content["classes"], "the study's images", classes)
    passport = provenance_of(generator, content, seed=seed)
    resize_filter = (content.get("data") or {}).get("resize_filter", "none")
    totals = np.max(list(files.values()), axis=0).tolist()
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
            samples = itertools.islice(_class_samples(generator, label, seed), total)
            for number, image in enumerate(samples):
                pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
                for writer, counts in writers.items():
                    if number < counts[label]:
                        add_image(writer, pixels, label)
                bar.update()
        for writer in writers:
            writer.finish()


def _class_samples(generator: ImageGenerator, label: int, seed: int) -> Iterator[Tensor]:
    """Yield an endless sequence of samples of a class, uint8 [C, H, W]."""
    labels = torch.full((BLOCK,), label)
    step = generator.classes
    for start in itertools.count(label, BLOCK * step):
        indices = range(start, start + BLOCK * step, step)
        yield from generate(generator, labels=labels, indices=indices, seed=seed)
