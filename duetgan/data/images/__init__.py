"""Open, resize and encode single images. The rules for opening a file are in docs/lmdb.md."""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cv2
import numpy as np
from PIL import Image

from duetgan.data.errors import MOST_PIXELS, ImageError
from duetgan.utils.errors import explained

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".avif", ".heic", ".heif"}
)
HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")  # brands in the header
PNG = b"\x89PNG\r\n\x1a\n"  # first bytes of a PNG file
MIN_SIDE = 4  # px; smaller ones are placeholders and tracking pixels, not images
# Errors that Pillow raises for damaged files; RuntimeError is from the decoders of AVIF and HEIC.
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    RuntimeError,
)
BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
JPEG_QUALITY = 95  # without chroma subsampling

MEANS = "+2x2-mean"  # suffix in the metadata if lower resolutions are stored, by such means
# mode of `fit` -> its name in the metadata
RESIZE_FILTERS = {"exact": "none", "pad": "zero-pad", "crop": "centre-crop+lanczos"}
# modes of `fit` that are the preprocessing of published classifiers
PUBLISHED = re.compile("shorter-side-([0-9]{1,5})[+](bilinear|bicubic|lanczos)[+]centre-crop")
NO_HEIF = "is a HEIC image, which needs a package that is not installed: pip install pillow-heif"
TOO_LARGE = f"has more than {MOST_PIXELS:,} pixels; make it smaller first"

# Warnings about unusual EXIF data are ignored; too many pixels are an error.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.simplefilter("error", Image.DecompressionBombWarning)


def formats(content: bytes) -> tuple[str, ...]:
    """Return the names of the formats that Pillow may try for a file with these bytes.

    Raises ImageError for a HEIC file if the package that reads HEIC is not installed.
    """
    if content[4:8] != b"ftyp" or content[8:12] not in HEIC or b"avif" in content[8:32]:
        return FORMATS
    with explained(ImportError, lambda _: ImageError(NO_HEIF)):
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found,unused-ignore]
    register_heif_opener()
    return ("HEIF",)


def has_16_bits(content: bytes) -> bool:
    """Return True if an image file, which Pillow can open, has 16 bits per value.

    Pillow may keep only the high 8 bits of such a file.
    """
    if content[:8] == PNG:
        return content[24] == 16
    if content[:2] not in (b"II", b"MM", b"P5"):
        return False
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        # BitsPerSample
        return image.mode.startswith("I") or getattr(image, "tag_v2", {}).get(258, (8,))[0] == 16


@contextmanager
def opened(content: bytes, size: tuple[int, int] | None) -> Iterator[Image.Image]:
    """Open an untrusted image file in a `with` block. Pillow decodes the pixels inside the block.

    Args:
        content: bytes of the file.
        size: height and width from the file's packed record, which the header must have; None for a
            file that is not packed. The checksums of a packed file have been checked before.

    Raises ImageError for a file that is refused, and for every error of Pillow.
    """
    if not content:
        raise ImageError("is an empty file")
    try:
        if size is None and content[:8] == PNG:
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                image.verify()  # Pillow compares the checksums of PNG chunks only here.
        with Image.open(io.BytesIO(content), formats=formats(content)) as image:
            # Pillow may only warn about large images: the warning filters belong to the process.
            # `size` may have height and width swapped for an image that is stored rotated.
            check_size((image.height, image.width), None if image.size == size else size)
            # The first frame of an MPO, a camera's JPEG, is the image.
            if image.format != "MPO" and has_another(image):
                raise ImageError("is animated or has several pages; save one of them as an image")
            # The range of the values is unknown; 16 bits without a sign are I;16.
            if image.format == "TIFF" and image.mode == "I":
                raise ImageError("has 32-bit or signed pixels; save it with 8 or 16 bits")
            yield image
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(f"is not an image (it begins with {content[:12]!r})") from None
    except BOMB:
        raise ImageError(TOO_LARGE) from None
    except DAMAGED as error:
        raise ImageError(f"is truncated or damaged ({error})") from None


def has_another(image: Image.Image) -> bool:
    """Return True if an image has a second frame or page.

    Further ones are not counted, because this could take minutes.
    """
    try:
        image.seek(1)
    except EOFError:
        return False
    return True


def check_size(in_header: tuple[int, int], size: tuple[int, int] | None) -> None:
    """Raise ImageError if the height and width in a header are too large, or differ from `size`.

    `size` is the height and width in the file's packed record; None if there is no record.
    """
    if in_header[0] * in_header[1] > MOST_PIXELS:
        raise ImageError(TOO_LARGE)
    if size is not None and in_header != size:
        raise ImageError(
            f"is {in_header[1]}x{in_header[0]} px by its header, {size[1]}x{size[0]} px by its"
            " record"
        )


def centre_box(
    height: int, width: int, target: tuple[int, int] = (1, 1)
) -> tuple[int, int, int, int]:
    """Return the largest centre crop with the aspect ratio of `target`, which is (height, width).

    The result is the crop's top, left, height and width in px.
    """
    down, across = target
    h = min(height, max(1, round(width * down / across)))
    w = min(width, max(1, round(height * across / down)))
    return (height - h) // 2, (width - w) // 2, h, w


