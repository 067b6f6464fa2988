"""LMDB files of rosinality's StyleGAN2."""

import os
from pathlib import Path

import lmdb
import pytest

from duetgan.data.errors import ImageError
from tests.data.conftest import change, source_at
from tests.data.packing.sources.source_files import contents, refused


def rosinality(path: Path, sides: tuple[int, ...] = (8, 16), count: int = 3, *, subdir: bool = True) -> Path:
    with lmdb.open(str(path), subdir=subdir, map_size=1 << 26) as environment, environment.begin(write=True) as txn:
        for side in sides:
            for index in range(count):
                txn.put(f"{side}-{str(index).zfill(5)}".encode(), f"{side} {index}".encode())
        txn.put(b"length", str(count).encode())
    return path


@pytest.mark.parametrize("subdir", [True, False])
def test_rosinality(tmp_path, subdir):
    path = rosinality(tmp_path / "faces", (8, 128, 1024, 16), subdir=subdir)
    with source_at(path) as source:
        assert (source.name, source.classes, source.spec) == ("faces", [], None)
        assert contents(source) == [b"1024 0", b"1024 1", b"1024 2"]
        assert source.labels().tolist() == [0, 0, 0]
        assert source.item_name(2).endswith(": record 1024-00002")
    for size, side in ((128, 128), (64, 1024)):
        with source_at(path, size=size) as source:
            assert source.content(0) == f"{side} 0".encode()
    refused(path, "has no splits: leave --split out", split="test")


def test_rosinality_beyond_five_digits(tmp_path):
    with source_at(rosinality(tmp_path / "x", (8,), 100_001)) as source:
        assert source.content(100_000) == b"8 100000"
        assert source.content(99_999) == b"8 99999"


def test_rosinality_damage(tmp_path):
    path = rosinality(tmp_path / "x", subdir=False)
    change(path, b"16-00001", None)
    with source_at(path) as source, pytest.raises(ImageError, match="is missing"):
        source.content(1)
    foreign = "is an LMDB file of another program"
    for length, message in ((b"many", foreign), (b"0", foreign), (b"99", "than its `length` of 99"), (None, foreign)):
        change(path, b"length", length)
        refused(path, message)
    os.truncate(path, path.stat().st_size - 4096)
    refused(path, "x is truncated")
    with lmdb.open(str(tmp_path / "foreign")) as environment, environment.begin(write=True) as txn:
        txn.put(b"__len__", b"3")
    refused(tmp_path / "foreign", r"data\.mdb is an LMDB file of another program")
    (tmp_path / "y.lmdb").write_bytes(b"text" * 10)
    refused(tmp_path / "y.lmdb", r"y\.lmdb is not an LMDB file")
