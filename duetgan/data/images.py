"""One image: open any file by the rules that docs/lmdb.md lists, bring it to size, encode it."""

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
    (
        *(
            ".jpg",
            ".jpeg",
            ".jfif",
            ".png",
            ".webp",
            ".bmp",
            ".gif",
            ".tif",
            ".tiff",
            ".ppm",
            ".pgm",
        ),
        *(".avif", ".heic", ".heif"),
    )
)
HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")  # brands in a file's head
PNG = b"\x89PNG\r\n\x1a\n"  # how one begins
MIN_SIDE = 4  # px; smaller ones are placeholders and tracking pixels, not images
# What Pillow raises for a file that is damaged.
DAMAGED = (
    *(
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        LookupError,
        TypeError,
        OverflowError,
        MemoryError,
    ),
    *(struct.error, zlib.error, RuntimeError),  # the last one: AVIF's and HEIC's decoders
)
BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
JPEG_QUALITY = 95  # without chroma subsampling

# mode -> its name in the metadata
RESIZE_FILTERS = {"exact": "none", "pad": "zero-pad", "crop": "centre-crop+lanczos"}
# of ready-made networks
PUBLISHED = re.compile("shorter-side-([0-9]{1,5})[+](bilinear|bicubic|lanczos)[+]centre-crop")
NO_HEIF = "is a HEIC image, which needs a package that is not installed: pip install pillow-heif"
TOO_LARGE = f"has more than {MOST_PIXELS:,} pixels; make it smaller first"

# Remarks about odd EXIF data are ignored, too many pixels are an error.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.simplefilter("error", Image.DecompressionBombWarning)


def formats(content: bytes) -> tuple[str, ...]:
    """Return the formats that a file may have. Raises ImageError for HEIC without the package that
    reads it.
    """
    if content[4:8] != b"ftyp" or content[8:12] not in HEIC or b"avif" in content[8:32]:
        return FORMATS
    with explained(ImportError, lambda _: ImageError(NO_HEIF)):
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found,unused-ignore]
    register_heif_opener()
    return ("HEIF",)


def has_16_bits(content: bytes) -> bool:
    """Whether a file that can be decoded has 16 bits a value, of which Pillow may keep the high 8."""
    if content[:8] == PNG:
        return content[24] == 16
    if content[:2] not in (b"II", b"MM", b"P5"):
        return False
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        # BitsPerSample
        return image.mode.startswith("I") or getattr(image, "tag_v2", {}).get(258, (8,))[0] == 16


@contextmanager
def opened(content: bytes, size: tuple[int, int] | None = None) -> Iterator[Image.Image]:
    """Around decoding a file of unknown origin: its image, which Pillow decodes when it is asked
    for pixels. Raises ImageError for what is refused, and with the reason for what Pillow raises.

    `size`: height and width that it must have, of its record, whose checksum has been compared.
    """
    if not content:
        raise ImageError("is an empty file")
    try:
        if size is None and content[:8] == PNG:
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                image.verify()  # Pillow checks the checksums of a PNG's chunks only when asked to
        with Image.open(io.BytesIO(content), formats=formats(content)) as image:
            # Pillow itself may only warn of its size, the filters are the process's; it may be
            # stored on its side.
            check_size((image.height, image.width), None if image.size == size else size)
            # MPO: a camera's JPEG, the first frame is the image
            if image.format != "MPO" and has_another(image):
                raise ImageError("is animated or has several pages; save one of them as an image")
            _check_depth(image, content)
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
    """Whether there is a second frame or page; to count 65,535 of them takes Pillow minutes."""
    try:
        image.seek(1)
    except EOFError:
        return False
    return True


def check_size(in_header: tuple[int, int], size: tuple[int, int] | None) -> None:
    """Raise ImageError for too many pixels, and if a header's height and width are not those of the
    record; None: they are not known.
    """
    if in_header[0] * in_header[1] > MOST_PIXELS:
        raise ImageError(TOO_LARGE)
    if size is not None and in_header != size:
        raise ImageError(
            f"is {in_header[1]}x{in_header[0]} px by its header, {size[1]}x{size[0]} px by its record"
        )


def _check_depth(image: Image.Image, content: bytes) -> None:
    """Raise ImageError for pixels whose range is not known from their values."""
    if image.format == "TIFF" and image.mode == "I":  # 16 bits without a sign are I;16
        bits = "32-bit" if image.tag_v2.get(258) == (32,) else "signed"  # type: ignore[attr-defined]  # BitsPerSample
        raise ImageError(f"has {bits} pixels; save it with 8 or 16 bits, without a sign")
    if (
        image.format == "PNG"
        and image.mode == "RGB"
        and content[24] == 16
        and "transparency" in image.info
    ):
        raise ImageError(
            "has 16-bit colours of which one is transparent; save it with an alpha channel"
        )


