"""TIFF files of every depth and number of pages, and odd ones, made by tests."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.data.images.values_files import NUMBERS


def tiff(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pytest.importorskip("tifffile").imwrite(buffer, array, **options)
    return buffer.getvalue()


def pages(array: np.ndarray, **options: Any) -> bytes:
    """A page for each of [n, H, W]."""
    return tiff(array, photometric="minisblack", metadata=None, **options)


def tagged(content: bytes, changes: dict[int, int], page: int = 0) -> bytes:
    """A little-endian TIFF whose tags have other values."""
    changed, at = bytearray(content), struct.unpack_from("<I", content, 4)[0]
    for _ in range(page):
        at = struct.unpack_from("<I", content, at + 2 + 12 * struct.unpack_from("<H", content, at)[0])[0]
    for number in range(struct.unpack_from("<H", content, at)[0]):
        place = at + 2 + 12 * number
        code, kind = struct.unpack_from("<HH", content, place)
        if code in changes:
            struct.pack_into("<H" if kind == 3 else "<I", changed, place + 8, changes[code])
    return bytes(changed)


def looped(content: bytes) -> bytes:
    """A TIFF whose second page is followed by the first."""
    changed, first = bytearray(content), struct.unpack_from("<I", content, 4)[0]
    at = first
    for _ in range(2):
        place = at + 2 + 12 * struct.unpack_from("<H", content, at)[0]
        at = struct.unpack_from("<I", content, place)[0]
    struct.pack_into("<I", changed, place, first)
    return bytes(changed)


def bomb() -> bytes:
    """A TIFF of 8x8 px whose strip unpacks to 200 MB."""
    content = pages(np.zeros((2, 8, 8), np.uint16), compression="zlib")
    packed = zlib.compress(bytes(200 << 20), 9)
    return tagged(content, {273: len(content), 279: len(packed)}) + packed


def of_16_bits(**options: Any) -> bytes:
    return tiff(NUMBERS, photometric="rgb", **options)


# name -> what the file is, made when it is asked for, and what is told of it
ODD: dict[str, tuple[Callable[[], bytes], str]] = {
    "beyond.tif": (lambda: tagged(of_16_bits(), {273: 10_000}), "lies beyond its end"),
    "long.tif": (lambda: tagged(of_16_bits(), {279: 2**31}), "lies beyond its end"),
    "wide.tif": (lambda: tagged(of_16_bits(), {256: 60_000, 257: 60_000}), "more than 89,478,485 pixels"),
    "no bits.tif": (lambda: tagged(pages(NUMBERS.transpose(2, 0, 1).copy()), {258: 0}), "has a page of|damaged"),
    "samples.tif": (
        lambda: tagged(pages(NUMBERS.transpose(2, 0, 1).copy()), {277: 65_535}),
        "channels|damaged|page of",
    ),
    "no width.tif": (lambda: tagged(of_16_bits(), {256: 0}), "only 0x8 px"),
    "pages.tif": (lambda: pages(np.zeros((65_535, 4, 4), np.uint8)), "more than 32 pages"),
    "loop.tif": (lambda: looped(pages(NUMBERS.transpose(2, 0, 1).copy())), "pages|damaged|TIFF"),
    "cut.tif": (lambda: of_16_bits()[:-200], "lies beyond its end"),
    "bomb.tif": (bomb, "holds more than it declares|several"),
    "sizes.tif": (lambda: tagged(pages(NUMBERS.transpose(2, 0, 1).copy()), {257: 7}, 1), "of several sizes or kinds"),
    "nan.tif": (lambda: tiff(np.full((8, 8), np.nan, np.float32)), "not finite"),
    "premultiplied.tif": (
        lambda: tiff(np.zeros((8, 8, 4), np.uint16), photometric="rgb", extrasamples=["assocalpha"]),
        "multiplied by alpha",
    ),
    "inverted.tif": (
        lambda: tiff(np.zeros((2, 8, 8), np.uint16), photometric="miniswhite", metadata=None),
        "save grey or RGB",
    ),
    "turned.tif": (lambda: of_16_bits(extratags=[(274, 3, 1, 6, True)]), "stored turned"),
}
