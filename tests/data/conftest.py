"""Small pictures and packed files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.writer import pack_arrays

CLASSES = ["cat", "dog", "emu"]


def pictures(count: int, channels: int = 3, side: int = 8, seed: int = 0) -> np.ndarray:
    """Random pictures uint8 [count, channels, side, side]."""
    return np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), dtype=np.uint8)


def save(path: Path, side: int = 8, shade: int = 100, mode: str = "RGB") -> None:
    """A picture file of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (shade, shade // 2, 255 - shade)).convert(mode).save(path)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """20 raw RGB pictures of 8 px; record i has label i % 3."""
    path = tmp_path / "packed.lmdb"
    pack_arrays(path, pictures(20), np.arange(20) % 3, CLASSES)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of class folders with two pictures each."""
    folder = tmp_path / "photos"
    for shade, name in enumerate(("cat", "dog")):
        save(folder / name / "a.png", shade=10 * shade)
        save(folder / name / "b.png", shade=10 * shade + 100)
    return folder