def centre_box(
    height: int, width: int, wanted: tuple[int, int] = (1, 1)
) -> tuple[int, int, int, int]:
    """Top, left, height and width of the largest part in the middle that has the shape of `wanted`
    (height, width).
    """
    down, across = wanted
    h, w = (
        min(height, max(1, round(width * down / across))),
        min(width, max(1, round(height * across / down))),
    )
    return (height - h) // 2, (width - w) // 2, h, w


def fit(
    pixels: np.ndarray, size: int | tuple[int, int], mode: str, alpha: bool = False
) -> np.ndarray:
    """Bring an image [H, W, C] of any depth to the side or the (height, width) `size`.

    Modes: "exact" leaves it and refuses other sizes; "crop" takes the largest part of that shape in
    the middle and scales it with Pillow's Lanczos filter; "pad" puts it in the middle of zeros,
    scaled down before (Lanczos) if it is larger than `size`, never scaled up.
    "shorter-side-256+bilinear+centre-crop" (PUBLISHED) scales the shorter side to 256 px and takes
    the middle, as classifiers of others have it. Raises ImageError for a size that "exact" does not
    allow.
    """
    height, width = pixels.shape[:2]
    down, across = size if isinstance(size, tuple) else (size, size)
    if published := PUBLISHED.fullmatch(mode):
        short, filtering = int(published[1]), Image.Resampling[published[2].upper()]
        height, width = (int(short * side / min(height, width)) for side in (height, width))
        top, left = round((height - down) / 2), round((width - across) / 2)
        return _scale(pixels, height, width, filtering, alpha)[
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
    # of the side that is tighter
    room, needed = (down, height) if height * across > width * down else (across, width)
    if needed > room:
        height, width = (max(1, round(side * room / needed)) for side in (height, width))
        pixels = _scale(pixels, height, width, alpha=alpha)
    top, left = (down - height) // 2, (across - width) // 2
    return np.pad(pixels, ((top, down - height - top), (left, across - width - left), (0, 0)))


def thumbnail(pixels: np.ndarray, side: int) -> np.ndarray:
    """An image uint8 [H, W, C] for people: uint8 [3, side, side], its middle, small ones with their
    pixels enlarged.
    """
    middle = _pillow(fit(pixels, min(side, *pixels.shape[:2]), "crop")).convert("RGB")
    return np.asarray(middle.resize((side, side), Image.Resampling.NEAREST)).transpose(2, 0, 1)


def _pillow(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(
        np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    )


def trained_mode(checkpoint: Mapping[str, Any]) -> str:
    """The mode of `fit` for a further image, as the data of a checkpoint's training was brought to
    size.
    """
    name = str((checkpoint.get("data") or {}).get("resize_filter", ""))
    if PUBLISHED.fullmatch(name):
        return name
    return "pad" if name.startswith(RESIZE_FILTERS["pad"]) else "crop"


def _scale(
    pixels: np.ndarray,
    height: int,
    width: int,
    filtering: Any = Image.Resampling.LANCZOS,
    alpha: bool = False,
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
    """`scaled` of an image's values as float32 [H, W, C], its colours multiplied by alpha
    meanwhile; in its depth.
    """
    floats, integers = pixels.astype(np.float32), pixels.dtype != np.float32
    most = np.float32(np.iinfo(pixels.dtype).max if integers else 1)
    if alpha:
        floats[:, :, :-1] *= floats[:, :, -1:] / most
    floats = scaled(floats)
    if alpha:
        opacity = (floats[:, :, -1:] / most).clip(0, 1)
        seen = (opacity * most).round() > 0 if integers else opacity > 0
        floats[:, :, :-1] = np.where(seen, floats[:, :, :-1] / np.where(seen, opacity, 1), 0)
    if integers or alpha:
        floats = floats.clip(0, most)
    return (floats + np.float32(0.5) if integers else floats).astype(pixels.dtype)


def resized(
    pixels: np.ndarray, size: tuple[int, int], method: int, alpha: bool = False
) -> np.ndarray:
    """An image [H, W, C] of any depth by OpenCV's `method` at a height and width: [height, width,
    C].
    """

    def scaled(pixels: np.ndarray) -> np.ndarray:
        if pixels.shape[2] <= 4:  # OpenCV takes no more at once
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
    """A "png" (lossless, 8 or 16 bits; 4 channels: the last is alpha) or "jpeg" (quality
    JPEG_QUALITY, 4:4:4) file of an image [H, W, 1, 3 or 4].
    """
    ordered = (
        np.ascontiguousarray(pixels[:, :, [2, 1, 0, 3][: pixels.shape[2]]])
        if pixels.shape[2] > 1
        else pixels
    )
    options = [cv2.IMWRITE_PNG_COMPRESSION, 6]
    if encoding == "jpeg":
        sampling = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
        options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, *sampling]
    done, content = cv2.imencode(".jpg" if encoding == "jpeg" else ".png", ordered, options)
    if not done:
        raise ImageError(f"cannot be encoded as {encoding}")
    return content.tobytes()
