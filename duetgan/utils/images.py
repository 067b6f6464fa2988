"""Draw grids and tables of images with captions, and write them atomically as PNG files.

Text is drawn in matplotlib's DejaVu Sans, so that images look the same on every machine. A
character that this font lacks is drawn as its escape (`\\u732b`), never as a box.
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

if TYPE_CHECKING:  # torch takes seconds to import, and duet pack does not need it
    from torch import Tensor

TEXT, LINE = 11, 14  # px: font size, and line height
WIDEST_NAME = 150  # px; wider row heads are shortened
CELL = 96  # px; a table's smaller images are enlarged to about this size
PADDING = 4  # px between a table's images
LIGHT, DARK = 255, 204  # grey values of the checkerboard
CAPTION = 112  # px, smallest width of a caption

Word = tuple[float, float, str, str]  # x, y, text, Pillow's anchor
Picture: TypeAlias = "Tensor | np.ndarray"  # [C, H, W]
# x, y of an image's top left corner; None leaves the place white
Place: TypeAlias = "tuple[int, int, Picture | None]"


def visible(images: Picture, spec: ImageSpec | None, ground: int | None = None) -> Any:
    """Convert a file's values [..., C, H, W] to uint8 [..., 1 or 3, H, W] for display.

    Values of more than 8 bits are scaled from `spec.low`..`spec.high` to 0..255. The first three
    colour channels become red, green and blue; with fewer than three, the first becomes grey.
    Transparent pixels are drawn on a checkerboard.

    Args:
        spec: the format of `images`; None: `images` are returned unchanged.
        ground: a grey value to draw transparent pixels on instead of the checkerboard.
    """
    if spec is None or spec.plain:
        return images
    import torch

    pixels = spec.to_uint8(torch.as_tensor(images))
    colours = pixels[..., : 3 if spec.colours > 2 else 1, :, :]
    if not spec.alpha:
        return colours
    height, width = pixels.shape[-2:]
    rows = torch.arange(height, device=pixels.device) * 8 // min(height, width)
    columns = torch.arange(width, device=pixels.device) * 8 // min(height, width)
    background: Tensor | int = ((rows[:, None] + columns) % 2) * (LIGHT - DARK) + DARK
    if ground is not None:
        background = ground
    opacity = pixels[..., -1:, :, :] / 255
    return torch.lerp(colours * 0.0 + background, colours.float(), opacity).round().to(torch.uint8)


def grid(images: "Tensor", *, columns: int | None = None, spec: ImageSpec | None) -> np.ndarray:
    """Arrange images [n, C, H, W] row by row in one uint8 image [H', W', 1 or 3].

    The grid is about square unless `columns` is given; empty places are white.
    """
    from torchvision.utils import make_grid

    images = visible(images, spec)
    columns = columns or math.ceil(math.sqrt(len(images)))
    # make_grid turns grey into RGB; the slice undoes that.
    canvas = make_grid(images.cpu(), nrow=columns, padding=0, pad_value=255)[: images.shape[1]]
    return canvas.permute(1, 2, 0).numpy()


def save_png(image: np.ndarray, path: str | Path) -> None:
    """Write a uint8 image [H, W, C] (C 1 or 3) as a PNG, atomically. Creates missing folders."""
    with building(Path(path)) as temporary:
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(
            temporary, format="PNG"
        )


PNG_KINDS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> colour type: grey, grey and alpha, RGB, RGBA
IMAGE_SUFFIXES = (".png", ".npy")  # added by `save_image`


def save_image(image: np.ndarray, spec: ImageSpec, path: Path, metadata: Mapping[str, str]) -> None:
    """Write an image [H, W, C] with the values of format `spec`, without loss and atomically.

    Grey or RGB of 8 or 16 bits, with or without alpha, becomes PATH.png with `metadata` as text
    chunks. All other formats become PATH.npy, an array [H, W, C] without metadata.
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
    lines = np.pad(rows, ((0, 0), (1, 0)))  # each line begins with its filter type, 0
    chunks = [(b"IHDR", head)]
    chunks += [(b"iTXt", f"{k}\0\0\0\0\0{v}".encode()) for k, v in metadata.items()]
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
    spec: ImageSpec | None = None,  # pixel format; None: uint8 grey or RGB
) -> None:
    """Write a PNG with images [C, H, W] of equal size, each above its caption.

    A caption has up to two lines. A line that is too wide loses its middle.
    """
    height, width = images[0].shape[-2:]
    scale = max(1, round(CAPTION / height))
    cell = max(width * scale, CAPTION)
    # px from one image to the next
    down = height * scale + 2 * LINE + 14
    right = cell + 12
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
    # names of rows, drawn on the left; empty: no margin for them
    captions: Sequence[str],
    spec: ImageSpec | None,  # pixel format; None: uint8 grey or RGB
) -> None:
    """Write a PNG with a row of images [C, H, W] for each class.

    A row shows at most `columns` images; missing ones leave white places. The images of a single
    class fill as many rows as they need, and have no caption.
    """
    if len(rows) == 1:
        (images,), captions = rows, ()
        rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    save_table([row[:columns] for row in rows], path, row_heads=captions, cell=64, gap=0, spec=spec)


