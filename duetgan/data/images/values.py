"""Read the pixel values of image files, and convert them to the format of an ImageSpec.

Images may have any depth and number of channels. In files and packed records, colours are not
multiplied by alpha (straight alpha). They are multiplied only for scaling and compositing. The
rules are in docs/lmdb.md.
"""

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import cv2
import numpy as np
from PIL import ExifTags, Image, ImageOps

from duetgan.data.errors import ImageError
from duetgan.data.images import MIN_SIDE, PNG, check_size, has_16_bits, opened
from duetgan.utils import extras
from duetgan.utils.errors import explained
from duetgan.utils.image_spec import MOST_CHANNELS, RANGES, ImageSpec

NPY = b"\x93NUMPY"  # first bytes
GREY = ("1", "L", "LA", "La")  # Pillow's modes
# depth -> type that holds the product of two values
WIDE = {"uint8": np.uint16, "uint16": np.uint32, "float32": np.float64}


class Values(NamedTuple):
    """The pixels of an image as its file stores them, before any conversion."""

    pixels: np.ndarray  # uint8, uint16 or float32 [H, W, C]
    alpha: bool = False  # the last channel is transparency


# a file, or pixels [H, W, C]; Values for pixels with alpha
Content: TypeAlias = bytes | np.ndarray | Values


# first 4 bytes of a file -> function that reads it, and returns None for a file that Pillow reads
READERS: dict[bytes, Callable[[bytes], Values | None]] = {}


