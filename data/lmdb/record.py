"""From an image's pixels to what is stored of it: pure functions, so that any process can run them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from data.images import encode
from data.lmdb.format import CODEC_JPEG, CODEC_PNG, CODEC_RULES, ENCODINGS, SIGNATURE, check_sides, make_entry

CODECS = {"raw": CODEC_RULES, "jpeg": CODEC_JPEG, "png": CODEC_PNG}  # of images that are encoded here


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How every image of a file is stored. Raises ValueError for what does not fit together."""

    channels: int  # 1 or 3
    resolutions: tuple[int, ...]  # sides in px, ascending, each twice the one before; (0,): sizes of their own
    encoding: str = "raw"

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS or self.channels not in (1, 3):
            raise ValueError(f"encoding {self.encoding!r} and channels {self.channels} do not fit")
        check_sides(self.resolutions, self.encoding)


@dataclass(frozen=True)
class Record:
    """An image ready to be stored."""

    label: int
    entries: np.ndarray  # ENTRY [resolutions]
    payloads: tuple[bytes, ...]  # one for each resolution
    sums: np.ndarray  # int64 [2, C]: sums of the values and of their squares, at the largest resolution
    pixels: int  # in those sums
    signature: np.ndarray  # SIGNATURE [1]


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


def pyramid(image: np.ndarray, resolutions: Sequence[int]) -> list[np.ndarray]:
    """The image at every resolution, ascending; each is the mean of 2x2 pixels of the next larger one, rounded half
    up, as in the progressive growing of GANs (Karras et al. 2018, section 2: average pooling).
    """
    levels = [image]
    for side in reversed(resolutions[:-1]):
        smaller = cv2.resize(levels[-1], (side, side), interpolation=cv2.INTER_AREA)
        levels.append(smaller.reshape(side, side, image.shape[2]))
    return levels[::-1]


def halvings(side: int, smallest: int | None) -> tuple[int, ...]:
    """`side`, its half and so on down to `smallest` px (None: `side` alone), ascending.

    Raises ValueError if `side` is not `smallest` times a power of two.
    """
    sides = [side]
    while smallest is not None and sides[0] > smallest and sides[0] % 2 == 0:
        sides.insert(0, sides[0] // 2)
    if smallest is not None and sides[0] != smallest:
        raise ValueError(f"{side} px cannot be halved down to {smallest} px")
    return tuple(sides)


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


def mean_and_std(sums: np.ndarray, pixels: int) -> tuple[list[float], list[float]]:
    """Per channel, in units of [0, 1], from added `pixel_sums` of so many pixels; the population's deviation."""
    mean, square = sums / pixels
    return (mean / 255).tolist(), (np.sqrt(np.maximum(square - mean**2, 0)) / 255).tolist()
