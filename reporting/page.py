"""Building blocks of the HTML report: tiles, tables, embedded images, words where something is missing."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from reporting.charts import number

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for bad images
EMBED_WHOLE = 300_000  # bytes; larger images are shrunk before they are embedded
LARGEST_SIDE = 1400  # pixels of a shrunk image


def percent(value: object) -> str:
    """A share as `12.3 %`; a dash for what is no number."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "-"


def plain(value: object) -> str:
    """A short figure; a dash for what is no number."""
    return number(value) if isinstance(value, int | float) else "-"


Figure = tuple[str, str]  # (value, what it is), both plain text


def tiles(figures: Sequence[Figure]) -> str:
    """A row of figures with their names below."""
    cells = (f'<div class="tile"><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>' for v, k in figures)
    return f'<div class="tiles">{"".join(cells)}</div>' if figures else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways on a narrow screen; the first column is text, the others are figures."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def image(path: Path, caption: str, *, large: bool = False) -> str:
    """A figure with the image inside the page; a word instead of an image that cannot be read."""
    try:
        address = _data_address(path)
    except UNREADABLE as error:
        return missing(f"{path.name} cannot be shown: {error}")
    text = html.escape(caption)
    kind = "image large" if large else "image"
    return f'<figure class="{kind}"><img src="{address}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def _data_address(path: Path) -> str:
    """The `data:` address of a checked image; a large one is shrunk and stored as JPEG. Raises UNREADABLE."""
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        kind = "png" if image.format == "PNG" else "jpeg"
        if len(content) > EMBED_WHOLE or image.format not in ("PNG", "JPEG"):
            small = image.convert("RGB")
            small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            buffer = io.BytesIO()
            small.save(buffer, format="JPEG", quality=88)
            content, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def missing(what: str) -> str:
    """A word in the place of something that is not there."""
    return f'<p class="missing">{html.escape(what)}</p>'
