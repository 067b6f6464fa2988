"""Files that are unfinished, truncated, damaged, foreign or newer are refused by name; damaged records are named."""

from pathlib import Path

import pytest

from duetgan.data.decode import stored_image
from duetgan.data.errors import DamageError
from duetgan.data.lmdb.format import ENTRY, INDEX_HEAD, META_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.utils.errors import UserError
from tests.data.conftest import CLASSES, change, flip, sample_images, value

LABEL_OFFSET = 8  # of the label in an entry: checksum and size stand before it


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_truncated_file_is_refused(packed: Path, share: float) -> None:
    content = packed.read_bytes()
    packed.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"packed\.lmdb.*(truncated|empty)"):
        LMDBReader(packed)


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
def test_unfinished_foreign_and_newer_files_are_refused(packed, key, other, message):
    change(packed, key, other)
    with pytest.raises(UserError, match=message):
        LMDBReader(packed)


def test_missing_record_is_named(packed: Path, tmp_path: Path) -> None:
    png = tmp_path / "png.lmdb"
    pack_arrays(png, sample_images(3), encoding="png")
    for path, key, named in ((packed, b"pixels/00000000", "0 to 19"), (png, b"picture/0000000002", "2")):
        change(path, key + b"/00008", None)
        with pytest.raises(DamageError, match=rf"record {named} .*missing"):
            Dataset(path).read([2])


def test_other_files_are_refused_and_opening_creates_nothing(tmp_path: Path, packed: Path) -> None:
    (tmp_path / "notes.lmdb").write_text("this is a text file, and a long one at that")
    before = sorted(tmp_path.iterdir())
    for name, message in (
        ("notes.lmdb", r"notes\.lmdb is not an LMDB file"),
        ("", "is a folder"),
        ("pakced.lmdb", r"pakced\.lmdb: no such file.*did you mean 'packed\.lmdb'"),
        ("nowhere/packed.lmdb", "nor a folder"),
    ):
        with pytest.raises(UserError, match=message):
            LMDBReader(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
