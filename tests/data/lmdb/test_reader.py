"""What is written is read back, and what is not whole is refused by name."""

import hashlib
import multiprocessing
import pickle
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from duetgan.data.images.decode import CODEC_JPEG, CODEC_PNG, CODEC_RULES
from duetgan.data.lmdb import format as record_format
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Layout, value_ends, value_range
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image, make_record, pack_arrays, pixel_sums
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import DamageError, UserError
from duetgan.utils.image_spec import ImageSpec, PixelFormat
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, change, sample_images
from tests.data.reading.test_loader import halved

GREY = Layout.of(ImageSpec(1, 8, 8))


@pytest.mark.parametrize(
    ("channels", "depth", "encoding", "is_kept"),
    [
        *((channels, "uint16", "png", channels in (1, 3, 4)) for channels in range(1, 6)),
        (3, "float32", "png", False),
        (5, "uint8", "jpeg", False),
    ],
)
def test_an_encoding_keeps_the_values_of_images_or_is_refused(channels, depth, encoding, is_kept):
    with nullcontext() if is_kept else pytest.raises(ValueError, match="take raw"):
        record_format.check_encoding(ImageSpec(channels, 8, 8, depth=depth), encoding)


@pytest.mark.parametrize(
    ("dtype", "ends"), [(np.float32, (1.0, 999.0)), (np.uint16, (0.0, 1000.0))], ids=["float32", "uint16"]
)
def test_the_ends_of_floats_leave_out_a_thousandth_on_each_side(dtype, ends):
    assert value_ends(np.arange(1001, dtype=dtype).reshape(7, 11, 13)) == pytest.approx(ends)


def test_the_range_of_floats_is_that_of_the_values_and_scales_their_statistics(tmp_path):
    images = np.linspace(-3, 5, 4 * 64, dtype=np.float32).reshape(4, 1, 8, 8)
    pack_arrays(tmp_path / "x.lmdb", images, np.zeros(4, int), ["a"])
    with Dataset(tmp_path / "x.lmdb") as dataset:
        low, high = dataset.spec.low, dataset.spec.high
        assert (low, high) == pytest.approx((-3, 5), abs=0.02)
        values = (images - low) / (high - low)
        assert dataset.meta.mean + dataset.meta.std == pytest.approx([values.mean(), values.std()])


@pytest.mark.parametrize(
    ("depth", "ends", "expected"),
    [
        *(("uint16", (3, most), (0, top)) for most, top in ((0, 1), (4095, 4095), (4096, 8191))),
        ("float32", (-1.5, 4.0), (-1.5, 4.0)),
        ("float32", (2.0, 2.0), (2.0, 3.0)),
    ],
)
def test_ranges_hold_all_values_of_as_many_bits_and_are_not_empty(depth, ends, expected):
    assert value_range(depth, *ends) == expected


def test_several_blocks_and_the_content_hash(tmp_path, small_blocks, monkeypatch):
    images, labels = sample_images(10), np.arange(10) % 3
    order = np.array([9, 0, 4, 3, 8, 8, 5, 1])
    for encoding in ("raw", "png"):
        pack_arrays(tmp_path / f"{encoding}.lmdb", images, labels, CLASSES, encoding=encoding)
        reader = Dataset(tmp_path / f"{encoding}.lmdb")
        assert reader.shards[0].blocks == 3
        assert len(LMDBReader(reader.path).signatures()) == 10
        for records in (order[:1], order[1:2], order):  # the blocks are used in any order
            np.testing.assert_equal(reader.read(records), (images[records], labels[records]))
        assert reader.read(order)[1].dtype == np.int64
    images, changed, given = sample_images(5), sample_images(5), [0, 1, 2, 0, 1]
    changed[3, 0, 0, 0] ^= 1
    sets: list[Any] = [(images, given, CLASSES)] * 2 + [(changed, given, CLASSES), (images, [0, 1, 2, 0, 2], CLASSES)]
    sets.append((images, given, ["cat", "dog", "yak"]))
    hashes = [pack_arrays(tmp_path / f"{n}.lmdb", *content).content_hash for n, content in enumerate(sets)]
    for number, label_sets in enumerate(([[0], [1], [2]], [[0], [1], [1, 2]])):
        how: dict[str, Any] = {"label_sets": label_sets}
        hashes.append(pack_arrays(tmp_path / f"sets-{number}.lmdb", *sets[0], **how).content_hash)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 6
    meta = pack_arrays(tmp_path / "deep.lmdb", images.astype(np.uint16))
    wider = meta.model_copy(update={"pixel_format": PixelFormat(depth="uint16", high=511.0)})
    assert wider.hash_of({8: [b""]}) != meta.hash_of({8: [b""]})  # the range of the values
    monkeypatch.setattr("duetgan.data.lmdb.writer.BLOCK_BYTES", 3 * 3 * 8 * 8)
    images, labels, order = sample_images(5, side=16), np.array([2, 0, 1, 1, 0]), np.array([4, 0, 3])
    for encoding, blocks in (("raw", [4, 3, 1]), ("png", [4, 4, 4])):  # at 4, 8 and 16 px
        path = tmp_path / f"sides-{encoding}.lmdb"
        assert pack_arrays(path, images, labels, CLASSES, encoding=encoding, smallest=4).blocks == blocks
        with Dataset(path, resolution=4) as a, Dataset(path, resolution=8) as b, Dataset(path) as c:
            for side, dataset in ((16, c), (4, a), (8, b), (16, c)):  # all share one handle
                np.testing.assert_equal(dataset.read(order), (halved(images, side)[order], labels[order]))


