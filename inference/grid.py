"""A grid of samples: a row for each class, or a block where there are no classes."""

from pathlib import Path

from inference.samples import Sampler
from metrics.images import save_rows

PER_CLASS = 8  # images of a class unless said
UNCONDITIONAL = 64  # images of a generator without classes unless said
COLUMNS = 8  # of a grid without classes


def draw_grid(sampler: Sampler, out: Path, *, count: int | None = None) -> int:
    """Write `count` images to a PNG file, as many of each class or one less; returns how many they are."""
    kinds = len(sampler.chosen)
    count = count or (PER_CLASS * kinds if kinds else UNCONDITIONAL)
    images = list(sampler.images(range(count)))
    rows = [images[start::kinds] for start in range(min(kinds, count))] if kinds else [images]
    columns = max(len(row) for row in rows) if len(rows) > 1 else min(COLUMNS, len(rows[0]))
    save_rows(rows, out, columns=columns, most_rows=len(rows))
    return count