def decode_image(
    content: Content, spec: ImageSpec, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Decode an image to [H, W, C] with the channels and depth of `spec`, without resizing.

    `size` is the height and width that the file's header must have; None accepts all. Raises
    ImageError if the image cannot be read or converted.
    """
    return bring(native(content, spec.plain, size), spec)


def kind(content: Content) -> ImageSpec:
    """Return the channels, alpha and depth of an image as an ImageSpec with height and width 0.

    Raises ImageError if the image cannot be read.
    """
    pixels, alpha = native(content)
    return ImageSpec.of(pixels.shape[2], 0, {"alpha": alpha, "depth": pixels.dtype.name})


def native(content: Content, plain: bool = False, size: tuple[int, int] | None = None) -> Values:
    """Return the values of an image as they are stored, without conversion.

    With `plain`, Pillow reads all image files, even if it keeps only 8 of 16 bits. `size` is the
    height and width that the file's header must have; None accepts all. Raises ImageError for files
    that cannot be read and for values without a defined range.
    """
    if isinstance(content, Values):
        return content
    if isinstance(content, np.ndarray):
        return Values(checked_pixels(content))
    if content[:6] == NPY:
        return Values(checked_pixels(channels_last(npy_array(content))))
    reader = READERS.get(content[:4])
    if reader is not None and not plain and (values := reader(content)) is not None:
        return values
    with opened(content, size) as image:
        if plain or image.mode.startswith("I") or content[:8] != PNG or not has_16_bits(content):
            return of_pillow(image)
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            raise ImageError("has 16 bits and is stored turned; save it upright")
        if (pixels := cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)) is None:
            raise ImageError("cannot be decoded")
        # colour type 4 in the header: grey and alpha
        order = [0, 3] if content[25] == 4 else [2, 1, 0, 3][: pixels.shape[2]]
        return Values(checked_pixels(pixels[:, :, order]), pixels.shape[2] == 4)


def of_pillow(image: Image.Image) -> Values:
    """Return the values of an image that Pillow has opened, turned upright by its EXIF data.

    Raises ImageError for a size or values that are not supported.
    """
    image.load()  # metadata may follow the pixels
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        array = np.asarray(image)[:, :, None]
        whole = array.dtype.kind != "f" and 0 <= array.min() <= array.max() < 65536
        return Values(checked_pixels(array.astype(np.uint16) if whole else array))
    grey = image.mode in GREY
    if image.has_transparency_data:
        pixels = np.asarray(image.convert("RGBA"))
        return Values(checked_pixels(pixels[:, :, [0, 3]] if grey else pixels), True)
    return Values(checked_pixels(np.atleast_3d(np.asarray(image.convert("L" if grey else "RGB")))))


# --- arrays


def npy_array(content: bytes) -> np.ndarray:
    """Return the array of a .npy file, as a view into its bytes.

    Raises ImageError if the values are not numbers, or if the file's length and header disagree.
    """
    stream = io.BytesIO(content)
    # Exception: Python's parser, which NumPy uses, may raise any.
    with explained(
        Exception,
        lambda error: ImageError(f"is no array of NumPy's ({' '.join(str(error).split())[:80]})"),
    ):
        version = np.lib.format.read_magic(stream)
        read: Any = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, fortran, dtype = read[version](stream)
    if dtype.hasobject or dtype.kind not in "iuf":
        raise ImageError(
            f"is an array of {str(dtype)[:40]}; save numbers: uint8, uint16 or float32"
        )
    start = stream.tell()
    size = len(content) - start
    if min(shape, default=0) < 1 or size != math.prod(shape) * dtype.itemsize:
        raise ImageError(
            f"has {size:,} bytes of values, but its header says {list(shape)[:8]} of {dtype}"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape, order="F" if fortran else "C")


def channels_last(array: np.ndarray) -> np.ndarray:
    """Move the channels of an image to the last axis: [H, W, C]. An image [H, W] gets one channel.

    The channels are in the first or the last axis, whichever has at most MOST_CHANNELS entries. If
    both axes have so few, the channels are in the first one for shapes like [3, 8, 8], whose last
    two axes are equal and differ from the first, and in the last one for all others. Raises
    ImageError if neither axis is possible.
    """
    if array.ndim == 2:
        return array[..., None]
    if array.ndim == 3 and min(array.shape[0], array.shape[-1]) <= MOST_CHANNELS:
        a, b, c = array.shape
        channels_first = c > MOST_CHANNELS or (a <= MOST_CHANNELS and a != b == c)
        return np.moveaxis(array, 0, -1) if channels_first else array
    raise ImageError(
        f"is of shape {list(array.shape)[:8]}; give [H, W], [H, W, C] or [C, H, W] with at most"
        f" {MOST_CHANNELS} channels"
    )


def check_shape(height: int, width: int, channels: int) -> None:
    """Raise ImageError for a size or number of channels that is not supported."""
    check_size((height, width), None)
    if min(height, width) < MIN_SIDE:
        raise ImageError(f"is only {width}x{height} px")
    if not 1 <= channels <= MOST_CHANNELS:
        raise ImageError(f"has {channels} channels; at most {MOST_CHANNELS} are read")


def checked_pixels(array: np.ndarray) -> np.ndarray:
    """Return an array [H, W, C] unchanged if it is uint8 or uint16, else converted to float32.

    Raises ImageError if a whole number has no exact float32, if a number is not finite, or if the
    size is not supported.
    """
    check_shape(*array.shape)
    dtype = array.dtype.newbyteorder("=")
    if dtype.name not in RANGES:
        dtype = np.dtype(np.float32)
    with np.errstate(over="ignore"):
        pixels = np.ascontiguousarray(array, dtype)
    if pixels.dtype != np.float32:
        return pixels
    is_exact = array.dtype.kind == "f" or bool((pixels == array).all())
    if not is_exact or not np.isfinite(pixels).all():
        raise ImageError(
            "has values that are not finite, or that no float of 32 bits holds: whole numbers"
            f" above {1 << 24:,}"
        )
    return pixels


# --- conversion


def bring(values: Values, spec: ImageSpec) -> np.ndarray:
    """Convert values to the channels and depth of `spec`, [H, W, C].

    - 8 bits become 16 by multiplication with 257. 16 bits become 8 by dropping the low bits.
      Integers become floats of the same value.
    - Grey is repeated to RGB. RGB is weighted to grey (ITU-R 601).
    - If `spec` has alpha, an image without it becomes opaque. If `spec` has none, an image with
      alpha is put on white.

    Raises ImageError for other conversions.
    """
    pixels, alpha = values
    if pixels.dtype != spec.depth:
        if pixels.dtype == np.float32:
            raise ImageError(
                "has floating-point pixels; save it with 8 or 16 bits, or pack it with --depth"
                " float"
            )
        if spec.depth == "uint16":
            pixels = pixels.astype(np.uint16) * np.uint16(257)
        elif spec.depth == "uint8":
            pixels = (pixels >> 8).astype(np.uint8)
        else:
            pixels = pixels.astype(np.float32)
    most = int(RANGES[spec.depth][1])
    if (
        alpha
        and spec.depth == "float32"
        and not 0 <= pixels[:, :, -1].min() <= pixels[:, :, -1].max() <= 1
    ):
        raise ImageError("has alpha outside 0 to 1")
    if alpha and not spec.alpha:
        wide: Any = pixels.astype(WIDE[spec.depth])
        white = wide[:, :, :-1] * wide[:, :, -1:] + most * (most - wide[:, :, -1:])
        if spec.depth != "float32":
            white = (white + most // 2) // most
        pixels = white.astype(spec.depth)
        alpha = False
    colours = pixels[:, :, : pixels.shape[2] - alpha]
    if colours.shape[2] != spec.colours:
        if {colours.shape[2], spec.colours} != {1, 3}:
            raise ImageError(
                f"has {colours.shape[2]} channels{' and alpha' * alpha} where {spec.words} was"
                " expected; pass "
                f"--channels {pixels.shape[2]}"
            )
        if spec.colours == 3:
            colours = np.repeat(colours, 3, axis=2)
        elif spec.depth == "uint8":
            grey = Image.fromarray(np.ascontiguousarray(colours)).convert("L")
            colours = np.asarray(grey)[:, :, None]
        else:
            floats = colours @ np.array([0.299, 0.587, 0.114])
            if spec.depth != "float32":
                floats = floats.round()
            colours = floats.astype(spec.depth)[:, :, None]
    if not spec.alpha:
        return np.ascontiguousarray(colours)
    opacity = pixels[:, :, -1:] if alpha else np.full_like(pixels[:, :, :1], most)
    return np.ascontiguousarray(np.dstack([colours, opacity]))


extras.attach(__name__)
