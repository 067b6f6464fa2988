"""Progressive growing: which resolution and batch size a step has, and the images at that resolution."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import UserError


class Stage(NamedTuple):
    """From a step on, up to the next stage's: images of one resolution in batches of one size."""

    first_step: int
    resolution: int  # px
    batch_size: int  # global


def checked_stages(stages: Sequence[tuple[int, int, int]], world_size: int) -> list[Stage]:
    """Raises UserError for a batch size that the ranks cannot share, ValueError for steps that do not rise from 0."""
    checked = [Stage(*stage) for stage in stages]
    firsts = [stage.first_step for stage in checked]
    if firsts and (firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts))):
        raise ValueError(f"stages that begin at steps {firsts}")
    for stage in checked:
        if stage.batch_size < 1 or stage.batch_size % world_size:
            raise UserError(
                f"the batches of {stage.batch_size} images of {stage.resolution} px are not divisible by "
                f"{world_size} processes; make progressive.batch_sizes and batch_size multiples of {world_size}"
            )
    return checked


def at_resolution(reader: Dataset, resolution: int) -> Dataset:
    """The images of `reader` at another resolution, read in the same manner; itself at its own.

    Raises UserError if the files have changed since `reader` was opened.
    """
    if resolution == reader.resolution:
        return reader
    other = Dataset(
        [shard.path for shard in reader.shards],
        resolution=resolution,
        crop=reader.crop,
        workers=reader.workers,
        on_damage=reader.on_damage,
    )
    if other.meta.content_hash != reader.meta.content_hash:
        raise UserError(f"{reader.path}: was changed during the training; put it back, or use a new run folder")
    return other


def stages_text(reader: Dataset, resolutions: Sequence[int]) -> str:
    """What the plan says of the resolutions that are read: stored ones, and those that are scaled while training."""
    stored = reader.meta.resolutions
    if reader.crop is not None or stored == [0]:
        what = "random crops" if reader.crop is not None else "images of sizes of their own"
        return f"{_sides(resolutions)} scaled from {what}"
    found = [side for side in resolutions if side in stored]
    texts = [f"{_sides(found)} as stored"] if found else []
    missing = [side for side in resolutions if side not in stored]
    for source, sides in itertools.groupby(missing, lambda side: min(other for other in stored if other > side)):
        texts.append(f"{_sides(list(sides))} scaled from {source} px while reading")
    hint = f" (data.pack --pyramid {min(missing)} stores them)" if missing else ""
    return ", ".join(texts) + hint


def _sides(resolutions: Sequence[int]) -> str:
    return ", ".join(map(str, resolutions)) + " px"
