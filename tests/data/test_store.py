"""What is written is read back, and what is not whole is refused by name."""

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import numpy as np
import pytest

from data import format as record_format
from data.environment import partial_path
from data.format import ENTRY, META_KEY
from data.store import DamageError, LMDBReader
from data.writer import LMDBWriter, pack_arrays
from tests.data.conftest import CLASSES, pictures
from utils.errors import UserError


@pytest.mark.parametrize("encoding", ["raw", "png"])
@pytest.mark.parametrize("channels", [1, 3])
def test_round_trip_is_exact(tmp_path: Path, encoding: str, channels: int) -> None:
    images, labels = pictures(11, channels), np.arange(11) % 3
    pack_arrays(tmp_path / "x.lmdb", images, labels, CLASSES, encoding=encoding)
    reader = LMDBReader(tmp_path / "x.lmdb")
    order = [7, 0, 7, 10, 3]
    read, read_labels = reader.read(order)
    np.testing.assert_array_equal(read, images[order])
    np.testing.assert_array_equal(read_labels, labels[order])
    assert read.dtype == np.uint8
    assert read_labels.dtype == np.int64
    picture, label = reader.picture(4)
    np.testing.assert_array_equal(picture, images[4].transpose(1, 2, 0))
    assert label == 1
    np.testing.assert_array_equal(reader.labels(), labels)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_close(tmp_path: Path, channels: int) -> None:
    smooth = np.linspace(0, 255, 32 * 32).reshape(1, 1, 32, 32).repeat(channels, axis=1).astype(np.uint8)
    smooth[:, -1] = 255 - smooth[:, -1]  # in colour, so that swapped channels would show
    pack_arrays(tmp_path / "x.lmdb", smooth, encoding="jpeg")
    read, _ = LMDBReader(tmp_path / "x.lmdb").read([0])
    assert np.abs(read.astype(int) - smooth).max() <= 6


def test_metadata(tmp_path: Path) -> None:
    images = pictures(10)
    meta = pack_arrays(tmp_path / "x.lmdb", images, [0] * 4 + [1] * 5 + [2], CLASSES, source="mine")
    reader = LMDBReader(tmp_path / "x.lmdb")
    assert reader.meta == meta
    assert (meta.version, meta.count, meta.channels, meta.resolutions, meta.encoding) == (1, 10, 3, [8], "raw")
    assert (meta.classes, meta.histogram, meta.source, meta.resize_filter) == (CLASSES, [4, 5, 1], "mine", "none")
    assert (len(reader), reader.classes, reader.resolution) == (10, CLASSES, 8)
    unit = images / 255
    np.testing.assert_allclose(meta.mean, unit.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(meta.std, unit.std((0, 2, 3)), rtol=1e-10)


def test_unlabelled(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "x.lmdb", pictures(3))
    reader = LMDBReader(tmp_path / "x.lmdb")
    assert reader.classes == reader.meta.histogram == []
    assert reader.read([0, 2])[1].tolist() == [0, 0]


def test_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_format, "BLOCK_PICTURES", 4)
    images, labels = pictures(10), np.arange(10) % 3
    for encoding in ("raw", "png"):
        pack_arrays(tmp_path / f"{encoding}.lmdb", images, labels, CLASSES, encoding=encoding)
        reader = LMDBReader(tmp_path / f"{encoding}.lmdb")
        assert reader.blocks == 3
        order = np.array([9, 0, 4, 3, 8, 8, 5, 1])
        np.testing.assert_array_equal(reader.read(order)[0], images[order])
        np.testing.assert_array_equal(reader.read(order)[1], labels[order])


def test_read_into_out(packed: Path) -> None:
    reader = LMDBReader(packed)
    out = np.zeros((2, 3, 8, 8), np.uint8)
    assert reader.read([3, 1], out=out)[0] is out
    np.testing.assert_array_equal(out, pictures(20)[[3, 1]])
    for wrong in (np.zeros((3, 3, 8, 8), np.uint8), np.zeros((2, 3, 8, 8), np.int8), out.transpose(0, 1, 3, 2)):
        with pytest.raises(ValueError, match="out is"):
            reader.read([3, 1], out=wrong)


def test_empty_read_and_bounds(packed: Path) -> None:
    reader = LMDBReader(packed)
    images, labels = reader.read([])
    assert images.shape == (0, 3, 8, 8)
    assert labels.shape == (0,)
    for index in (-1, 20):
        with pytest.raises(IndexError):
            reader.read([index])
        with pytest.raises(IndexError):
            reader.picture(index)


def test_full_map_grows(tmp_path: Path) -> None:
    images = pictures(200, side=32)  # 600 kB into a map of 64 kB
    with LMDBWriter(tmp_path / "x.lmdb", classes=[], channels=3, resolution=32, first_map=1 << 16) as writer:
        for image in images:
            writer.add(image.transpose(1, 2, 0))
        writer.finish()
    np.testing.assert_array_equal(LMDBReader(tmp_path / "x.lmdb").read(range(200))[0], images)


