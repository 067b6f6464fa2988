"""Files that are unfinished, truncated, damaged, foreign or newer are refused by name; damaged records are named."""

from pathlib import Path

import numpy as np
import pytest

from duetgan.data.decode import stored_image
from duetgan.data.errors import DamageError
from duetgan.data.lmdb.format import ENTRY, INDEX_HEAD, META_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.utils.errors import UserError
from tests.data.conftest import CLASSES, change, flip, stored, value
from tests.data.conftest import images as sample_images

LABEL_OFFSET = 8  # of the label in an entry: checksum and size stand before it


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_truncated_file_is_refused(packed: Path, share: float) -> None:
    content = packed.read_bytes()
    packed.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"packed\.lmdb.*(truncated|empty)"):
        LMDBReader(packed)


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_flipped_bit_in_a_image_names_the_record(tmp_path: Path, encoding: str) -> None:
    path, images = tmp_path / "x.lmdb", sample_images(9, side=16)
    pack_arrays(path, images, np.arange(9) % 3, CLASSES, encoding=encoding)
    flip(path, stored(path, 6), offset=100)
    dataset = Dataset(path)
    for _ in range(2):  # not only the first time
        with pytest.raises(DamageError, match=r"x\.lmdb: record 6 is damaged.*pack"):
            dataset.read([2, 6])
        with pytest.raises(DamageError, match="record 6 "):
            dataset.image(6)
    if encoding == "png":
        np.testing.assert_array_equal(dataset.read([2])[0], images[[2]])


def test_flipped_bit_in_a_label_is_refused(packed: Path, tmp_path: Path) -> None:
    entries = value(packed, b"index/00000000/00008")[INDEX_HEAD.itemsize :]
    flip(packed, entries[5 * ENTRY.itemsize : 6 * ENTRY.itemsize], offset=LABEL_OFFSET)
    with pytest.raises(DamageError, match=r"record 0 to 19 .*index"):
        LMDBReader(packed).labels()
    path = tmp_path / "x.lmdb"
    pack_arrays(path, sample_images(3), [2, 1, 0], CLASSES, encoding="png")
    flip(path, value(path, b"picture/0000000001/00008"), offset=LABEL_OFFSET)
    with pytest.raises(DamageError, match="record 1 "):
        stored_image(LMDBReader(path), 1)


@pytest.mark.parametrize(
    ("key", "other", "message"),
    [
        (b"complete", None, "not finished"),
        (META_KEY, None, "not finished"),
        (b"format", None, "not a packed data set"),
        (b"format", b"duet-lmdb 2", "format version 2, this program reads 1"),
        (b"complete", b"{}", "damaged"),
        (META_KEY, b"not what the checksum is of", "metadata record is damaged"),
    ],
)
def test_unfinished_foreign_and_newer_files_are_refused(
    packed: Path, key: bytes, other: bytes | None, message: str
) -> None:
    change(packed, key, other)
    with pytest.raises(UserError, match=message):
        LMDBReader(packed)


def test_missing_record_is_named(packed: Path, tmp_path: Path) -> None:
    change(packed, b"pixels/00000000/00008", None)
    with pytest.raises(DamageError, match=r"record 0 to 19 .*missing"):
        Dataset(packed).read([3])
    path = tmp_path / "png.lmdb"
    pack_arrays(path, sample_images(3), encoding="png")
    change(path, b"picture/0000000002/00008", None)
    with pytest.raises(DamageError, match=r"record 2 .*missing"):
        Dataset(path).read([2])


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
