"""Files of every depth and number of channels, and odd ones, made by tests."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

RNG = np.random.default_rng(11)
NUMBERS = RNG.integers(0, 60_000, (8, 8, 3)).astype(np.uint16)


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def png(pixels: np.ndarray) -> bytes:
    """Of [H, W, C], 8 or 16 bits; 2 channels are grey and alpha."""
    height, width, channels = pixels.shape
    kind, bits = {1: 0, 2: 4, 3: 2, 4: 6}[channels], pixels.itemsize * 8
    rows = pixels.astype(pixels.dtype.newbyteorder(">")).reshape(height, -1)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def npy_of(header: str, values: bytes = bytes(64), version: bytes = b"\1\0") -> bytes:
    """With any header."""
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header.encode() + values


FLOATS = RNG.normal(size=(8, 8, 5)).astype(np.float32)
GOOD = npy(FLOATS)


def with_value(value: float, dtype: Any = np.float32) -> bytes:
    array = np.zeros((8, 8, 5), dtype)
    array[3, 4, 1] = value
    return npy(array)


# name -> what the file is, made when it is asked for, and what is told of it
ODD: dict[str, tuple[Callable[[], bytes], str]] = {
    "pickled.npy": (lambda: npy(np.array([[1, "x"], [None, 2]], object), allow_pickle=True), "an array of object"),
    "objects in fields.npy": (lambda: npy_of("{'descr':[('a','O')],'fortran_order':False,'shape':(8,8)}"), "array of"),
    "text.npy": (lambda: npy(np.full((8, 8), "a")), "an array of <U1"),
    "truth.npy": (lambda: npy(np.zeros((8, 8, 5), bool)), "an array of bool"),
    "nan.npy": (lambda: with_value(np.nan), "not finite"),
    "inf.npy": (lambda: with_value(-np.inf), "not finite"),
    "too large.npy": (lambda: with_value(1e300, np.float64), "no float of 32 bits holds"),
    "too exact.npy": (lambda: with_value(2**40 + 1, np.int64), "whole numbers above 16,777,216"),
    "none.npy": (lambda: npy(np.zeros((0, 8, 8), np.uint8)), "bytes of values"),
    "number.npy": (lambda: npy(np.array(3, np.float32)), "bytes of values"),
    "five axes.npy": (lambda: npy(np.zeros((2, 2, 8, 8, 3), np.uint8)), "is of shape"),
    "channels.npy": (lambda: npy(np.zeros((40, 8, 40), np.uint8)), "is of shape"),
    "small.npy": (lambda: npy(np.zeros((3, 8, 5), np.float32)), "only 8x3 px"),
    "promised.npy": (lambda: npy_of("{'descr':'<f4','fortran_order':False,'shape':(1000000,1000000)}"), "bytes of v"),
    "negative.npy": (lambda: npy_of("{'descr':'<f4','fortran_order':False,'shape':(-8,-8)}"), "bytes of values"),
    "less.npy": (lambda: GOOD[:-100], "bytes of values"),
    "header.npy": (lambda: npy_of("{'descr': __import__('os').system('true')}"), "no array of NumPy's"),
    "deep.npy": (lambda: npy_of("(" * 5000), "no array of NumPy's"),
    "version.npy": (lambda: npy_of("{}", version=b"\x09\0"), "no array of NumPy's"),
    "magic.npy": (lambda: b"\x93NUMPY", "no array of NumPy's"),
    "empty.npy": (lambda: b"", "is an empty file"),
    "cut.png": (lambda: png(NUMBERS)[:120], "truncated or damaged"),
    "checksum.png": (lambda: png(NUMBERS)[:60] + b"\x55" + png(NUMBERS)[61:], "truncated or damaged"),
    "no bits.png": (lambda: bytes(bytearray(png(NUMBERS)[:24]) + b"\0" + png(NUMBERS)[25:]), "not an image|damaged"),
}
