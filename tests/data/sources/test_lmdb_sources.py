"""LMDB files as sources: rosinality's and our own."""

import os
from pathlib import Path

import lmdb
import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.pack import pack
from duetgan.data.records import pack_arrays
from duetgan.data.sources import open_source
from tests.data.conftest import CLASSES, change, flip, sample_images
from tests.data.sources.source_files import contents, item_refused, refused, rosinality


@pytest.mark.parametrize("subdir", [True, False])
def test_rosinality(tmp_path: Path, subdir: bool) -> None:
    path = rosinality(tmp_path / "faces", (8, 128, 1024, 16), subdir=subdir)
    with open_source(str(path)) as source:
        assert (source.name, source.classes, source.shape) == ("faces", [], None)
        assert contents(source) == [b"1024 0", b"1024 1", b"1024 2"]
        assert source.labels().tolist() == [0, 0, 0]
        assert source.item_name(2).endswith(": record 1024-00002")
    for size, side in ((128, 128), (64, 1024)):
        with open_source(str(path), size=size) as source:
            assert source.item(0).content == f"{side} 0".encode()
    refused(path, "has no splits: leave --split out", split="test")


def test_rosinality_beyond_five_digits(tmp_path: Path) -> None:
    with open_source(str(rosinality(tmp_path / "x", (8,), 100_001))) as source:
        assert source.item(100_000).content == b"8 100000"
        assert source.item(99_999).content == b"8 99999"


def test_rosinality_damage(tmp_path: Path) -> None:
    path = rosinality(tmp_path / "x", subdir=False)
    change(path, b"16-00001", None)
    with open_source(str(path)) as source, pytest.raises(ImageError, match="is missing"):
        source.item(1)
    for length, message in ((b"many", "not a number"), (b"0", "not a number"), (b"99", "but `length` is 99")):
        change(path, b"length", length)
        refused(path, message)
    change(path, b"length", None)
    refused(path, "no record `length`")
    os.truncate(path, path.stat().st_size - 4096)
    refused(path, "x is truncated")
    with lmdb.open(str(tmp_path / "foreign")) as environment, environment.begin(write=True) as txn:
        txn.put(b"__len__", b"3")
    refused(tmp_path / "foreign", r"data\.mdb is an LMDB file of another program")
    (tmp_path / "y.lmdb").write_bytes(b"text" * 10)
    refused(tmp_path / "y.lmdb", r"y\.lmdb is not an LMDB file")


def test_packed_again_at_the_resolution_that_is_chosen_by_size(packed: Path, tmp_path: Path) -> None:
    with open_source(str(packed)) as source:
        assert (source.classes, source.shape, source.channels) == (CLASSES, (8, 8), 3)
        assert source.labels().tolist() == [index % 3 for index in range(20)]
        images = contents(source)
        summary = pack(source, tmp_path / "new.lmdb", size=4)
    assert summary.meta.histogram == [7, 7, 6]
    np.testing.assert_array_equal(np.stack(images).transpose(0, 3, 1, 2), sample_images(20))
    assert LMDBReader(tmp_path / "new.lmdb").resolution == 4
    pack_arrays(tmp_path / "x.lmdb", sample_images(3, side=16), smallest=4)
    for size, side in ((None, 16), (4, 4), (8, 8), (16, 16), (6, 16)):
        with open_source(str(tmp_path / "x.lmdb"), size=size) as source:
            assert source.shape == (side, side) == contents(source)[0].shape[:2]
            assert contents(source)[2].shape == (side, side, 3)


def test_damaged_packed_image_is_named(tmp_path: Path) -> None:
    images = sample_images(5)
    pack_arrays(tmp_path / "x.lmdb", images)
    flip(tmp_path / "x.lmdb", images[2].tobytes())
    with open_source(str(tmp_path / "x.lmdb")) as source:
        item_refused(source, 2, "is damaged")
        assert source.item_name(2).endswith("x.lmdb: record 2")
        np.testing.assert_array_equal(source.item(3).content, images[3].transpose(1, 2, 0))
