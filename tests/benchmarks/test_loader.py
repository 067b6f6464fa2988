"""The loader benchmark at tiny sizes: it measures what it says, and every contender delivers real batches."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks import loader
from benchmarks.loading import images as sample_images
from benchmarks.loading import ours, peers
from benchmarks.loading.timing import Window
from duetgan.data.packing.records import pack_arrays
from duetgan.utils.errors import UserError

TINY = loader.Sizes(
    repeats=1, raw_files=20, raw_images={8: 70}, raw_batch=8, raw_epochs=2, raw_window=Window(skipped=1, timed=2),
    photos=16, photo_batch=2, photo_window=Window(skipped=1, timed=2), pack_photos=4, pack_size=16,
    records={"raw": 5000}, record_batches=3,
)  # fmt: skip


def test_ours_and_numpy_deliver_the_same_batches_and_every_stream_of_ours_verifies_anew(tmp_path):
    images, labels, path = sample_images.small_images(30, 8), np.arange(30) % 10, tmp_path / "raw.lmdb"
    pack_arrays(path, images, labels, [str(label) for label in range(10)])
    theirs = list(peers.numpy_gather(images, labels, 8, 9)())
    mine = list(itertools.islice(ours.stream(path, 8), 9))
    assert len(mine) == len(theirs) == 9
    assert all(torch.equal(a, b) for pair in zip(mine, theirs, strict=True) for a, b in zip(*pair, strict=True))
    content = path.read_bytes()
    assert images[7].tobytes() in content
    path.write_bytes(content.replace(images[7].tobytes(), images[7].tobytes()[::-1]))
    with pytest.raises(UserError, match="record 7 is damaged"):
        list(itertools.islice(ours.stream(path, 8), 9))


def check_numbers(result: loader.Result, ratios: set[str]) -> None:
    assert {name for name in result if name.endswith("_ratio")} == ratios
    assert all(value >= 0 for value in result.values())
    assert all(value > 0 for name, value in result.items() if name.endswith(("_ratio", "_per_second")))


def test_raw_section(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "WORKERS", (0,))  # a fork of a process with threads is slow, and Python warns of it
    result = loader.measure_raw(8, TINY, tmp_path)
    kinds = ("", "_first_epoch", "_float")
    to_numpy = {"raw8_vs_numpy_ratio", "raw8_steady_vs_numpy_ratio"}
    check_numbers(result, {f"raw8{kind}_vs_imagefolder_ratio" for kind in kinds} | to_numpy)
    assert result["raw8_imagefolder_workers"] == 0