def test_names_and_what_the_source_held_are_kept_by_image(tmp_path, small_blocks):
    path, names = tmp_path / "x.lmdb", [f"{number}.png" * (number > 3) for number in range(10)]
    held = hashlib.sha256()
    with LMDBWriter(path, GREY, classes=CLASSES) as writer:
        for number, name in enumerate(names):
            record = make_record(np.zeros((8, 8, 1), np.uint8), number % 3, GREY, payload=None)
            writer.add_record(replace(record, digest=bytes([number])), name)
            held.update((number % 3).to_bytes(8, "little") + bytes([number]))
        assert writer.finish().fingerprint == held.hexdigest()
    with LMDBReader(path) as reader:
        assert reader.names() == names  # the first group has none
    for stored, told in ((b'["a", 3, "b", "c"]', "its names are no list of text"), (b'["a"]', "it has 1 names")):
        change(path, b"name/00000001", zlib.crc32(stored).to_bytes(4, "little") + stored)
        with LMDBReader(path) as reader:
            assert_raises(DamageError, f"record 4 to 7 is damaged: {told}", reader.names)


def test_writer_refuses_what_does_not_fit_and_leaves_nothing(tmp_path):
    with LMDBWriter(tmp_path / "x.lmdb", Layout.of(ImageSpec(3, 8, 8)), classes=CLASSES) as writer:
        good = np.zeros((8, 8, 3), np.uint8)
        for wrong in (good[:4], good[:, :, :1], good.astype(np.float32)):
            assert_raises(ValueError, "image", add_image, writer, wrong, 0)
        assert_raises(ValueError, "label 3", add_image, writer, good, 3)
        assert_raises(ValueError, "no images", writer.finish)
    assert_raises(ValueError, "do not fit", Layout.of, ImageSpec(3, 8, 8), "source")
    with LMDBWriter(tmp_path / "new" / "x.lmdb", GREY, classes=[]) as writer:
        add_image(writer, np.zeros((8, 8, 1), np.uint8), label=0)
        assert list((tmp_path / "new").iterdir())
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_has_one_writer(tmp_path):
    path = tmp_path / "x.lmdb"
    with LMDBWriter(path, GREY, classes=[]) as writer:
        assert_raises(UserError, "another process", LMDBWriter, path, GREY, classes=[])
        add_image(writer, np.zeros((8, 8, 1), np.uint8), label=0)
        writer.finish()
    assert len(Dataset(path)) == 1


def test_readers_share_a_file_and_close_it(packed):
    first, second = Dataset(packed), Dataset(packed)
    first.read([1])
    assert first.shards[0].handle() is second.shards[0].handle()
    first.close()
    np.testing.assert_array_equal(second.read([2])[0], sample_images(20)[[2]])
    second.close()
    lmdb.open(str(packed), subdir=False, readonly=True, lock=False).close()  # raises while it is open in the process
    np.testing.assert_array_equal(first.read([3])[0], sample_images(20)[[3]])  # opened again


def _in_child(reader: Dataset, path: Path, results: "multiprocessing.Queue[bytes]") -> None:
    results.put(reader.read([5, 2])[0].tobytes() + Dataset(path).read([7])[0].tobytes())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_reader_after_a_fork(packed):
    reader = Dataset(packed)
    reader.read([0])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(reader, packed, results))
    child.start()
    assert results.get(timeout=30) == sample_images(20)[[5, 2, 7]].tobytes()
    child.join()
    np.testing.assert_array_equal(reader.read([9])[0], sample_images(20)[[9]])  # the parent's is untouched


def test_opened_in_one_thread_while_another_closes_it(packed):
    """The last reader goes while the next one asks for the process's handle, at any moment of its going."""

    def count(_: int) -> int:
        with LMDBReader(packed) as reader:
            return reader.meta.count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(count, range(800)))
    finally:
        sys.setswitchinterval(interval)
    assert counts == [20] * 800


def test_replaced_file_is_noticed_and_read_to_its_end_where_it_is_open(packed):
    opened = Dataset(packed)
    closed = pickle.loads(pickle.dumps(opened))
    pack_arrays(packed, sample_images(3, seed=1), overwrite=True)
    np.testing.assert_array_equal(opened.read([19])[0], sample_images(20)[[19]])
    assert len(Dataset(packed)) == 3
    opened.close()
    assert_raises(UserError, "was replaced", closed.read, [0])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (1000, 1200)])
def test_sums_are_exact(channels, size):
    for low in (0, 255):  # the largest sums there are
        image = np.random.default_rng(0).integers(low, 256, (*size, channels), dtype=np.uint8)
        sums = pixel_sums(image)
        values = image.reshape(-1, channels).astype(np.int64)
        np.testing.assert_array_equal(sums, [values.sum(0), (values**2).sum(0)])
        assert sums.dtype == np.int64


def test_numbers_that_packed_files_store_stay():
    codecs = (CODEC_RULES, CODEC_JPEG, CODEC_PNG)
    assert codecs == (0, 1, 2)
    assert record_format.SIGNATURES == 4096
