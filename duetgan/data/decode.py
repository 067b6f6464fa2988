"""Decode a stored image, crop it and bring it to size: the fast path of reading encoded images.

JPEG is decoded by libjpeg-turbo (simplejpeg), in RGB, and no more of it than needed: rows below the
crop are never decoded, and where a crop is several times as large as asked for it is decoded at a
half, a quarter or an eighth of its size (scaled DCT), at MARGIN times the size asked for or more.
PNG is decoded by OpenCV. What needs the rules of data/values.py is decoded by them.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np
import simplejpeg

from duetgan.data.errors import ImageError
from duetgan.data.images import PNG, check_size, resized
from duetgan.data.lmdb.format import CODEC_JPEG, CODEC_PNG
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.values import decode_image
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible

Box = tuple[int, int, int, int]  # top, left, height, width in px
Size = tuple[int, int]  # height, width in px

# a crop of a scaled image begins at a whole pixel of it: that must be less than one of the result
MARGIN = 1.5
MORE_ROWS = 16  # of a JPEG than a crop needs, see `first_rows`
TRIES = 10  # draws of a random crop before the middle is taken


@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """A random part of the image: Szegedy et al. 2015, "Going Deeper with Convolutions", section 6;
    the draws are made as by torchvision's RandomResizedCrop.
    """

    area: tuple[float, float] = (0.08, 1.0)  # share of the image, uniform
    # width / height, over that of what it becomes; uniform in the logarithm
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def box(
        self, height: int, width: int, draws: np.random.Generator, wanted: Size = (1, 1)
    ) -> Box:
        """A crop of an image of height x width px that becomes one of `wanted`; if TRIES draws do
        not fit, the largest one in the middle that keeps the aspect's bounds.
        """
        own = wanted[1] / wanted[0]
        low, high = math.log(self.aspect[0]), math.log(self.aspect[1])
        for area, log_aspect, row, column in draws.random((TRIES, 4)).tolist():
            target = height * width * (self.area[0] + area * (self.area[1] - self.area[0]))
            aspect = math.exp(low + log_aspect * (high - low)) * own
            w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                return int(row * (height - h + 1)), int(column * (width - w + 1)), h, w
        aspect = min(max(width / height, self.aspect[0] * own), self.aspect[1] * own)
        w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
        return (height - h) // 2, (width - w) // 2, h, w


def decode(
    payload: bytes | memoryview, codec: int, spec: ImageSpec, size: Size | None = None
) -> np.ndarray:
    """The whole image: [H, W, C] of the channels and depth of `spec`. Raises ImageError if it
    cannot be decoded, or if its header has another size than `size`, that of its record: then
    nothing is decoded.
    """
    channels = spec.channels
    if codec == CODEC_JPEG:
        return _decode_jpeg(payload, channels, size)
    if codec == CODEC_PNG:
        flag = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
        flag = flag if spec.plain else cv2.IMREAD_UNCHANGED
        # of its header
        width, height = int.from_bytes(payload[16:20], "big"), int.from_bytes(payload[20:24], "big")
        if payload[:8] != PNG:
            raise ImageError("cannot be decoded: it has no header of a PNG")
        check_size((height, width), size)
        pixels = cv2.imdecode(np.frombuffer(payload, np.uint8), flag)
        if (
            pixels is None
            or pixels.dtype != spec.depth
            or pixels.size != pixels.shape[0] * pixels.shape[1] * channels
        ):
            raise ImageError("cannot be decoded")
        pixels = pixels.reshape(*pixels.shape[:2], channels)
        return pixels if spec.plain or channels == 1 else pixels[:, :, [2, 1, 0, 3][:channels]]
    return decode_image(bytes(payload), spec, size)


def stored_image(reader: LMDBReader, index: int) -> tuple[np.ndarray, int]:
    """A record's image [H, W, C] and its label, 0 if unlabelled. Raises IndexError, DamageError."""
    if not 0 <= index < len(reader):
        raise IndexError(f"record {index} of {len(reader)}")
    if reader.meta.encoding == "raw":
        return reader.raw_image(index), int(reader.labels()[index])
    # its own label: another block's index may be damaged
    with reader.encoded(index) as (entry, payload, size):
        label = int(entry["label"])
        if not 0 <= label < max(1, reader.meta.labels):
            raise ImageError(
                f"label {label} has no class, the file has {len(reader.classes)} classes"
            )
        return decode(payload, entry["codec"], reader.meta.spec, size), label


def visible_image(reader: LMDBReader, index: int) -> np.ndarray:
    """A record's image for people: uint8 [H, W, 1 or 3]. Raises as `stored_image`."""
    return np.asarray(
        visible(stored_image(reader, index)[0].transpose(2, 0, 1), reader.spec)
    ).transpose(1, 2, 0)