def test_content_hash_follows_content(tmp_path: Path) -> None:
    images = pictures(5)

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
    with LMDBWriter(tmp_path / "x.lmdb", classes=CLASSES, channels=3, resolution=8) as writer:
        good = np.zeros((8, 8, 3), np.uint8)
        for wrong in (good[:4], good[:, :, :1], good.astype(np.float32)):
            with pytest.raises(ValueError, match="picture"):
                writer.add(wrong)
        with pytest.raises(ValueError, match="label 3"):
            writer.add(good, 3)
        with pytest.raises(ValueError, match="no pictures"):
            writer.finish()
    with pytest.raises(ValueError, match="fit together"):
        LMDBWriter(tmp_path / "y.lmdb", classes=[], channels=3, resolution=8, encoding="source")


def test_left_writer_leaves_nothing(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "new" / "deep" / "x.lmdb", classes=[], channels=1, resolution=8) as writer:
        writer.add(np.zeros((8, 8, 1), np.uint8))
        assert list((tmp_path / "new" / "deep").iterdir())
    assert list(tmp_path.iterdir()) == []


def test_existing_file_needs_overwrite(packed: Path) -> None:
    before = packed.read_bytes()
    with pytest.raises(UserError, match=r"packed\.lmdb exists.*--overwrite"):
        pack_arrays(packed, pictures(2))
    assert packed.read_bytes() == before
    pack_arrays(packed, pictures(2), overwrite=True)
    assert len(LMDBReader(packed)) == 2


def test_two_writers_on_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    with LMDBWriter(path, classes=[], channels=1, resolution=8) as writer:
        with pytest.raises(UserError, match="another process"):
            LMDBWriter(path, classes=[], channels=1, resolution=8)
        writer.add(np.zeros((8, 8, 1), np.uint8))
        writer.finish()
    assert len(LMDBReader(path)) == 1


KILLED = """
import os, sys
import numpy as np
from data.writer import LMDBWriter
writer = LMDBWriter(sys.argv[1], classes=[], channels=3, resolution=64, encoding="png")
noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
for _ in range(1500):  # more than one transaction
    writer.add(noise)
os.kill(os.getpid(), 9)
"""


def test_killed_pack_is_refused_and_can_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, env={**os.environ, "PYTHONPATH": "."})
    assert [item.name for item in tmp_path.iterdir()] == [".x.lmdb.partial"]
    with pytest.raises(UserError, match="not finished"):
        LMDBReader(path)
    shutil.copy(partial_path(path), tmp_path / "copied.lmdb")
    with pytest.raises(UserError, match="not finished"):
        LMDBReader(tmp_path / "copied.lmdb")
    images = pictures(4)
    pack_arrays(path, images)
    np.testing.assert_array_equal(LMDBReader(path).read(range(4))[0], images)
    assert not partial_path(path).exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_truncated_file_is_refused(packed: Path, share: float) -> None:
    content = packed.read_bytes()
    packed.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"packed\.lmdb.*(truncated|empty)"):
        LMDBReader(packed)


def flip(path: Path, needle: bytes, offset: int = 0) -> None:
    """Flip one bit wherever `needle` stands in the file (LMDB leaves old copies of small records in freed pages)."""
    content = path.read_bytes()
    assert needle in content
    damaged = bytearray(needle)
    damaged[offset] ^= 1
    path.write_bytes(content.replace(needle, bytes(damaged)))


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_flipped_bit_in_a_picture_names_the_record(tmp_path: Path, encoding: str) -> None:
    path, images = tmp_path / "x.lmdb", pictures(9, side=16)
    pack_arrays(path, images, np.arange(9) % 3, CLASSES, encoding=encoding)
    with LMDBReader(path) as reader:
        if encoding == "raw":
            needle = images[6].tobytes()
        else:
            with reader.handle().environment.begin(buffers=True) as transaction:
                needle = bytes(reader.encoded_record(transaction, 6)[1])
    flip(path, needle, offset=100)
    reader = LMDBReader(path)
    for _ in range(2):  # not only the first time
        with pytest.raises(DamageError, match=r"x\.lmdb: record 6 is damaged.*pack"):
            reader.read([2, 6])
        with pytest.raises(DamageError, match="record 6 "):
            reader.picture(6)
    if encoding == "png":
        np.testing.assert_array_equal(reader.read([2])[0], images[[2]])


def test_flipped_bit_in_a_label_is_refused(packed: Path) -> None:
    with LMDBReader(packed) as reader, reader.handle().environment.begin(buffers=True) as transaction:
        entry = reader.index_record(transaction, 0)[1][5].tobytes()
    flip(packed, entry, offset=ENTRY.fields["label"][1])
    with pytest.raises(DamageError, match="record 0 to 19 .*index"):
        LMDBReader(packed).labels()


def test_flipped_bit_in_an_encoded_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    pack_arrays(path, pictures(3), [2, 1, 0], CLASSES, encoding="png")
    with LMDBReader(path) as reader, reader.handle().environment.begin(buffers=True) as transaction:
        entry, payload = reader.encoded_record(transaction, 1)
        record = entry.tobytes() + bytes(payload)
    flip(path, record, offset=ENTRY.fields["label"][1])
    with pytest.raises(DamageError, match="record 1 "):
        LMDBReader(path).picture(1)


