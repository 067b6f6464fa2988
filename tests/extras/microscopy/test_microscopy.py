"""TIFF files of many pages, and stacks of files that hold a channel each."""

import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.commands.pack import main
from duetgan.data.errors import ImageError
from duetgan.data.packing.pack import pack
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import source_at
from tests.data.images.values_files import NUMBERS, png
from tests.data.packing.sources.source_files import refused
from tests.extras.microscopy.tiff_files import ODD, pages

IMAGES = np.random.default_rng(2).integers(0, 4000, (6, 8, 10, 5)).astype(np.uint16)


def packed(path: Path, **options: Any) -> Dataset:
    with source_at(path, **options) as source:
        pack(source, path.with_suffix(".lmdb"), size="10x8", duplicates=False)
    return Dataset(path.with_suffix(".lmdb"))


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
    (tmp_path / "x.tif").write_bytes(pages(IMAGES[..., 0].copy()))
    refused(tmp_path / "x.tif", "--stack does not apply", stack=pattern)


@pytest.mark.parametrize("shape", [(2, 8, 10), (5, 8, 10), (3, 12, 6)])
@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_pages_of_a_file_in_a_folder_are_channels(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    image = np.random.default_rng(0).integers(0, 4000, shape).astype(kind)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.tif").write_bytes(pages(image))
    depth = "16" if kind == "uint16" else "float"
    size = f"{shape[2]}x{shape[1]}"
    with source_at(tmp_path / "x") as source:
        pack(source, tmp_path / "x.lmdb", size=size, channels=shape[0], depth=depth, workers=0)
    with Dataset(tmp_path / "x.lmdb") as reader:
        np.testing.assert_array_equal(reader.read([0])[0][0], image)


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_refused_in_one_line(name: str, tmp_path: Path, refused: Any) -> None:
    make, told = ODD[name]
    content = make()
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / name).write_bytes(content)
    tracemalloc.start()
    try:
        line = refused(main, folder, tmp_path / "x.lmdb", "--depth", "16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (32 << 20) + 4 * len(content)
    assert name in line
    assert re.search(told, line)
    for number in range(2):
        (folder / f"good{number}.png").write_bytes(png(NUMBERS))
    main([str(folder), str(tmp_path / "x.lmdb"), "--depth", "16", "--on-error", "skip"])
    assert len(Dataset(tmp_path / "x.lmdb")) == 2
