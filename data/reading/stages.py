"""Progressive growing: which resolution and batch size a step has, and the images at that resolution."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from data.reading.dataset import Dataset
from utils.errors import UserError


class Span(NamedTuple):
    """From a step on, up to the next span's: images of one resolution in batches of one size."""

    first_step: int
    resolution: int  # px
    batch_size: int  # global


def checked_spans(spans: Sequence[tuple[int, int, int]], world_size: int) -> list[Span]:
    """Raises UserError for a batch size that the ranks cannot share, ValueError for steps that do not rise from 0."""
    checked = [Span(*span) for span in spans]
    firsts = [span.first_step for span in checked]
    if firsts and (firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts))):
        raise ValueError(f"spans that begin at steps {firsts}")
    for span in checked:
        if span.batch_size < 1 or span.batch_size % world_size:
            raise UserError(
                f"the batches of {span.batch_size} images of {span.resolution} px are not divisible by "
                f"{world_size} processes; make progressive.batch_sizes and batch_size multiples of {world_size}"
            )
    return checked


def level_of(reader: Dataset, resolution: int) -> Dataset:
    """The images of `reader` at another resolution, read in the same manner; itself at its own.

    Raises UserError if the files have changed since `reader` was opened.
    """
    if resolution == reader.resolution:
        return reader
    whole = reader.cache if reader.cache is not None and reader.cache.whole else None
    level = Dataset(
        [shard.path for shard in reader.shards],
        resolution=resolution,
        crop=reader.crop,
        workers=reader.workers,
        cache=reader.cache is not None and whole is None,
        on_damage=reader.on_damage,
    )
    if level.meta.content_hash != reader.meta.content_hash:
        raise UserError(f"{reader.path}: was changed during the training; put it back, or use a new run folder")
    if whole is not None:  # whole images serve every resolution
        level.cache = whole
    return level


def levels_text(reader: Dataset, resolutions: Sequence[int]) -> str:
    """What the plan says of the levels that are read: stored ones, and those that are scaled while training."""
    stored = reader.meta.resolutions
    if reader.crop is not None or stored == [0]:
        what = "random crops" if reader.crop is not None else "images of sizes of their own"
        return f"{_sides(resolutions)} scaled from {what}"
    found = [side for side in resolutions if side in stored]
    texts = [f"{_sides(found)} as stored"] if found else []
    missing = [side for side in resolutions if side not in stored]
    for source, sides in itertools.groupby(missing, lambda side: min(level for level in stored if level > side)):
        texts.append(f"{_sides(list(sides))} scaled from {source} px while reading")
    hint = f" (data.pack --pyramid {min(missing)} stores them)" if missing else ""
    return ", ".join(texts) + hint


def _sides(resolutions: Sequence[int]) -> str:
    return ", ".join(map(str, resolutions)) + " px"
