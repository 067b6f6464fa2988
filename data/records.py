"""From an image's pixels to what is stored of it, and packed files of images that are in memory."""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from PIL import ExifTags, Image

from data.images import FORMATS, encode
from data.lmdb.format import CODEC_JPEG, CODEC_PNG, CODEC_RULES, SIGNATURE, Meta, make_entry
from data.lmdb.record import Layout, Record, halvings
from data.lmdb.writer import LMDBWriter
from utils.passport import Passport

CODECS = {"raw": CODEC_RULES, "jpeg": CODEC_JPEG, "png": CODEC_PNG}  # of images that are encoded here


def make_record(
    image: np.ndarray,  # uint8 [H, W, C], of the largest resolution
    label: int,
    layout: Layout,
    payload: bytes | None = None,  # the file to keep, for encoding "source" only
    codec: int = CODEC_RULES,  # of that file
) -> Record:
    """Encode an image at every resolution. Raises ValueError for a wrong shape or type, a label below 0."""
    side = layout.resolutions[-1]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != layout.channels:
        raise ValueError(f"image {image.dtype} {image.shape}, expected uint8 [H, W, {layout.channels}]")
    if side and image.shape[:2] != (side, side):
        raise ValueError(f"image of {image.shape[1]}x{image.shape[0]} px, expected {side}x{side}")
    if label < 0:
        raise ValueError(f"label {label} is negative")
    if (payload is None) == (layout.encoding == "source"):
        raise ValueError(f"encoding {layout.encoding!r} and payload do not fit together")
    levels = pyramid(image, layout.resolutions)
    if payload is not None:
        payloads: Sequence[bytes] = [payload]
    elif layout.encoding == "raw":
        payloads = [np.ascontiguousarray(level.transpose(2, 0, 1)).tobytes() for level in levels]
    else:
        payloads = [encode(level, layout.encoding) for level in levels]
    codec = CODECS.get(layout.encoding, codec)
    entries = [
        make_entry(content, label, level.shape[0], level.shape[1], codec)
        for content, level in zip(payloads, levels, strict=True)
    ]
    pixels = image.shape[0] * image.shape[1]
    return Record(label, np.concatenate(entries), tuple(payloads), pixel_sums(image), pixels, signature(image))


def add_image(writer: LMDBWriter, image: np.ndarray, label: int = 0, payload: bytes | None = None) -> None:
    """Append an image uint8 [H, W, C] of the largest resolution to a file; see `make_record`."""
    writer.add_record(make_record(image, label, writer.layout, payload))


def pyramid(image: np.ndarray, resolutions: Sequence[int]) -> list[np.ndarray]:
    """The image at every resolution, ascending; each is the mean of 2x2 pixels of the next larger one, rounded half
    up, as in the progressive growing of GANs (Karras et al. 2018, section 2: average pooling).
    """
    levels = [image]
    for side in reversed(resolutions[:-1]):
        smaller = cv2.resize(levels[-1], (side, side), interpolation=cv2.INTER_AREA)
        levels.append(smaller.reshape(side, side, image.shape[2]))
    return levels[::-1]


def signature(pixels: np.ndarray) -> np.ndarray:
    """The signature of an image uint8 [H, W, C], as an array of shape [1] and type SIGNATURE."""
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.blake2b(pixels.data, digest_size=8, person=b"%dx%d" % pixels.shape[:2])
    grey = pixels if pixels.shape[2] == 1 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (9, 8), interpolation=cv2.INTER_AREA)
    bits = np.packbits(small[:, :-1] < small[:, 1:])
    result = np.zeros(1, SIGNATURE)
    result[0] = (int.from_bytes(digest.digest(), "little"), int.from_bytes(bits.tobytes(), "big"))
    return result


def pixel_sums(image: np.ndarray) -> np.ndarray:
    """Sums of the values and of their squares of an image uint8 [H, W, C]: int64 [2, C]."""
    channels = image.shape[2]
    squares = cv2.multiply(image, image, dtype=cv2.CV_32F)  # at most 255**2: exact, as are the float64 sums
    sums = [cv2.sumElems(values)[:channels] for values in (image, squares)]
    return np.array(sums).astype(np.int64)


def plain_codec(content: bytes, channels: int) -> int:
    """The decoder that reads this file as `decode_by_rules` does: CODEC_JPEG or CODEC_PNG where no rule applies to it
    (8 bits, no transparency, no orientation, no change from colour to grey), else CODEC_RULES.
    """
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        if image.mode not in ("L", "RGB") or (image.mode == "RGB" and channels == 1):
            return CODEC_RULES
        if image.has_transparency_data or image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return CODEC_RULES
        if image.format == "JPEG":
            return CODEC_JPEG
        depth = content[24]  # bits, in the header
        return CODEC_PNG if image.format == "PNG" and depth == 8 else CODEC_RULES


def pack_arrays(
    path: str | Path,
    images: np.ndarray,  # uint8 [n, C, H, H]
    labels: Sequence[int] | np.ndarray | None = None,  # [n]
    classes: Sequence[str] = (),
    *,
    encoding: str = "raw",
    source: str = "arrays",
    passport: Passport | None = None,  # of generated images
    smallest: int | None = None,  # px: also store the images at half their side, a quarter and so on down to this
    overwrite: bool = False,
) -> Meta:
    """Pack images that are in memory. Raises UserError and ValueError as LMDBWriter does."""
    resolutions = halvings(images.shape[2], smallest)
    layout = Layout(channels=images.shape[1], resolutions=resolutions, encoding=encoding)
    with LMDBWriter(path, layout, classes=classes, source=source, passport=passport, overwrite=overwrite) as writer:
        for index, image in enumerate(images):
            label = 0 if labels is None else int(labels[index])
            add_image(writer, image.transpose(1, 2, 0), label)
        return writer.finish()