def fit(
    pixels: np.ndarray, size: int | tuple[int, int], mode: str, alpha: bool = False
) -> np.ndarray:
    """Resize an image [H, W, C] of any depth to `size`: the side of a square, or (height, width).

    Modes:
        exact: return the image unchanged, and raise ImageError if it has another size.
        crop: scale the largest centre crop with the target's aspect ratio by Pillow's Lanczos
            filter.
        pad: scale the image down (Lanczos) if it is larger than the target, and centre it on zeros.
        shorter-side-256+bilinear+centre-crop (PUBLISHED): scale the shorter side to 256 px and take
            the centre crop, as published classifiers do.

    With `alpha`, the last channel is transparency.
    """
    height, width = pixels.shape[:2]
    down, across = size if isinstance(size, tuple) else (size, size)
    if published := PUBLISHED.fullmatch(mode):
        short, filtering = int(published[1]), Image.Resampling[published[2].upper()]
        height, width = (int(short * side / min(height, width)) for side in (height, width))
        top, left = round((height - down) / 2), round((width - across) / 2)
        return _scale(pixels, height, width, filtering, alpha=alpha)[
            top : top + down, left : left + across
        ]
    if (height, width) == (down, across):
        return pixels
    if mode == "exact":
        raise ImageError(
            f"is {width}x{height} px where {across}x{down} was expected; pass --size N, or WxH"
        )
    if mode == "crop":
        top, left, high, wide = centre_box(height, width, (down, across))
        return _scale(pixels[top : top + high, left : left + wide], down, across, alpha=alpha)
    # The side that limits the scale
    room, needed = (down, height) if height * across > width * down else (across, width)
    if needed > room:
        height, width = (max(1, round(side * room / needed)) for side in (height, width))
        pixels = _scale(pixels, height, width, alpha=alpha)
    top, left = (down - height) // 2, (across - width) // 2
    return np.pad(pixels, ((top, down - height - top), (left, across - width - left), (0, 0)))


def thumbnail(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the centre square of an image as RGB for display: uint8 [3, side, side].

    The image is uint8 [H, W, C]. An image smaller than `side` is enlarged by repeating its pixels.
    """
    square = _pillow(fit(pixels, min(side, *pixels.shape[:2]), "crop")).convert("RGB")
    return np.asarray(square.resize((side, side), Image.Resampling.NEAREST)).transpose(2, 0, 1)


def _pillow(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(
        np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    )


def trained_mode(checkpoint: Mapping[str, Any]) -> str:
    """Return the mode of `fit` that resizes images like a checkpoint's training images."""
    name = str((checkpoint.get("data") or {}).get("resize_filter", ""))
    if PUBLISHED.fullmatch(name):
        return name
    return "pad" if name.startswith(RESIZE_FILTERS["pad"]) else "crop"


def _scale(
    pixels: np.ndarray,
    height: int,
    width: int,
    filtering: Image.Resampling = Image.Resampling.LANCZOS,
    *,
    alpha: bool,
) -> np.ndarray:
    if pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3):
        return np.asarray(_pillow(pixels).resize((width, height), filtering)).reshape(
            height, width, pixels.shape[2]
        )

    def planes(floats: np.ndarray) -> np.ndarray:
        parts = [Image.fromarray(floats[:, :, place]) for place in range(floats.shape[2])]
        return np.dstack([np.asarray(part.resize((width, height), filtering)) for part in parts])

    return through_floats(planes, pixels, alpha)


def through_floats(
    scaled: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray, alpha: bool
) -> np.ndarray:
    """Convert an image [H, W, C] to float32, apply the function `scaled`, and convert back.

    The result has the depth of `pixels`. With `alpha`, the last channel is transparency: the
    colours are multiplied by it before `scaled` is called, and divided by it afterwards.
    """
    floats, integers = pixels.astype(np.float32), pixels.dtype != np.float32
    most = np.float32(np.iinfo(pixels.dtype).max if integers else 1)
    if alpha:
        floats[:, :, :-1] *= floats[:, :, -1:] / most
    floats = scaled(floats)
    if alpha:
        opacity = (floats[:, :, -1:] / most).clip(0, 1)
        visible = (opacity * most).round() > 0 if integers else opacity > 0
        floats[:, :, :-1] = np.where(visible, floats[:, :, :-1] / np.where(visible, opacity, 1), 0)
    if integers or alpha:
        floats = floats.clip(0, most)
    return (floats + np.float32(0.5) if integers else floats).astype(pixels.dtype)


def resized(pixels: np.ndarray, size: tuple[int, int], method: int, alpha: bool) -> np.ndarray:
    """Resize an image [H, W, C] of any depth to `size`, which is (height, width).

    `method` is one of OpenCV's interpolation constants, such as cv2.INTER_AREA. With `alpha`, the
    last channel is transparency.
    """

    def scaled(pixels: np.ndarray) -> np.ndarray:
        if pixels.shape[2] <= 4:  # OpenCV's limit of channels
            return cv2.resize(pixels, size[::-1], interpolation=method).reshape(
                *size, pixels.shape[2]
            )
        parts = (
            np.ascontiguousarray(pixels[:, :, first : first + 4])
            for first in range(0, pixels.shape[2], 4)
        )
        return np.dstack([scaled(part) for part in parts])

    return through_floats(scaled, pixels, alpha) if alpha else scaled(pixels)


def encode(pixels: np.ndarray, encoding: str) -> bytes:
    """Encode an image [H, W, C] with 1, 3 or 4 channels, and return the bytes of the file.

    `encoding` is "png" (lossless, 8 or 16 bits; the last of 4 channels is alpha) or "jpeg" (of
    quality JPEG_QUALITY, without chroma subsampling). Raises ImageError if OpenCV cannot encode the
    image.
    """
    ordered = pixels
    if pixels.shape[2] > 1:  # OpenCV expects BGR
        ordered = np.ascontiguousarray(pixels[:, :, [2, 1, 0, 3][: pixels.shape[2]]])
    options = [cv2.IMWRITE_PNG_COMPRESSION, 6]
    if encoding == "jpeg":
        sampling = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
        options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, *sampling]
    done, content = cv2.imencode(".jpg" if encoding == "jpeg" else ".png", ordered, options)
    if not done:
        raise ImageError(f"cannot be encoded as {encoding}")
    return content.tobytes()
