"""Images for people: grids and tables with words beside them, as PNG files, written atomically.

Letters are those of matplotlib's DejaVu Sans, so that images look alike everywhere; for scripts
that it lacks, those of a font that is installed on this machine: one with the letters of China,
Japan and Korea takes 5 to 20 MB, so none comes along. What none of them has is written as its
number (`\\u732b`), never as a box.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from duetgan.utils.files import building, write_atomic
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.text import printable, shorten

if TYPE_CHECKING:  # torch takes seconds to import, and duet pack draws no tensors
    from torch import Tensor

TEXT, LINE = 11, 14  # px: height of letters, and from one line to the next
WIDEST_NAME = 150  # px beside a row
CELL = 96  # px that a table's smaller images are enlarged to
PADDING = 4  # px between a table's images
LIGHT, DARK = 255, 204  # of a checkerboard's fields
CAPTION = 112  # px that a caption may be wide at least

Word = tuple[float, float, str, str]  # x, y, text, and what of it lies there: Pillow's anchor
Picture: TypeAlias = "Tensor | np.ndarray"  # [C, H, W]
# x, y of an image's corner; None leaves the place white
Place: TypeAlias = "tuple[int, int, Picture | None]"
OWN = "DejaVu Sans"
OTHERS = [  # the most common ones with many scripts, in order
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Source Han Sans SC"),
    *(
        "WenQuanYi Micro Hei",
        "WenQuanYi Zen Hei",
        "Droid Sans Fallback",
        "PingFang SC",
        "Hiragino Sans",
    ),
    *("Arial Unicode MS", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Unifont"),
]


def visible(images: Picture, spec: ImageSpec | None, ground: int | None = None) -> Any:
    """Values [..., C, H, W] as files of `spec` have them -> uint8 [..., 1 or 3, H, W] as people and
    networks of photographs see them: by the window from `low` to `high`, of more than three
    channels the first three as red, green and blue, of two the first as grey, transparency on a
    `ground` of that value or a checkerboard. None: they are so.
    """
    if spec is None or spec.plain:
        return images
    import torch

    seen = spec.shown(torch.as_tensor(images))
    colours = seen[..., : 3 if spec.colours > 2 else 1, :, :]
    if not spec.alpha:
        return colours
    places = [
        torch.arange(side, device=seen.device) * 8 // min(seen.shape[-2:])
        for side in seen.shape[-2:]
    ]
    board: Any = (
        ((places[0][:, None] + places[1]) % 2) * (LIGHT - DARK) + DARK if ground is None else ground
    )
    return (
        torch.lerp(colours * 0.0 + board, colours.float(), seen[..., -1:, :, :] / 255)
        .round()
        .to(torch.uint8)
    )


def grid(
    images: "Tensor", *, columns: int | None = None, spec: ImageSpec | None = None
) -> np.ndarray:
    """Images [n, C, H, W] in rows, left to right and top to bottom, about square unless `columns`
    says otherwise; empty places are white. uint8 [H', W', 1 or 3]. `spec`: see `visible`.
    """
    from torchvision.utils import make_grid

    images = visible(images, spec)
    columns = columns or math.ceil(math.sqrt(len(images)))
    # grey becomes RGB
    canvas = make_grid(images.cpu(), nrow=columns, padding=0, pad_value=255)[: images.shape[1]]
    return canvas.permute(1, 2, 0).numpy()


def save_png(image: np.ndarray, path: str | Path) -> None:
    """Write a uint8 image [H, W, C] (C 1 or 3) as a PNG, atomically; makes missing folders."""
    with building(Path(path)) as temporary:
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(
            temporary, format="PNG"
        )


PNG_KINDS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> colour type: grey, grey and alpha, RGB, RGBA
IMAGE_SUFFIXES = (".png", ".npy")  # that `save_image` adds


def save_image(image: np.ndarray, spec: ImageSpec, path: Path, about: Mapping[str, str]) -> None:
    """Write values [H, W, C] as files of `spec` have them, atomically and without loss: grey or RGB
    of 8 or 16 bits, with alpha or not, as PATH.png with text chunks `about`, all others as
    PATH.npy, an array [H, W, C].
    """
    if spec.colours not in (1, 3) or spec.depth == "float32":
        with (
            building(path.with_name(f"{path.name}.npy")) as temporary,
            temporary.open("wb") as file,
        ):
            np.save(file, image)
        return
    (height, width, channels), bits = image.shape, 8 * image.dtype.itemsize
    head = struct.pack(">IIBBBBB", width, height, bits, PNG_KINDS[channels], 0, 0, 0)
    rows = np.ascontiguousarray(image.astype(f">u{bits // 8}")).view(np.uint8).reshape(height, -1)
    lines = np.pad(rows, ((0, 0), (1, 0)))  # each begins with its filter, 0
    chunks = [(b"IHDR", head), *((b"iTXt", f"{k}\0\0\0\0\0{v}".encode()) for k, v in about.items())]
    chunks += [(b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x))
        for name, x in chunks
    ]
    write_atomic(path.with_name(f"{path.name}.png"), b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def save_captioned(
    images: Sequence[Picture],
    captions: Sequence[str],
    path: str | Path,
    *,
    columns: int = 6,
    spec: ImageSpec | None = None,  # see `visible`
) -> None:
    """Draw images [C, H, W], all of one size, each with its caption of at most two lines below; at
    least one.

    A line that is wider than its image's cell loses its middle.
    """
    height, width = images[0].shape[-2:]
    scale = max(1, round(CAPTION / height))
    cell = max(width * scale, CAPTION)
    down, right = height * scale + 2 * LINE + 14, cell + 12  # from one image to the next
    places = [
        (i % columns * right + 6, i // columns * down + 6, image) for i, image in enumerate(images)
    ]
    words = [
        (x, y + height * scale + 2 + number * LINE, _fitting(line, cell), "la")
        for (x, y, _), caption in zip(places, captions, strict=True)
        for number, line in enumerate(caption.splitlines()[:2])
    ]
    size = (min(columns, len(images)) * right, math.ceil(len(images) / columns) * down)
    _save(path, size, places, words, scale, spec)


def save_rows(
    rows: "Sequence[Sequence[Tensor]]",
    path: str | Path,
    *,
    columns: int,
    # a row's name, written to the left of it; none: no room is left for them
    captions: Sequence[str] = (),
    spec: ImageSpec | None = None,  # see `visible`
) -> None:
    """Write images [C, H, W] as a grid with a row for each class; a single row is broken into
    several.

    A class with fewer than `columns` images leaves white places. A single row gets no caption:
    there is nothing to tell apart.
    """
    if len(rows) == 1:
        (images,), captions = rows, ()
        rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    save_table([row[:columns] for row in rows], path, row_heads=captions, cell=64, gap=0, spec=spec)


def save_table(
    # all of one size; None, or a shorter row, leaves the place white
    rows: "Sequence[Sequence[Picture | None]]",
    path: str | Path,
    *,
    row_heads: Sequence[str] = (),  # of one line, to the left; none: no room is left for them
    column_heads: Sequence[str] = (),  # of one or more lines, above
    cell: int = CELL,  # px that smaller images are enlarged to
    gap: int = PADDING,  # px between images
    margin: int | None = None,  # px after the first row and after the first column, if not `gap`
    spec: ImageSpec | None = None,  # see `visible`
) -> None:
    """Write images as a table with a head beside each row and above each column; one too wide loses
    its middle.
    """
    size = next(image.shape[-2:] for row in rows for image in row if image is not None)
    scale = max(1, cell // max(size))
    height, width = (side * scale for side in size)
    beside = [_fitting(head, WIDEST_NAME) for head in row_heads]
    above = [[_fitting(line, width) for line in head.split("\n")] for head in column_heads]
    left = (
        math.ceil(max(legible(head, TEXT)[1].getlength(head) for head in beside)) + 2 * PADDING
        if beside
        else 0
    )
    top = LINE * max(map(len, above)) + PADDING if above else 0
    extra = 0 if margin is None else margin - gap
    xs = [left + i * (width + gap) + extra * (i > 0) for i in range(max(map(len, rows)))]
    ys = [top + i * (height + gap) + extra * (i > 0) for i in range(len(rows))]
    words: list[Word] = [
        (left - PADDING, y + height / 2, h, "rm") for y, h in zip(ys, beside, strict=False)
    ]
    for x, lines in zip(xs, above, strict=False):
        words += [
            (x, top - PADDING - n * LINE, line, "ld") for n, line in enumerate(reversed(lines))
        ]
    places = [
        (x, y, image)
        for y, row in zip(ys, rows, strict=True)
        for x, image in zip(xs, row, strict=False)
    ]
    _save(path, (xs[-1] + width + gap, ys[-1] + height + gap), places, words, scale, spec)


def _save(
    path: str | Path,
    size: tuple[int, int],
    places: Iterable[Place],
    words: Iterable[Word],
    scale: int,
    spec: Any,
) -> None:
    """Write a white PNG of `size` (width, height) with images, of which each pixel becomes scale x
    scale, and words.
    """
    each = [(x, y, visible(image, spec)) for x, y, image in places if image is not None]
    shown = [(x, y, np.asarray(image).transpose(1, 2, 0)) for x, y, image in each]
    canvas = np.full(
        (size[1], size[0], max(pixels.shape[2] for _, _, pixels in shown)), 255, dtype=np.uint8
    )
    for x, y, pixels in shown:
        height, width = (side * scale for side in pixels.shape[:2])
        canvas[y : y + height, x : x + width] = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    drawn = Image.fromarray(canvas if canvas.shape[2] == 3 else canvas[:, :, 0])
    draw = ImageDraw.Draw(drawn)
    for left, top, text, anchor in words:
        drawable, font = legible(text, TEXT)
        draw.text((left, top), drawable, fill=0, font=font, anchor=anchor)
    save_png(np.atleast_3d(np.asarray(drawn)), path)


def _fitting(text: str, width: float) -> str:
    """One line of at most so many px; what cannot be drawn, such as a line's end inside a class
    name, is a space.
    """
    drawable, font = legible("".join(c if c.isprintable() else " " for c in text), TEXT)
    return shorten(drawable, width, font.getlength)


@cache
def _paths() -> dict[str, str]:
    """The fonts that there are, by name, in order."""
    from matplotlib.font_manager import fontManager  # slow to import

    found = {entry.name: entry.fname for entry in reversed(fontManager.ttflist)}
    return {OWN: str(fontManager.findfont(OWN))} | {
        name: found[name] for name in OTHERS if name in found
    }


@cache
def _letters(name: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_paths()[name]).get_charmap())


def families() -> list[str]:
    """Names for matplotlib, which takes each letter from the first that has it."""
    return list(_paths())


def drawable(text: str) -> str:
    """A line of text, `printable`, with what no font has written as its number."""
    if text.isascii() and text.isprintable():
        return text
    return _written(printable(text), frozenset().union(*map(_letters, families())))


def _written(text: str, letters: frozenset[int]) -> str:
    return "".join(
        c if ord(c) in letters else c.encode("unicode_escape").decode("ascii") for c in text
    )


def legible(text: str, size: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """A line of text as one font of `size` px can draw it, and that font: the first with all
    letters, else our own.
    """
    text = drawable(text)
    wanted = set(map(ord, text))
    name = next((name for name in families() if wanted <= _letters(name)), OWN)
    return _written(text, _letters(name)), _font(name, size)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_paths()[name], size)