def test_flipped_bit_in_the_metadata_is_refused(packed: Path) -> None:
    flip(packed, b'"channels": 3', offset=12)
    with pytest.raises(UserError, match="metadata record is damaged"):
        LMDBReader(packed)


def change(path: Path, key: bytes, value: bytes | None) -> None:
    """Replace or delete a record, as another program would."""
    with lmdb.open(str(path), subdir=False, lock=False) as environment, environment.begin(write=True) as transaction:
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"complete", None, "not finished"),
        (META_KEY, None, "not finished"),
        (b"format", None, "not a packed data set"),
        (b"format", b"duet-lmdb 2", "format version 2, this program reads 1"),
        (b"complete", b"{}", "damaged"),
    ],
)
def test_unfinished_foreign_and_newer_files_are_refused(
    packed: Path, key: bytes, value: bytes | None, message: str
) -> None:
    change(packed, key, value)
    with pytest.raises(UserError, match=message):
        LMDBReader(packed)


def test_missing_record_is_named(packed: Path, tmp_path: Path) -> None:
    change(packed, b"pixels/00000000/00008", None)
    with pytest.raises(DamageError, match="record 0 to 19 .*missing"):
        LMDBReader(packed).read([3])
    path = tmp_path / "png.lmdb"
    pack_arrays(path, pictures(3), encoding="png")
    change(path, b"picture/0000000002/00008", None)
    with pytest.raises(DamageError, match=r"record 2 .*missing"):
        LMDBReader(path).read([2])


def test_other_files_are_refused(tmp_path: Path, packed: Path) -> None:
    text = tmp_path / "notes.lmdb"
    text.write_text("this is a text file, and a long one at that")
    with pytest.raises(UserError, match=r"notes\.lmdb is not an LMDB file"):
        LMDBReader(text)
    with pytest.raises(UserError, match="is a folder"):
        LMDBReader(tmp_path)
    with pytest.raises(UserError, match=r"pakced\.lmdb: no such file.*did you mean 'packed\.lmdb'"):
        LMDBReader(tmp_path / "pakced.lmdb")
    with pytest.raises(UserError, match="nor a folder"):
        LMDBReader(tmp_path / "nowhere" / "packed.lmdb")


def test_opening_for_reading_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        LMDBReader(tmp_path / "x.lmdb")
    assert list(tmp_path.iterdir()) == []


def test_readers_share_a_file_and_close_it(packed: Path) -> None:
    first, second = LMDBReader(packed), LMDBReader(packed)
    first.read([1])
    assert first.handle() is second.handle()
    first.close()
    np.testing.assert_array_equal(second.read([2])[0], pictures(20)[[2]])
    second.close()
    lmdb.open(str(packed), subdir=False, readonly=True, lock=False).close()  # raises while it is open in the process
    np.testing.assert_array_equal(first.read([3])[0], pictures(20)[[3]])  # opened again


def test_pickled_reader_in_another_process(packed: Path) -> None:
    reader = LMDBReader(packed)
    reader.read([0])
    code = "import pickle, sys; r = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(r.read([5, 2])[0].tobytes())"
    child = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(reader),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert child.stdout == pictures(20)[[5, 2]].tobytes()


def _in_child(reader: LMDBReader, path: Path, results: "multiprocessing.Queue[bytes]") -> None:
    results.put(reader.read([5, 2])[0].tobytes() + LMDBReader(path).read([7])[0].tobytes())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_reader_after_a_fork(packed: Path) -> None:
    reader = LMDBReader(packed)
    reader.read([0])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(reader, packed, results))
    child.start()
    assert results.get(timeout=30) == pictures(20)[[5, 2, 7]].tobytes()
    child.join()
    np.testing.assert_array_equal(reader.read([9])[0], pictures(20)[[9]])  # the parent's is untouched


def test_reader_from_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_format, "BLOCK_PICTURES", 4)
    images = pictures(64)
    pack_arrays(tmp_path / "x.lmdb", images)
    reader = LMDBReader(tmp_path / "x.lmdb")
    wrong: list[int] = []

    def work(seed: int) -> None:
        for order in np.random.default_rng(seed).integers(0, 64, (200, 16)):
            if not np.array_equal(reader.read(order)[0], images[order]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_replaced_file_is_noticed(packed: Path) -> None:
    reader = pickle.loads(pickle.dumps(LMDBReader(packed)))
    pack_arrays(packed, pictures(20, seed=1), np.arange(20) % 3, CLASSES, overwrite=True)
    with pytest.raises(UserError, match="was replaced"):
        reader.read([0])


def test_file_replaced_while_open_is_read_to_its_end(packed: Path) -> None:
    reader = LMDBReader(packed)
    pack_arrays(packed, pictures(3, seed=1), overwrite=True)
    np.testing.assert_array_equal(reader.read([19])[0], pictures(20)[[19]])
    assert len(LMDBReader(packed)) == 3