def save_table(
    # images of one size; None, or a shorter row, leaves the place white
    rows: "Sequence[Sequence[Picture | None]]",
    path: str | Path,
    *,
    row_heads: Sequence[str],  # one line each, on the left; empty: no margin for them
    column_heads: Sequence[str] = (),  # one or more lines each, above
    cell: int = CELL,  # px to which smaller images are enlarged
    gap: int = PADDING,  # px between images
    margin: int | None = None,  # px after the first row and column (default: `gap`)
    spec: ImageSpec | None = None,  # pixel format; None: uint8 grey or RGB
) -> None:
    """Write a PNG with a table of images, with heads for its rows and columns.

    A head that is too wide loses its middle.
    """
    size = next(image.shape[-2:] for row in rows for image in row if image is not None)
    scale = max(1, cell // max(size))
    height, width = (side * scale for side in size)
    names = [_fitting(head, WIDEST_NAME) for head in row_heads]
    above = [[_fitting(line, width) for line in head.split("\n")] for head in column_heads]
    left = 0
    if names:
        widest = max(_font()[0].getlength(name) for name in names)
        left = math.ceil(widest) + 2 * PADDING
    top = LINE * max(map(len, above)) + PADDING if above else 0
    extra = 0 if margin is None else margin - gap
    xs = [left + i * (width + gap) + extra * (i > 0) for i in range(max(map(len, rows)))]
    ys = [top + i * (height + gap) + extra * (i > 0) for i in range(len(rows))]
    words: list[Word] = [
        (left - PADDING, y + height / 2, name, "rm") for y, name in zip(ys, names, strict=False)
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
    spec: ImageSpec | None,
) -> None:
    """Write a white PNG of `size` (width, height) with words, and images enlarged by `scale`."""
    tiles = []
    for x, y, image in places:
        if image is not None:
            tiles.append((x, y, np.asarray(visible(image, spec)).transpose(1, 2, 0)))
    channels = max(pixels.shape[2] for _, _, pixels in tiles)
    canvas = np.full((size[1], size[0], channels), 255, dtype=np.uint8)
    for x, y, pixels in tiles:
        height, width = (side * scale for side in pixels.shape[:2])
        canvas[y : y + height, x : x + width] = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    drawn = Image.fromarray(canvas if canvas.shape[2] == 3 else canvas[:, :, 0])
    draw = ImageDraw.Draw(drawn)
    for left, top, text, anchor in words:
        draw.text((left, top), text, fill=0, font=_font()[0], anchor=anchor)
    save_png(np.atleast_3d(np.asarray(drawn)), path)


def _fitting(text: str, width: float) -> str:
    """Shorten a line to `width` px; unprintable characters, such as line breaks, become spaces."""
    line = drawable("".join(c if c.isprintable() else " " for c in text))
    return shorten(line, width, _font()[0].getlength)


@cache
def _font() -> tuple[ImageFont.FreeTypeFont, frozenset[int]]:
    """Return the font, and the code points of the characters that it can draw."""
    from matplotlib.font_manager import fontManager  # slow to import
    from matplotlib.ft2font import FT2Font

    path = str(fontManager.findfont("DejaVu Sans"))
    return ImageFont.truetype(path, TEXT), frozenset(FT2Font(path).get_charmap())


def drawable(text: str) -> str:
    """Return a line of text with escapes for characters that cannot be drawn.

    These are unsafe characters (see `printable`) and characters that the font lacks.
    """
    if text.isascii() and text.isprintable():
        return text
    letters = _font()[1]
    return "".join(
        c if ord(c) in letters else c.encode("unicode_escape").decode("ascii")
        for c in printable(text)
    )
