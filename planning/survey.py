"""A look at images before anything is packed: how many, which classes, how large, grey or colour, transparent."""

import time
from io import BytesIO
from statistics import median
from typing import NamedTuple

import numpy as np
from PIL import Image

from data.errors import ImageError
from data.images import FORMATS, decode_file, to_channels
from data.sources import Source, open_source
from planning.plan import Survey
from utils.errors import UserError

LOOKED_AT = 200  # images that are decoded, evenly spaced
FEWEST = 10  # images; with fewer nothing can be learnt and held out


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
