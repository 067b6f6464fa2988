"""Damaged records of a Dataset: reading stops and names them."""

import pickle
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.images import encode
from duetgan.data.images.decode import CODEC_PNG
from duetgan.data.lmdb import format as record_format
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image, pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.utils.errors import DamageError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, change, flip, sample_images, stored, value

pytestmark = pytest.mark.usefixtures("small_blocks")
ENCODINGS = ["raw", "png", "source"]
COUNT = 14


@pytest.fixture
def pack(tmp_path):
    """Pack random images of 8 px and flip a bit in some: record i has label i % 3."""

    def packed(encoding: str, damaged: Sequence[int] = (), count: int = COUNT, name: str = "x.lmdb") -> Path:
        path, images = tmp_path / name, sample_images(count)
        if encoding == "source":
            layout = Layout.of(ImageSpec(3, 0, 0), encoding)
            with LMDBWriter(path, layout, classes=CLASSES) as writer:
                for number, image in enumerate(images.transpose(0, 2, 3, 1)):
                    add_image(writer, image, number % 3, payload=encode(image, "png"))
                writer.finish()
        else:
            pack_arrays(path, images, np.arange(count) % 3, CLASSES, encoding=encoding)
        for record in damaged:
            flip(path, stored(path, record), offset=50)
        return path

    return packed


def open_dataset(path: Any, **options: Any) -> Dataset:
    """At 8 px, whatever the encoding."""
    return Dataset(path, resolution=8, **options)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_reading_stops_at_a_damaged_record_and_counts_over_all_shards(pack, encoding, workers):
    paths = [pack(encoding, damaged, name=f"{name}.lmdb") for name, damaged in (("a", []), ("b", [3, 13]))]
    for attempt in (lambda dataset: dataset.read([2, COUNT + 3]), lambda dataset: dataset.image(COUNT + 3)):
        with pytest.raises(DamageError, match=r"b\.lmdb: record 3 is damaged") as caught:
            attempt(open_dataset(paths, workers=workers))
        assert list(caught.value.records) == [COUNT + 3]
    images, labels = open_dataset(paths, workers=workers).read([13, COUNT + 4])
    np.testing.assert_array_equal(images, sample_images(COUNT)[[13, 4]])
    np.testing.assert_array_equal(labels, [1, 1])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_damaged_index_stops(pack, encoding):
    """It holds the labels."""
    paths = [pack(encoding, name=f"{name}.lmdb") for name in "ab"]
    side = 0 if encoding == "source" else 8
    change(paths[1], b"index/00000001/%05d" % side, b"nonsense")
    dataset = open_dataset(paths)
    for attempt in (lambda: dataset.read([0]), dataset.labels):
        with pytest.raises(DamageError, match=r"b\.lmdb: record 4 to 7 is damaged: its index") as caught:
            attempt()
        assert list(caught.value.records) == [COUNT + record for record in (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("size", "is_possible"), [((0, 8), False), ((8, 0), False), ((5, 17_895_697), True), ((5, 17_895_698), False)]
)
def test_an_index_with_impossible_sizes_stops(pack, size, is_possible):
    """An image has at most 89,478,485 pixels."""
    path, key = pack("source"), b"index/00000001/00000"
    index = value(path, key)
    head = np.frombuffer(index, record_format.INDEX_HEAD, 1).copy()
    entries = np.frombuffer(index, record_format.ENTRY, offset=head.nbytes).copy()
    entries["height"][1], entries["width"][1] = size
    head["checksum"] = zlib.crc32(entries.tobytes())
    change(path, key, head.tobytes() + entries.tobytes())
    with nullcontext() if is_possible else pytest.raises(DamageError, match="record 5 is damaged: its size cannot be"):
        open_dataset(path).labels()


def test_lost_blocks_signatures_and_images(pack):
    """Signatures count over all shards; the last image's bytes are whole, but no image."""
    paths = [pack("raw", name=f"{name}.lmdb") for name in "ab"]
    change(paths[0], b"pixels/00000001/00008", None)
    assert_raises(DamageError, "record 4 to 7 is damaged", open_dataset(paths[0]).read, [6])
    change(paths[1], b"hash/00000000", None)
    with pytest.raises(DamageError, match=r"b\.lmdb: record 0 to 3 is damaged: .*signatures") as caught:
        open_dataset(paths).signatures()
    assert caught.value.records[0] == COUNT
    path = pack("png")
    payloads = record_format.make_entry(b"no image", 2, 8, 8, CODEC_PNG).tobytes() + b"no image"
    change(path, b"picture/0000000005/00008", payloads)
    assert_raises(DamageError, "record 5 is damaged: cannot be decoded", open_dataset(path).read, [5])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loader_keeps_its_position_when_a_read_raised(pack, prefetch, monkeypatch):
    dataset = open_dataset(pack("png"))
    sampler = GlobalSampler(COUNT, batch_size=6, seed=1)
    whole = InfiniteLoader(open_dataset(dataset.path), sampler, device="cpu", prefetch=0)
    broken = InfiniteLoader(dataset, sampler, device="cpu", prefetch=prefetch)
    assert torch.equal(next(whole).images, next(broken).images)
    broken.close()  # nothing is read ahead any more
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "read", lambda *_, **__: (_ for _ in ()).throw(OSError("the network is down")))
        for _ in range(2):
            assert_raises(OSError, "network", next, broken)
            assert broken.state_dict()["consumed"] == 6
    for _ in range(3):
        assert torch.equal(next(whole).images, next(broken).images)
    broken.close()


def test_torch_data_loader_names_the_record_and_its_error_travels_between_processes(pack):
    dataset = open_dataset(pack("png", [5]))
    with pytest.raises(DamageError, match="record 5 "):
        list(torch.utils.data.DataLoader(dataset, batch_size=4))  # type: ignore[arg-type]
    error = DamageError(Path("x.lmdb"), [3, 4], "gone", first=0)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), list(copy.records), copy.reason) == (str(error), [3, 4], "gone")
