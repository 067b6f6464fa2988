"""Decode stored images, crop them and resize them: the fast path for encoded images.

libjpeg-turbo (by simplejpeg) decodes JPEG files without the rows below the crop. A crop that is
much larger than its target is decoded at 1/2, 1/4 or 1/8 of its size (scaled DCT), but not below
MARGIN times the target's size. OpenCV decodes PNG. data/images/values.py decodes all other files.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np
import simplejpeg

from duetgan.data.errors import ImageError
from duetgan.data.images import PNG, check_size, resized
from duetgan.data.images.values import decode_image
from duetgan.utils.image_spec import ImageSpec

# Decoders of a payload, an image's stored bytes: the rules of data/images/values.py, or a faster
# decoder if the file needs no rule.
CODEC_RULES = 0
CODEC_JPEG = 1
CODEC_PNG = 2

Box = tuple[int, int, int, int]  # top, left, height, width in px
Size = tuple[int, int]  # height, width in px

# A crop of a scaled image starts at a whole pixel, which must be smaller than one of the result.
MARGIN = 1.5
EXTRA_ROWS = 16  # decoded below the crop of a JPEG, see `first_rows`
TRIES = 10  # draws of a random crop before the centre crop is used


@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """The settings of random crops, which are drawn as by torchvision's RandomResizedCrop.

    The method is from Szegedy et al. 2015, "Going Deeper with Convolutions", section 6.
    """

    area: tuple[float, float]  # fraction of the image, uniform
    # width / height relative to that of the target, uniform in the logarithm
    aspect: tuple[float, float]

    def box(self, height: int, width: int, draws: np.random.Generator, target: Size) -> Box:
        """Return a random crop of an image of `height` x `width` px, drawn with `draws`.

        The crop will be resized to `target`, so the limits `aspect` are relative to the aspect
        ratio of `target`. If none of TRIES draws fits into the image, return the largest centre
        crop with an allowed aspect ratio.
        """
        target_aspect = target[1] / target[0]
        low, high = math.log(self.aspect[0]), math.log(self.aspect[1])
        for area, log_aspect, row, column in draws.random((TRIES, 4)).tolist():
            pixels = height * width * (self.area[0] + area * (self.area[1] - self.area[0]))
            aspect = math.exp(low + log_aspect * (high - low)) * target_aspect
            w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
            if 0 < w <= width and 0 < h <= height:
                return int(row * (height - h + 1)), int(column * (width - w + 1)), h, w
        least, most = self.aspect[0] * target_aspect, self.aspect[1] * target_aspect
        aspect = min(max(width / height, least), most)
        w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
        return (height - h) // 2, (width - w) // 2, h, w


def decode(
    payload: bytes | memoryview, codec: int, spec: ImageSpec, size: Size | None = None
) -> np.ndarray:
    """Decode a whole image to [H, W, C], with the channels and depth of `spec`.

    `codec` is one of the constants CODEC_*. `size` is the height and width in the packed record;
    None if any size is accepted. Raises ImageError if the image cannot be decoded, or if its header
    has another size, which is checked before decoding.
    """
    if codec == CODEC_JPEG:
        return _decode_jpeg(payload, spec.channels, size)
    if codec == CODEC_PNG:
        return _decode_png(payload, spec, size)
    return decode_image(bytes(payload), spec, size)


def _decode_png(payload: bytes | memoryview, spec: ImageSpec, size: Size | None) -> np.ndarray:
    channels = spec.channels
    if not spec.plain:
        flag = cv2.IMREAD_UNCHANGED
    else:
        flag = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
    # width and height in the header
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
    if spec.plain or channels == 1:
        return pixels
    return pixels[:, :, [2, 1, 0, 3][:channels]]  # from OpenCV's BGR


def decode_crop(
    payload: bytes | memoryview,
    codec: int,
    box: Box,  # in the whole image
    size: Size,  # of the whole image, as in its header
    out: np.ndarray,  # [C, H, W], filled
    spec: ImageSpec,  # channels and depth
) -> None:
    """Decode the part of an image inside `box`, and resize it to fill `out`.

    If `box` is much larger than `out`, a JPEG is first decoded at a reduced size (scaled DCT).
    OpenCV then resizes: by area averaging if a side shrinks to less than half, else bilinearly.
    Raises ImageError if the image cannot be decoded, or if its header has another size than `size`.
    """
    top, left, h, w = box
    channels, height, width = out.shape
    shrink = min(8, 1 << int(math.log2(max(1.0, min(h / (MARGIN * height), w / (MARGIN * width))))))
    if codec != CODEC_JPEG:
        pixels = decode(payload, codec, spec, size)
    elif shrink > 1:
        pixels = _decode_jpeg(payload, channels, size, shrink)
        scale = pixels.shape[0] / size[0]  # not exactly 1 / shrink: sides are rounded up
        top, left, h, w = (round(value * scale) for value in box)
        h, w = min(h, pixels.shape[0] - top), min(w, pixels.shape[1] - left)
    else:
        part = first_rows(payload, top + h, size[0])
        rows = size[0] if part is payload else top + h + EXTRA_ROWS
        pixels = _decode_jpeg(part, channels, (rows, size[1]))
    crop_into(pixels, (top, left, h, w), out, alpha=spec.alpha)


def crop_into(
    pixels: np.ndarray,  # [H, W, C]
    box: Box,
    out: np.ndarray,  # [C, H, W], filled; fastest with the memory layout [H, W, C]
    alpha: bool,
) -> None:
    """Cut out the part of a decoded image inside `box`, and resize it to fill `out`."""
    top, left, height, width = box
    pixels = pixels[top : top + height, left : left + width]
    size = out.shape[1:]
    if pixels.shape[:2] != size:
        shrinks = pixels.shape[0] > 2 * size[0] or pixels.shape[1] > 2 * size[1]
        pixels = resized(pixels, size, cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR, alpha)
    np.copyto(out.transpose(1, 2, 0), pixels)


def first_rows(payload: bytes | memoryview, rows: int, height: int) -> bytes | memoryview:
    """Shorten a JPEG of `height` rows to its first `rows` rows and EXTRA_ROWS more.

    The height in the frame header is lowered, so the decoder stops there. The extra rows are needed
    because the last rows of an image with subsampled colours are interpolated differently. Returns
    the object `payload` itself if it has no more rows than these, or if it is not baseline: a
    progressive JPEG cannot be shortened.
    """
    rows += EXTRA_ROWS
    position, end = 2, len(payload) - 9
    while rows < height and position < end and payload[position] == 0xFF:
        marker = payload[position + 1]
        if marker == 0xC0:  # the frame header of a baseline JPEG
            if int.from_bytes(payload[position + 5 : position + 7], "big") != height:
                break
            shortened = bytearray(payload)
            shortened[position + 5 : position + 7] = rows.to_bytes(2, "big")
            return bytes(shortened)
        if (0xC1 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xDA:
            break  # not baseline: each scan of a progressive JPEG covers the whole image
        position += 2 + (payload[position + 2] << 8 | payload[position + 3])
    return payload


def _decode_jpeg(
    payload: bytes | memoryview, channels: int, size: Size | None, shrink: int = 1
) -> np.ndarray:
    """Decode a JPEG at 1/`shrink` of its size, where `shrink` is 1, 2, 4 or 8.

    Raises ImageError if it cannot be decoded, or if its header has another height and width than
    `size`.
    """
    try:
        rows, columns, *_ = simplejpeg.decode_jpeg_header(payload, strict=False)
        check_size((rows, columns), size)
        pixels = simplejpeg.decode_jpeg(
            payload,
            "GRAY" if channels == 1 else "RGB",
            min_factor=shrink,
            min_height=-(-rows // shrink) if shrink > 1 else 0,
            # The checksum matches, so the file has only the warnings that it had in packing.
            strict=False,
        )
    except ImageError:
        raise
    except ValueError as error:
        raise ImageError(f"cannot be decoded ({error})") from None
    return np.asarray(pixels)
