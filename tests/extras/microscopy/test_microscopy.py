"""TIFF files of many pages."""

import re
import sys
import tracemalloc

import numpy as np
import pytest

from duetgan.commands.pack import main
from duetgan.data.packing.pack import pack
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import source_at
from tests.data.images.values_files import NUMBERS, png
from tests.extras.microscopy.tiff_files import ODD, pages


def test_without_tifffile_its_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "stack.tif").write_bytes(pages(np.zeros((2, 8, 8), np.uint16)))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with source_at(tmp_path) as source:
        told = "need tifffile, which is not installed: pip install tifffile"
        assert_raises(UserError, told, pack, source, tmp_path / "x.lmdb", size=8, channels=2, depth="16", workers=0)


@pytest.mark.parametrize("shape", [(2, 8, 10), (5, 8, 10), (3, 12, 6)])
@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_pages_of_a_file_in_a_folder_are_channels(tmp_path, shape, kind):
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
def test_odd_files_are_refused_in_one_line(name, tmp_path, refused):
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
