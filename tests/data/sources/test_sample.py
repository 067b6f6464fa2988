"""The embedded sample is balanced, small and what its script makes."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.sources import open_source
from duetgan.data.sources.named import DEBIAN, SAMPLE
from tests.data.sources.make_sample import choose, main, sample_files
from tests.data.sources.test_named import IMAGES, LABELS, write_idx


@pytest.mark.parametrize(("split", "count"), [("train", 10_000), ("test", 2_000)])
def test_class_balance(split: str, count: int) -> None:
    source = open_source("sample", split=split)
    assert (len(source), source.shape, source.channels) == (count, (28, 28), 1)
    assert np.bincount(source.labels()).tolist() == [count // 10] * 10
    assert len(source.classes) == 10
    assert (np.diff(source.labels()) < 0).any()  # in the set's order, not sorted by class


def test_size_and_licence() -> None:
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 6_000_000
    licence = (SAMPLE / "LICENSE").read_text()
    assert "Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence
    assert "fashion-mnist" in (SAMPLE / "README.md").read_text()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_files_are_what_the_script_makes() -> None:
    files = sample_files(None)
    assert len(files) == 4
    for name, content in files.items():
        committed = (SAMPLE / name).read_bytes()
        assert gzip.decompress(content) == gzip.decompress(committed), name
        if "ng" not in zlib.ZLIB_RUNTIME_VERSION:  # zlib-ng compresses to other bytes
            assert content == committed, name


def test_script_takes_the_first_of_each_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / "full", prefix, IMAGES, LABELS)
    main(["--root", str(tmp_path / "full"), "--out", str(tmp_path / "out")])
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(first) == 4
    assert "train-images-idx3-ubyte.gz" in capsys.readouterr().out
    main(["--root", str(tmp_path / "full"), "--out", str(tmp_path / "out")])
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    labels = np.array([2, 0, 2, 1, 0, 0, 2, 1, 1])
    assert choose(labels, 2).tolist() == [0, 1, 2, 3, 4, 7]
