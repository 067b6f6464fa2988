"""Arrays of NumPy's, TIFF files of many images, and stacks of files that hold a channel each."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.packing.pack import pack
from duetgan.data.reading.dataset import Dataset
from duetgan.data.values import channels_last
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import source_at
from tests.data.sources.source_files import refused
from tests.data.values_files import npy, pages, png

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


def test_pages_are_images(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    for options in ({}, {"compression": "zlib", "predictor": True}, {"tile": (16, 16)}, {"bigtiff": True}):
        path.write_bytes(pages(IMAGES[..., 0].copy(), **options))
        with source_at(path) as source:
            assert source.remarks == ["stack.tif: each of its 6 pages is an image"]
            assert source.item_name(5).endswith("stack.tif: page 6")
            for index in (5, 0, 3):
                np.testing.assert_array_equal(source.content(index).pixels, IMAGES[index, :, :, :1])
    with packed(path) as reader:
        np.testing.assert_array_equal(reader.read(range(6))[0][:, 0], IMAGES[..., 0])
        assert reader.spec.words == "grey, 16 bits (0 to 4095)"
    path.write_bytes(b"II*\0 and no more")
    assert_raises(UserError, "holds no page", packed, path)


def test_without_tifffile_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stack.tif").write_bytes(pages(IMAGES[..., 0].copy()))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    refused(tmp_path / "stack.tif", r"need tifffile, which is not installed: pip install tifffile")


def test_a_file_a_channel(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        for number, channel in enumerate(("red", "dapi", "gfp")):
            place = tmp_path / "cells" / "wild" / f"{name}_{channel}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(png(IMAGES[number, :, :, :1] + (name == "a")))
    pattern = "{name}_{channel}.png"
    with source_at(tmp_path / "cells", stack=pattern, classes_from="none") as source:
        assert source.remarks[-1] == "cells: 2 stacks of the channels dapi, gfp, red"
        assert [source.item_name(index) for index in range(2)] == ["wild/a", "wild/b/c"]
        np.testing.assert_array_equal(source.content(1), np.moveaxis(IMAGES[[1, 2, 0], :, :, 0], 0, 2))
    with packed(tmp_path / "cells", stack=pattern, classes_from="none") as reader:
        assert reader.spec.words == "RGB, 16 bits (0 to 4095)"  # three channels are colours wherever they come from
        np.testing.assert_array_equal(reader.read([0])[0][0], IMAGES[[1, 2, 0], :, :, 0] + 1)
    for stack, told in (
        ("{name}.png", "give {name} and {channel} once each"),
        ("{name}-{channel}.png", "does not fit --stack"),
    ):
        refused(tmp_path / "cells", told, stack=stack, classes_from="none")
    (tmp_path / "cells/wild/a_gfp.png").unlink()
    refused(tmp_path / "cells", "wild/a has no file of channel gfp", stack=pattern, classes_from="none")
    (tmp_path / "cells/wild/a_gfp.png").write_bytes(png(IMAGES[0, :, :, :3]))
    with source_at(tmp_path / "cells", stack=pattern, classes_from="none") as source:
        assert_raises(ImageError, "channels of several sizes or kinds", source.content, 0)
    (tmp_path / "x.npy").write_bytes(npy(IMAGES))
    refused(tmp_path / "x.npy", "--stack does not apply", stack=pattern)
