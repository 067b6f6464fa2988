"""Arrays of NumPy's."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.images.values import channels_last
from duetgan.data.packing.pack import pack
from duetgan.data.reading.dataset import Dataset
from tests.data.conftest import source_at
from tests.data.images.values_files import npy
from tests.data.packing.sources.source_files import refused

RNG = np.random.default_rng(2)
IMAGES = RNG.integers(0, 4000, (6, 8, 10, 5)).astype(np.uint16)


def packed(path: Path, **options: Any) -> Dataset:
    with source_at(path, **options) as source:
        pack(source, path.with_suffix(".lmdb"), size="10x8", duplicates=False)
    return Dataset(path.with_suffix(".lmdb"))


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((3, 32, 32), 3), ((1, 28, 28), 1), ((16, 8, 8), 16), ((32, 32, 3), 3), ((8, 8, 13), 13), ((4, 6, 5), 5)],
)
def test_which_axis_holds_channels(shape: tuple[int, ...], channels: int) -> None:
    assert channels_last(np.zeros((2, *shape)), many=True).shape[-1] == channels


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2)])
@pytest.mark.parametrize("kind", ["<u2", ">u2", "<i4", "<f8"])
def test_an_array_of_images(order: Any, axes: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    """Channels last or first, in either order of memory and of bytes, or strides that go backwards."""
    images = np.repeat(IMAGES, 5, axis=1)[:, :40].repeat(4, axis=2) if axes[1] == 3 else IMAGES
    (tmp_path / "x.npy").write_bytes(npy(np.asarray(images.transpose(axes)[::-1].astype(kind), order=order)))
    with source_at(tmp_path / "x.npy") as source:
        assert (len(source), source.spec.size, source.spec.channels) == (6, images.shape[1:3], 5)
        for index in range(6):
            np.testing.assert_array_equal(np.asarray(source.content(index)), images[5 - index])
    if axes[1] != 3:
        with packed(tmp_path / "x.npy") as reader:
            np.testing.assert_array_equal(reader.read([4])[0][0].transpose(1, 2, 0), images[1])
            assert reader.spec.title == f"5 channels, {'16 bits' if 'u' in kind else 'floats'}"


def test_what_is_no_array_of_images(tmp_path: Path) -> None:
    for array, told in (
        (np.zeros((6, 40, 8, 40), np.uint8), "is of shape"),
        (np.zeros((8, 8), np.uint8), r"is of shape \[8, 8\]; give \[n, H, W\]"),
        (np.array([[{}]], object), "an array of object"),
    ):
        (tmp_path / "x.npy").write_bytes(npy(array, allow_pickle=True))
        refused(tmp_path / "x.npy", told)
    (tmp_path / "x.npy").write_bytes(npy(IMAGES)[:-1])
    refused(tmp_path / "x.npy", "bytes of values")
    refused(tmp_path / "x.npy", "bytes of values", split=None)


def npz(path: Path, *, packed: bool = True, **arrays: Any) -> Path:
    (np.savez_compressed if packed else np.savez)(path, **arrays)
    return path


def test_arrays_of_splits_with_labels(tmp_path: Path) -> None:
    several = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]])
    path = npz(
        tmp_path / "medmnist.npz",
        train_images=IMAGES,
        train_labels=np.array([[0], [2], [1], [0], [2], [1]]),
        val_images=IMAGES[:2],
        val_labels=several[:2],
    )
    with source_at(path) as source:
        assert (source.splits, source.classes) == (("train", "val"), ["0", "1", "2"])
        assert source.labels().tolist() == [0, 2, 1, 0, 2, 1]
        np.testing.assert_array_equal(source.content(3), IMAGES[3])
    with source_at(path, split="test") as source:
        assert source.label_sets is not None
        assert [source.label_sets[label] for label in source.labels()] == [[0, 2], []]
        assert source.classes == ["0", "1", "2"]
    with packed(path) as reader:
        np.testing.assert_array_equal(reader.read([2])[0][0].transpose(1, 2, 0), IMAGES[2])
    path = npz(tmp_path / "keras.npz", packed=False, x_train=IMAGES, x_test=IMAGES[:3], y_test=np.array([1, 0, 1]))
    with source_at(path, split="test") as source:
        assert (len(source), source.classes) == (3, ["0", "1"])
    with source_at(path) as source:
        assert (len(source), source.classes) == (6, [])


def test_archives_that_hold_something_else(tmp_path: Path) -> None:
    for arrays, told in (
        ({"a": IMAGES, "b": IMAGES}, "holds a, b; give one array of images"),
        ({"a": IMAGES[0, 0]}, "holds a; give one array"),
        ({"a": IMAGES, "b": np.zeros(5, int)}, "b is int64"),
        ({"a": IMAGES, "b": np.zeros(6)}, "b is float64"),
        ({"a": IMAGES, "b": np.full(6, -3)}, "label -3"),
        ({"a": IMAGES, "b": np.full((6, 2), 3)}, "of several 0 and 1"),
    ):
        refused(npz(tmp_path / "x.npz", **arrays), told)
    refused(npz(tmp_path / "x.npz", a=IMAGES), "has no arrays with its name", split="test")
    np.savez(tmp_path / "x.npz", a=np.array([[[{}]]], object))
    refused(tmp_path / "x.npz", "an array of object")
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as file:
        file.writestr("a.npy", npy(IMAGES))
    refused(tmp_path / "x.npz", "not compressed by deflate")
    (tmp_path / "x.npz").write_bytes(b"PK\3\4 and no more")
    refused(tmp_path / "x.npz", "cannot be read")
