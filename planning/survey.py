"""A look at images before anything is packed: how many, which classes, how large, grey or colour, transparent."""

import time
from dataclasses import dataclass
from io import BytesIO
from statistics import median
from typing import NamedTuple

import numpy as np
from PIL import Image

from data.images import FORMATS, ImageError, decode_file, to_channels
from data.sources import Source, open_source
from utils.errors import UserError

LOOKED_AT = 200  # images that are decoded, evenly spaced
FEWEST = 10  # images; with fewer nothing can be learnt and held out


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of a source of images."""

    source: str  # as the user named it
    count: int  # images for training, the held-out ones included where they are not apart
    held_out: int  # images of the source's own held-out part; 0: it has none
    classes: int  # 0: unlabelled
    smallest_class: int  # images
    largest_class: int
    side: int  # px: median of the shorter sides of the images looked at
    channels: int  # 1: all of those are grey
    transparent: bool  # whether some have an alpha channel
    unreadable: str  # the first that cannot be read, or empty
    seconds: float  # reading and decoding one image

    def text(self) -> str:
        """For a person, in one line."""
        kind = f"{self.classes} classes of {self.smallest_class:,} to {self.largest_class:,}"
        if self.classes < 2:
            kind = "one class" if self.classes else "no labels"
        apart = f", and {self.held_out:,} held out" if self.held_out else ""
        alpha = ", some transparent (put on white)" if self.transparent else ""
        return (
            f"{self.count:,} images{apart}, {kind}, about {self.side} px, "
            f"{'grey' if self.channels == 1 else 'colour'}{alpha}"
        )


class _Look(NamedTuple):
    side: int
    grey: bool
    transparent: bool


def survey(spec: str) -> Survey:
    """Look at what `spec` names (see `data.sources.open_source`). Raises UserError where nothing can be made of it."""
    with open_source(spec) as source:
        count = len(source)
        if count < FEWEST:
            raise UserError(f"{spec}: holds {count} images; give {FEWEST} or more")
        sizes = np.bincount(source.labels(), minlength=max(1, len(source.classes)))
        started = time.perf_counter()
        rows = np.unique(np.linspace(0, count - 1, LOOKED_AT).astype(int)).tolist()
        looks, unreadable = _look_at(source, rows)
        seconds = (time.perf_counter() - started) / len(rows)
        apart = "test" in source.splits
    held_out = 0
    if apart:
        with open_source(spec, split="test") as source:
            held_out = len(source)
    return Survey(
        source=spec,
        count=count,
        held_out=held_out,
        classes=len(source.classes),
        smallest_class=int(sizes.min()),
        largest_class=int(sizes.max()),
        side=int(median(look.side for look in looks)),
        channels=1 if all(look.grey for look in looks) else 3,
        transparent=any(look.transparent for look in looks),
        unreadable=unreadable,
        seconds=seconds,
    )


def _look_at(source: Source, rows: list[int]) -> tuple[list[_Look], str]:
    """Decode these images; the second part names the first that cannot be read. Raises UserError if none can be."""
    looks, unreadable = [], ""
    for row in rows:
        try:
            looks.append(_look(source.item(row).content))
        except ImageError as error:
            unreadable = unreadable or f"{source.item_name(row)} {error}"
    if not looks:
        raise UserError(f"{source.name}: none of its images can be read; the first: {unreadable}: give image files")
    return looks, unreadable


def _look(content: bytes | np.ndarray) -> _Look:
    """Raises ImageError."""
    transparent = False
    if isinstance(content, bytes):
        pixels = decode_file(content, 3)
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            transparent = image.has_transparency_data
    else:
        pixels = to_channels(content, 3)
    grey = bool((pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all())
    return _Look(min(pixels.shape[:2]), grey, transparent)