def decode_crop(
    payload: bytes | memoryview,
    codec: int,
    box: Box,  # in the whole image
    size: Size,  # of the whole image, which its header must have
    out: np.ndarray,  # [C, H, W], filled
    spec: ImageSpec,  # its channels and depth
) -> None:
    """Decode the part of an image inside `box` and bring it to the size of `out`. Raises ImageError
    as `decode` does.

    Scaled by OpenCV: bilinear where it is enlarged or shrunk to not less than half (after the
    scaled DCT), else by area averaging.
    """
    top, left, h, w = box
    channels, height, width = out.shape
    shrink = min(8, 1 << int(math.log2(max(1.0, min(h / (MARGIN * height), w / (MARGIN * width))))))
    if codec != CODEC_JPEG:
        pixels = decode(payload, codec, spec, size)
    elif shrink > 1:
        pixels = _decode_jpeg(payload, channels, size, shrink)
        exact = pixels.shape[0] / size[0]  # a scaled image's sides are rounded up
        top, left, h, w = (round(value * exact) for value in box)
        h, w = min(h, pixels.shape[0] - top), min(w, pixels.shape[1] - left)
    else:
        part = first_rows(payload, top + h, size[0])
        rows = size[0] if part is payload else top + h + MORE_ROWS
        pixels = _decode_jpeg(part, channels, (rows, size[1]))
    crop_into(pixels, (top, left, h, w), out, alpha=spec.alpha)


def crop_into(
    pixels: np.ndarray,  # [H, W, C]
    box: Box,
    out: np.ndarray,  # [C, H, W], filled; fastest where it lies in memory as [H, W, C]
    alpha: bool = False,
) -> None:
    """Bring a part of a decoded image to size, channels first."""
    top, left, height, width = box
    pixels = pixels[top : top + height, left : left + width]
    channels, down, across = out.shape
    height, width = pixels.shape[:2]  # as far as the box lies in the image
    if (height, width) == (down, across):
        np.copyto(out.transpose(1, 2, 0), pixels)
        return
    method = cv2.INTER_AREA if height > 2 * down or width > 2 * across else cv2.INTER_LINEAR
    if alpha or channels > 4:
        np.copyto(out, resized(pixels, (down, across), method, alpha).transpose(2, 0, 1))
        return
    # OpenCV knows no third axis of length one
    target = out.transpose(1, 2, 0) if channels > 1 else out[0]
    if target.flags.c_contiguous:
        cv2.resize(pixels, (across, down), dst=target, interpolation=method)
    else:
        np.copyto(target, cv2.resize(pixels, (across, down), interpolation=method))


def first_rows(payload: bytes | memoryview, rows: int, height: int) -> bytes | memoryview:
    """A baseline JPEG that ends after its first `rows` rows, at least; the payload itself where
    that cannot be made.

    The height in the frame header is lowered; the decoder then stops after that many rows.
    MORE_ROWS more than needed are kept, since the last ones of an image are interpolated
    differently where colours are subsampled.
    """
    rows += MORE_ROWS
    at, end = 2, len(payload) - 9
    while rows < height and at < end and payload[at] == 0xFF:
        marker = payload[at + 1]
        if marker == 0xC0:  # the frame header of a baseline JPEG
            if int.from_bytes(payload[at + 5 : at + 7], "big") != height:
                break
            shortened = bytearray(payload)
            shortened[at + 5 : at + 7] = rows.to_bytes(2, "big")
            return bytes(shortened)
        if (0xC1 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xDA:
            break  # of another kind: a progressive one has scans of the whole image
        at += 2 + (payload[at + 2] << 8 | payload[at + 3])
    return payload


def _decode_jpeg(
    payload: bytes | memoryview, channels: int, size: Size | None, shrink: int = 1
) -> np.ndarray:
    """A JPEG, at 1/`shrink` of its size (1, 2, 4 or 8)."""
    try:
        rows, columns, *_ = simplejpeg.decode_jpeg_header(payload, strict=False)
        check_size((rows, columns), size)
        pixels = simplejpeg.decode_jpeg(
            payload,
            "GRAY" if channels == 1 else "RGB",
            min_factor=shrink,
            min_height=-(-rows // shrink) if shrink > 1 else 0,
            # the file's checksum was compared; warnings are those it had when it was packed
            strict=False,
        )
    except ImageError:
        raise
    except ValueError as error:
        raise ImageError(f"cannot be decoded ({error})") from None
    return np.asarray(pixels)
