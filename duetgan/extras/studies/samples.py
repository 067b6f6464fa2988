"""Write packed files with samples of a generator, to train on."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image
from duetgan.inference.samples import Sampler
from duetgan.metrics.lineage import provenance_of
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.runlog.progress import Bar


def draw_samples(
    file: Path,
    counts: Sequence[int],  # number of samples of each class
    run: Path,  # run folder of a generator
    classes: Sequence[str],  # class names of the study's images
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> None:
    """Write a packed file with samples of a generator, in place of an existing file.

    The samples are those of generate.py. A file with smaller `counts` has the first samples of each
    class. Raises UserError if the generator is unconditional or has other classes.
    """
    content = load(resolve(str(run)))
    generator = generator_from(content, device)
    if not generator.classes:
        raise UserError(f"{run}: is a generator without classes; a study needs labelled samples")
    require_same_classes("the generator", content["classes"], "the study's images", classes)
    with (
        LMDBWriter(
            file,
            Layout.of(generator.spec),
            passport=provenance_of(generator, content, seed=seed),
            resize_filter=(content.get("data") or {}).get("resize_filter", "none"),
            classes=classes,
            source="samples for a study",
            overwrite=True,
        ) as writer,
        Bar(total=sum(counts), desc="samples", unit="image") as bar,
    ):
        for label, count in enumerate(counts):
            sampler = Sampler(generator=generator, chosen=[label], seed=seed)
            for numbers in sampler.batches(count):
                for image in sampler.images(numbers).numpy().transpose(0, 2, 3, 1):
                    add_image(writer, np.ascontiguousarray(image), label)
                bar.update(len(numbers))
        writer.finish()
