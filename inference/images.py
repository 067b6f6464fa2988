"""Tables of images with a head beside each row and above each column."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from utils.images import grid, save_png
from utils.text import shorten

CELL = 96  # px that smaller images are enlarged to
PADDING = 4  # px between images
TEXT, LINE = 11, 14  # px: height of letters, and from one line to the next
WIDEST_HEAD = 150  # px beside a row


def save_table(
    rows: Sequence[Sequence[Tensor | None]],  # uint8 [C, H, H] each; None leaves the place white
    path: str | Path,
    *,
    row_heads: Sequence[str],
    column_heads: Sequence[str],  # of one or more lines
    margin: int = PADDING,  # px after the first row and after the first column
    cell: int = CELL,  # px that smaller images are enlarged to
) -> None:
    """Write images as a table to a PNG file, atomically; a head that is too wide loses its middle."""
    font = ImageFont.truetype(findfont("DejaVu Sans"), TEXT)  # matplotlib's own: the same everywhere
    side = next(image.shape[-1] for row in rows for image in row if image is not None)
    scale = max(1, cell // side)
    drawn = side * scale
    beside = [shorten(head, WIDEST_HEAD, font.getlength) for head in row_heads]
    above = [[shorten(line, drawn, font.getlength) for line in head.split("\n")] for head in column_heads]
    left = math.ceil(max(map(font.getlength, beside))) + 2 * PADDING
    top = LINE * max(map(len, above)) + PADDING
    xs, ys = (_starts(first, count, drawn, margin) for first, count in ((left, len(above)), (top, len(beside))))
    canvas = Image.new("RGB", (xs[-1] + drawn + PADDING, ys[-1] + drawn + PADDING), (255, 255, 255))
    draw = ImageDraw.Draw(canvas)
    for y, head, row in zip(ys, beside, rows, strict=True):
        draw.text((PADDING, y + drawn / 2), head, fill=0, font=font, anchor="lm")
        for x, image in zip(xs, row, strict=True):
            if image is not None:
                pixels = grid(image[None], scale=scale)
                canvas.paste(Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]), (x, y))
    for x, lines in zip(xs, above, strict=True):
        for number, line in enumerate(reversed(lines)):
            draw.text((x, top - PADDING - number * LINE), line, fill=0, font=font, anchor="ld")
    save_png(np.asarray(canvas), path)


def _starts(first: int, count: int, side: int, margin: int) -> list[int]:
    """Where `count` images begin, one after the other."""
    return list(itertools.accumulate([side + margin, *[side + PADDING] * (count - 2)][: count - 1], initial=first))
