"""Read TIFF files that Pillow refuses.

These have several pages, which become the channels of an image, or values of more than 8 bits.
"""

import io
import logging
import math
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from duetgan.data.errors import ImageError
from duetgan.data.images import BOMB, DAMAGED, FORMATS, has_another
from duetgan.data.images.values import READERS, Values, check_shape, checked_pixels
from duetgan.utils.errors import explained
from duetgan.utils.image_spec import MOST_CHANNELS

STRAIGHT = (2,)  # ExtraSamples with straight alpha
DEFLATE = (1, 8, 32946)  # Compression: none, or zlib


def read_tiff(content: bytes) -> Values | None:
    """Read a TIFF file; its pages become the channels of one image.

    Returns None if the file has one page and Pillow can read it. Raises ImageError for files that
    are damaged or not supported.
    """
    # tifffile reads the files that Pillow refuses.
    with suppress(*DAMAGED, *BOMB), Image.open(io.BytesIO(content), formats=FORMATS) as image:
        few = set(image.tag_v2.get(258, (1,))) <= {1, 8}  # type: ignore[attr-defined]  # BitsPerSample
        if (few or image.mode.startswith("I;16")) and not has_another(image):
            return None
    pages: list[Values] = []
    with open_tiff(content) as file:
        for page in file.pages:
            if len(pages) == MOST_CHANNELS:
                raise ImageError(f"has more than {MOST_CHANNELS} pages; a page is a channel here")
            pages.append(page_values(page, len(content)))
    return stacked(pages)


def open_tiff(content: bytes) -> Any:
    """Open a TIFF file with tifffile, and return the tifffile.TiffFile.

    Raises ImageError if it is no TIFF file, and UserError if tifffile is not installed.
    """
    missing = (
        "TIFF files of several pages or more than 8 bits need tifffile, which is not installed: "
        "pip install tifffile"
    )
    with explained(ImportError, missing):
        import tifffile
    # tifffile's errors become ImageErrors, so its log would only repeat them.
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    # Exception: tifffile raises many types for damaged files.
    with explained(
        Exception,
        lambda error: ImageError(f"is no TIFF file ({' '.join(str(error).split())[:80]})"),
    ):
        return tifffile.TiffFile(io.BytesIO(content))


def page_values(page: Any, size: int) -> Values:
    """Decode a page of a TIFF file; `size` is the length of the file in bytes.

    Raises ImageError if the page is damaged, not supported or too large. A page that is too large
    is not decoded.
    """
    try:
        shape, dtype = tuple(page.shape), page.dtype
        described = page.axes in ("YX", "YXS", "SYX") and dtype is not None
        # photometric: 1 is grey with 0 as black, 2 is RGB
        if not described or dtype.kind not in "iuf" or page.photometric not in (1, 2):
            raise ImageError(
                f"has a page of {page.axes or 'no'} axes and type {dtype}; save grey or RGB values"
            )
        check_shape(
            page.imagelength,
            page.imagewidth,
            math.prod(shape) // max(1, page.imagelength * page.imagewidth),
        )
        if page.tags.get(274) is not None and page.tags[274].value != 1:
            raise ImageError("is stored turned (orientation); save it upright")
        _check_segments(page, size)
        values = page.asarray(maxworkers=1)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(
            f"is truncated or damaged ({' '.join(str(error).split())[:120]})"
        ) from None
    extra = tuple(map(int, page.extrasamples))
    if 1 in extra:
        raise ImageError("has colours multiplied by alpha; save it with straight alpha")
    values = values[:, :, None] if values.ndim == 2 else values
    values = values.transpose(1, 2, 0) if page.axes == "SYX" else values
    return Values(checked_pixels(values), extra == STRAIGHT)


def _check_segments(page: Any, size: int) -> None:
    """Raise ImageError for a page with an unsupported compression, or a damaged strip or tile.

    Only deflate and no compression are supported. A strip or tile is damaged if it ends beyond the
    file, which has `size` bytes, or if it holds too many bytes for its pixels.
    """
    if int(page.compression) not in DEFLATE:
        name = getattr(page.compression, "name", page.compression)
        raise ImageError(f"is compressed by {name}; save it without compression, or by deflate")
    most = math.prod(page.chunks) * page.dtype.itemsize
    for start, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        if (
            start < 0
            or count < 0
            or start + count > size
            or (page.compression == 1 and count > 2 * most + 64)
        ):
            raise ImageError("is truncated: a part lies beyond its end")
        if page.compression != 1:
            page.parent.filehandle.seek(start)
            if (
                len(zlib.decompressobj().decompress(page.parent.filehandle.read(count), most + 1))
                > most
            ):
                raise ImageError("holds more than it declares")


def stacked(parts: list[Values]) -> Values:
    """Stack images as the channels of one image.

    Raises ImageError if the sizes or types of the images differ, or if several have alpha.
    """
    kinds = {(part.pixels.shape, part.pixels.dtype, part.alpha) for part in parts}
    if len(kinds) > 1 or (len(parts) > 1 and parts[0].alpha):
        raise ImageError("has pages of several sizes or kinds; save one of them as an image")
    if len(parts) == 1:
        return parts[0]
    return Values(checked_pixels(np.dstack([part.pixels for part in parts])))


for magic in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
    READERS[magic] = read_tiff
