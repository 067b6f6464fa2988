"""What is written is read back, and what is not whole is refused by name."""

import multiprocessing
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import numpy as np
import pytest

from duetgan.data.lmdb import format as record_format
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import add_image, pack_arrays
from duetgan.utils.errors import UserError
from tests.data.conftest import CLASSES
from tests.data.conftest import images as sample_images

GREY = Layout(channels=1, resolutions=(8,))


@pytest.mark.parametrize("encoding", ["raw", "png"])
@pytest.mark.parametrize("channels", [1, 3])
def test_round_trip_is_exact(tmp_path: Path, encoding: str, channels: int) -> None:
    images, labels = sample_images(11, channels), np.arange(11) % 3
    pack_arrays(tmp_path / "x.lmdb", images, labels, CLASSES, encoding=encoding)
    reader = Dataset(tmp_path / "x.lmdb")
    order = [7, 0, 7, 10, 3]
    read, read_labels = reader.read(order)
    np.testing.assert_equal((read, read_labels), (images[order], labels[order]))
    assert (str(read.dtype), str(read_labels.dtype)) == ("uint8", "int64")
    np.testing.assert_equal(reader.image(4), (images[4].transpose(1, 2, 0), 1))
    np.testing.assert_array_equal(reader.labels(), labels)


def test_metadata(tmp_path: Path) -> None:
    images = sample_images(10)
    meta = pack_arrays(tmp_path / "x.lmdb", images, [0] * 4 + [1] * 5 + [2], CLASSES, source="mine")
    reader = Dataset(tmp_path / "x.lmdb")
    assert reader.meta == meta
    assert (meta.version, meta.count, meta.channels, meta.resolutions, meta.encoding) == (1, 10, 3, [8], "raw")
    assert (meta.classes, meta.histogram, meta.source, meta.resize_filter) == (CLASSES, [4, 5, 1], "mine", "none")
    assert (len(reader), reader.classes, reader.resolution) == (10, CLASSES, 8)
    unit = images / 255
    np.testing.assert_allclose(meta.mean, unit.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(meta.std, unit.std((0, 2, 3)), rtol=1e-10)


def test_unlabelled(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "x.lmdb", sample_images(3))
    reader = Dataset(tmp_path / "x.lmdb")
    assert not reader.classes
    assert not reader.meta.histogram
    assert reader.read([0, 2])[1].tolist() == [0, 0]


def test_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_format, "BLOCK_IMAGES", 4)
    images, labels = sample_images(10), np.arange(10) % 3
    order = np.array([9, 0, 4, 3, 8, 8, 5, 1])
    for encoding in ("raw", "png"):
        pack_arrays(tmp_path / f"{encoding}.lmdb", images, labels, CLASSES, encoding=encoding)
        reader = Dataset(tmp_path / f"{encoding}.lmdb")
        assert reader.shards[0].blocks == 3
        np.testing.assert_equal(reader.read(order), (images[order], labels[order]))


def test_content_hash_follows_content(tmp_path: Path) -> None:
    images = sample_images(5)

    def content(name: str, images: np.ndarray, labels: list[int], classes: list[str] = CLASSES) -> str:
        return pack_arrays(tmp_path / name, images, labels, classes).content_hash

    first = content("a.lmdb", images, [0, 1, 2, 0, 1])
    assert content("b.lmdb", images, [0, 1, 2, 0, 1]) == first
    changed = images.copy()
    changed[3, 0, 0, 0] ^= 1
    assert content("c.lmdb", changed, [0, 1, 2, 0, 1]) != first
    assert content("d.lmdb", images, [0, 1, 2, 0, 2]) != first
    assert content("e.lmdb", images, [0, 1, 2, 0, 1], ["cat", "dog", "yak"]) != first


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "x.lmdb", Layout(channels=3, resolutions=(8,)), classes=CLASSES) as writer:
        good = np.zeros((8, 8, 3), np.uint8)
        for wrong in (good[:4], good[:, :, :1], good.astype(np.float32)):
            with pytest.raises(ValueError, match="image"):
                add_image(writer, wrong)
        with pytest.raises(ValueError, match="label 3"):
            add_image(writer, good, 3)
        with pytest.raises(ValueError, match="no images"):
            writer.finish()
    with pytest.raises(ValueError, match="do not fit"):
        Layout(channels=3, resolutions=(8,), encoding="source")


def test_left_writer_leaves_nothing(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "new" / "deep" / "x.lmdb", GREY, classes=[]) as writer:
        add_image(writer, np.zeros((8, 8, 1), np.uint8))
        assert list((tmp_path / "new" / "deep").iterdir())
    assert list(tmp_path.iterdir()) == []


def test_existing_file_needs_overwrite(packed: Path) -> None:
    before = packed.read_bytes()
    with pytest.raises(UserError, match=r"packed\.lmdb exists.*--overwrite"):
        pack_arrays(packed, sample_images(2))
    assert packed.read_bytes() == before
    pack_arrays(packed, sample_images(2), overwrite=True)
    assert len(Dataset(packed)) == 2


def test_two_writers_on_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    with LMDBWriter(path, GREY, classes=[]) as writer:
        with pytest.raises(UserError, match="another process"):
            LMDBWriter(path, GREY, classes=[])
        add_image(writer, np.zeros((8, 8, 1), np.uint8))
        writer.finish()
    assert len(Dataset(path)) == 1


def test_readers_share_a_file_and_close_it(packed: Path) -> None:
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
def test_reader_after_a_fork(packed: Path) -> None:
    reader = Dataset(packed)
    reader.read([0])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(reader, packed, results))
    child.start()
    assert results.get(timeout=30) == sample_images(20)[[5, 2, 7]].tobytes()
    child.join()
    np.testing.assert_array_equal(reader.read([9])[0], sample_images(20)[[9]])  # the parent's is untouched


def test_opened_in_one_thread_while_another_closes_it(packed: Path) -> None:
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


def test_replaced_file_is_noticed(packed: Path) -> None:
    reader = pickle.loads(pickle.dumps(Dataset(packed)))
    pack_arrays(packed, sample_images(20, seed=1), np.arange(20) % 3, CLASSES, overwrite=True)
    with pytest.raises(UserError, match="was replaced"):
        reader.read([0])


def test_file_replaced_while_open_is_read_to_its_end(packed: Path) -> None:
    reader = Dataset(packed)
    pack_arrays(packed, sample_images(3, seed=1), overwrite=True)
    np.testing.assert_array_equal(reader.read([19])[0], sample_images(20)[[19]])
    assert len(Dataset(packed)) == 3
