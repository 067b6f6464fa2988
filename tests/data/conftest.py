"""Small images and packed files."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image

from duetgan.data.images.values import decode_image
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import Source, open_source
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import EXIT_OK
from duetgan.utils.image_spec import ImageSpec

CLASSES = ["cat", "dog", "emu"]


def sample_images(count: int, channels: int = 3, side: int = 8, seed: int = 0) -> np.ndarray:
    """Random images uint8 [count, channels, side, side]."""
    return np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), dtype=np.uint8)


def save(path: Path, side: int = 8, shade: int = 100, mode: str = "RGB") -> None:
    """An image file of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (shade, shade // 2, 255 - shade)).convert(mode).save(path)


def as_file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """An image's file."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def decode_file(content: bytes, channels: int) -> np.ndarray:
    """A file as uint8 [H, W, channels]."""
    return decode_image(content, ImageSpec(channels, 0, 0))


def source_at(where: object, **options: Any) -> Source:
    """Open the source at a path."""
    return open_source(str(where), **options)


def succeed(main: Callable[[list[str]], Any], *arguments: str | Path) -> None:
    """Run a command and check that it succeeds."""
    assert run_cli(main, [str(part) for part in arguments]) == EXIT_OK


def flip(path: Path, needle: bytes, offset: int = 0) -> None:
    """Flip one bit wherever `needle` stands in the file (LMDB leaves old copies of small records in freed pages)."""
    content = path.read_bytes()
    assert needle in content
    damaged = bytearray(needle)
    damaged[offset] ^= 1
    path.write_bytes(content.replace(needle, bytes(damaged)))


def stored(path: Path, record: int, side: int | None = None) -> bytes:
    """An image's bytes in a file."""
    with LMDBReader(path, resolution=side) as reader:
        if reader.meta.encoding == "raw":
            block, row = divmod(record, reader.block)
            with reader.handle().environment.begin(buffers=True) as transaction:
                return reader.raw_block(transaction, block)[row].tobytes()
        with reader.encoded(record) as (_, payload, _):
            return bytes(payload)


def value(path: Path, key: bytes) -> bytes:
    """A record of a file."""
    with LMDBReader(path) as reader, reader.handle().environment.begin() as transaction:
        return transaction.get(key) or b""


def change(path: Path, key: bytes, value: bytes | None) -> None:
    """Replace or delete a record, as another program would."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, sync=False) as environment,
        environment.begin(write=True) as txn,
    ):
        if value is None:
            txn.delete(key)
        else:
            txn.put(key, value)


@pytest.fixture
def small_blocks(monkeypatch):
    """Four images in a block of what is packed, and in a group of signatures; three of 8 px are copied at a time."""
    monkeypatch.setattr("duetgan.data.lmdb.environment.GATHER_BYTES", 3 * 3 * 8 * 8)
    monkeypatch.setattr("duetgan.data.lmdb.writer.BLOCK_IMAGES", 4)
    for module in ("reader", "writer"):
        monkeypatch.setattr(f"duetgan.data.lmdb.{module}.SIGNATURES", 4)


@pytest.fixture
def packed(tmp_path):
    """20 raw RGB images of 8 px; record i has label i % 3."""
    path = tmp_path / "packed.lmdb"
    pack_arrays(path, sample_images(20), np.arange(20) % 3, CLASSES)
    return path


@pytest.fixture
def photos(tmp_path):
    """A folder of class folders with two images each."""
    folder = tmp_path / "photos"
    for shade, name in enumerate(("cat", "dog")):
        save(folder / name / "a.png", shade=10 * shade)
        save(folder / name / "b.png", shade=10 * shade + 100)
    return folder
