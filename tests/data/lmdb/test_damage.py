"""Unfinished, truncated, damaged, foreign, newer files and those whose metadata lies (H17) are refused by name."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.lmdb.environment import acquire
from duetgan.data.lmdb.format import COMPLETE_KEY, ENTRY, INDEX_HEAD, META_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import stored_image
from duetgan.data.lmdb.tree import META, META_AT, check_tree
from duetgan.data.packing.records import make_plan, pack_arrays
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import ArraySource
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import DamageError, UserError
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, change, flip, sample_images, value

OTHERS: list[Any] = [None, True, -1, 0, 1, 2, 2**31, 10**9, 2**63, 10**30, 0.5, 1e400, float("nan"), {}, {"a": 1}]
OTHERS += ["", "raw", "\ud800", [], [0], [1], [-1], [10**9], [0.5], [None], ["a"], [[]]]
OTHERS += [[10**9] * 3, [1e400] * 3, ["x"] * 5000]
HARMLESS = ("source", "resize_filter", "fingerprint", "content_hash", "mean", "std")  # for people; or only verified


def read(path: Path, key: bytes) -> Any:
    return json.loads(value(path, key))


def forge(path: Path, meta: Any, **completion: Any) -> None:
    """Write `meta` with the checksum that belongs to it."""
    record = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    whole = meta if isinstance(meta, dict) else {}
    complete = {"content_hash": whole.get("content_hash"), "count": whole.get("count")} | completion
    change(path, META_KEY, record)
    change(path, COMPLETE_KEY, json.dumps({"meta_checksum": zlib.crc32(record)} | complete).encode())


def use(path: Path) -> str:
    """Do all that reading does; what it says, empty where nothing is wrong."""
    try:
        with Dataset(path, resolution=8) as dataset:
            dataset.read([0, len(dataset) - 1])
            dataset.signatures()
            dataset.image(0)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_a_lie_is_an_error_of_one_line(tmp_path, encoding):
    path, numbers = tmp_path / "x.lmdb", itertools.count()
    pack_arrays(path, sample_images(20), np.arange(20) % 3, CLASSES, encoding=encoding)
    true = read(path, META_KEY)
    assert use(path) == ""
    for field in true:
        lies = [true | {field: other} for other in OTHERS if json.dumps(other) != json.dumps(true[field])]
        for lie in [*lies, {key: true[key] for key in true if key != field}]:
            forged = Path(shutil.copy(path, tmp_path / f"{next(numbers)}.lmdb"))
            forge(forged, lie)
            told = use(forged)
            forged.unlink()
            assert told.startswith(f"{forged}") or field in HARMLESS or lie["blocks"] == [10**9], lie
            assert "\n" not in told
            assert len(told) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"count": 10**9}, "histogram counts 20 images, but count is 1000000000"),
        ({"count": 10**9, "histogram": [10**9, 0, 0]}, "more than a file of .* bytes and 6 records holds"),
        ({"count": -1}, r"count -1: must be greater than or equal to 1"),
        ({"blocks": [0]}, r"blocks\[0\] 0:"),
        ({"blocks": [1], "count": 21, "histogram": [21, 0, 0]}, "6 records"),
        ({"resolutions": [0]}, "do not fit encoding 'raw'"),
        ({"resolutions": [8, 24], "blocks": [4096, 4096]}, "do not fit"),
        ({"resolutions": [8192]}, "more than a file"),
        ({"classes": ["a"] * 100_000}, "histogram has 3 values, but must have 100000"),
        ({"mean": [0.5]}, "mean has 1 values, but must have 3"),
        ({"channels": 33}, "channels 33:"),
        ({"version": 2}, "version 2:"),
        ({"split": {"part": "train"}}, "split.share is missing"),
    ],
)
def test_the_field_is_named(packed, lie, message):
    forge(packed, read(packed, META_KEY) | lie)
    with pytest.raises(UserError, match=rf"packed\.lmdb: its metadata record .* read \(.*{message}.*pack it again"):
        LMDBReader(packed)


@pytest.mark.parametrize("record", [b"", b"[]", b"3", b"null", b"[" * 100_000, b"{", b"\xff", b"1" * 5000])
@pytest.mark.parametrize("key", [META_KEY, COMPLETE_KEY])
def test_records_that_are_no_mapping(packed, record, key):
    if key == META_KEY:
        forge(packed, record)
    else:
        change(packed, key, record)
    assert_raises(UserError, "metadata record cannot be read", LMDBReader, packed)


def test_the_completion_record_must_agree_and_a_version_must_be_one(packed):
    true = read(packed, META_KEY)
    forge(packed, true, count=19)
    assert_raises(UserError, "completion record has another count", LMDBReader, packed)
    forge(packed, true)
    for version in ("²", "1" * 5000, "", "01", "-1", "1 1"):
        change(packed, b"format", b"duet-lmdb " + version.encode())
        assert_raises(UserError, "pack", LMDBReader, packed)


def test_a_size_that_could_not_be_read_back_is_not_packed():
    source = ArraySource("x", np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64), [])
    with pytest.raises(UserError, match="at most 9459 px: lower --size"):
        make_plan(source, size=20000, encoding="raw", channels=3, resize="auto")


LABEL_OFFSET = 8  # of the label in an entry: checksum and size stand before it


def test_flipped_bit_in_a_label_is_refused(packed, tmp_path):
    entries = value(packed, b"index/00000000/00008")[INDEX_HEAD.itemsize :]
    flip(packed, entries[5 * ENTRY.itemsize : 6 * ENTRY.itemsize], offset=LABEL_OFFSET)
    assert_raises(DamageError, r"record 0 to 19 .*index", LMDBReader(packed).labels)
    path = tmp_path / "x.lmdb"
    pack_arrays(path, sample_images(3), [2, 1, 0], CLASSES, encoding="png")
    flip(path, value(path, b"picture/0000000001/00008"), offset=LABEL_OFFSET)
    assert_raises(DamageError, "record 1 ", stored_image, LMDBReader(path), 1)


@pytest.mark.parametrize(
    ("key", "other", "message"),
    [
        (b"complete", None, "not finished"),
        (META_KEY, None, "not finished"),
        (b"format", None, "not a packed data set"),
        (b"format", b"duet-lmdb 2", "format version 2, this program reads 1"),
        (b"complete", b"{}", "completion record.meta_checksum is missing"),
        (META_KEY, b"not what the checksum is of", "metadata record cannot be read"),
    ],
)
def test_unfinished_foreign_and_newer_files_are_refused(packed, key, other, message):
    change(packed, key, other)
    assert_raises(UserError, message, LMDBReader, packed)


def test_missing_record_is_named(packed, tmp_path):
    png = tmp_path / "png.lmdb"
    pack_arrays(png, sample_images(3), encoding="png")
    for path, key, named in ((packed, b"pixels/00000000", "0 to 19"), (png, b"picture/0000000002", "2")):
        change(path, key + b"/00008", None)
        assert_raises(DamageError, rf"record {named} .*missing", Dataset(path).read, [2])


def test_other_files_are_refused_and_opening_creates_nothing(tmp_path, packed):
    (tmp_path / "notes.lmdb").write_text("this is a text file, and a long one at that")
    before = sorted(tmp_path.iterdir())
    for name, message in (
        ("notes.lmdb", r"notes\.lmdb is not an LMDB file"),
        ("", "is a folder"),
        ("pakced.lmdb", r"pakced\.lmdb: no such file.*did you mean 'packed\.lmdb'"),
        ("nowhere/packed.lmdb", "no such file; make it"),
    ):
        assert_raises(UserError, message, LMDBReader, tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


PAGE = 4096  # bytes
TREE = (1, 2)  # flags of branches and leaves
REPOSITORY = Path(__file__).parents[3]


def rosinality(path: Path) -> None:
    """Two resolutions: small values lie in the leaves, large ones in pages of their own."""
    with lmdb.open(str(path), subdir=False, map_size=1 << 24) as environment, environment.begin(write=True) as txn:
        for side in (64, 128):
            for index in range(100):
                txn.put(f"{side}-{index:05d}".encode(), bytes([index]) * side * (4 if side == 64 else 40))
        txn.put(b"length", b"100")


def outcome_of(path: Path) -> str:
    """What becomes of reading everything."""
    try:
        with open_source(str(path)) as source:
            found = [source.content(index) for index in range(len(source))]
        same = found == [bytes([index]) * 128 * 40 for index in range(100)]
        return "the same" if same else "other"
    except (UserError, ImageError) as error:
        return "told" if "\n" not in str(error) else "lines"


def forked(path: Path) -> str:
    """`outcome_of` in a process of its own."""
    outcomes = ("the same", "other", "told", "lines")
    pid = os.fork()
    if pid == 0:
        os._exit(outcomes.index(outcome_of(path)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return outcomes[code] if 0 <= code < 4 else f"ended with {code}"


def big_values(page: bytes, start: int) -> list[int]:
    """Where the lengths of the large values of a leaf lie, which begins at `start`."""
    places = range(16, int.from_bytes(page[12:14], "little") if page[10] == 2 else 0, 2)
    nodes = [int.from_bytes(page[place : place + 2], "little") for place in places]
    return [start + node for node in nodes if page[node + 4] & 1]


def main(folder: Path) -> dict[str, list[str]]:
    """Zero every page in turn; then put wrong numbers into pages of the tree."""
    path, scratch = folder / "x.lmdb", folder / "y.lmdb"
    rosinality(path)
    content = path.read_bytes()
    starts = range(0, len(content), PAGE)
    tree = [at for at in starts if int.from_bytes(content[at + 10 : at + 12], "little") in TREE]

    def with_bytes(at: int, odd: bytes) -> str:
        scratch.write_bytes(content[:at] + odd + content[at + len(odd) :])
        return forked(scratch)

    zeroed, wrong, draw = [with_bytes(at, bytes(PAGE)) for at in tree], [], random.Random(0)
    for _ in range(60):
        at = draw.choice(tree) + draw.choice((0, 8, 10, 12, 14, 16, 18, 20, draw.randrange(64), draw.randrange(4088)))
        length = draw.choice((1, 2, 8))
        wrong.append(with_bytes(at, draw.choice((b"\xff" * 8, draw.randbytes(8)))[:length]))
    large = [node for start in tree for node in big_values(content[start : start + PAGE], start)[:1]]
    return {"zeroed": zeroed, "wrong": wrong + [with_bytes(at, b"\xff\xff\xff\x7f") for at in large]}


def test_h27_no_damaged_page_ends_the_process(tmp_path):
    """Wrong numbers in the tree ended readers by SIGBUS, with older versions of LMDB also zeroed pages by SIGABRT."""
    command = [sys.executable, "-m", "tests.data.lmdb.test_damage", str(tmp_path)]  # not from a process with threads
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found["zeroed"]) <= {"the same", "told"}  # what was freed holds old pages
    assert found["zeroed"].count("told") >= 5
    assert set(found["wrong"]) <= {"the same", "other", "told"}  # records have no checksums
    assert found["wrong"].count("told") > 20


@pytest.mark.parametrize("count", [0, 1, 3, 2000])
def test_whole_trees_of_any_depth_are_accepted(tmp_path, count):
    path = tmp_path / "x.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 26) as environment:
        for start in range(0, max(1, count), 500):  # several transactions
            with environment.begin(write=True) as txn:
                for index in range(start, min(count, start + 500)):
                    txn.put(b"%0200d" % index, bytes(index % 5000))
        depth = environment.stat()["depth"]
    assert depth == {0: 0, 1: 1, 3: 1, 2000: 4}[count]
    handle = acquire(path)
    assert handle.environment.flags()["readonly"]
    with handle.environment.begin() as txn:
        assert all(len(txn.get(b"%0200d" % index, b"")) == index % 5000 for index in range(count))


def test_a_root_right_behind_the_last_page_is_damage(tmp_path):
    path = tmp_path / "x.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 20) as environment, environment.begin(write=True) as txn:
        txn.put(b"key", b"value")
    content = bytearray(path.read_bytes())
    for start in (META_AT, PAGE + META_AT):
        meta = np.frombuffer(content, META, 1, start)
        meta["root"] = len(content) // PAGE
    path.write_bytes(content)
    with path.open("rb") as file:
        assert_raises(ValueError, "lies beyond its end", check_tree, file.fileno(), PAGE, len(content))
        assert_raises(ValueError, "it was cut off", check_tree, file.fileno(), PAGE, len(content) + PAGE)


def test_a_value_that_ends_behind_its_page_is_damage(tmp_path):
    path = tmp_path / "x.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 20) as environment, environment.begin(write=True) as txn:
        txn.put(b"key", b"value")
    content = path.read_bytes()
    start = content.index(b"keyvalue")
    room = PAGE - (start + len(b"key")) % PAGE
    for length, outcome in ((room, "whole"), (room + 1, f"page {start // PAGE} of its tree is damaged")):
        path.write_bytes(content[: start - 8] + length.to_bytes(2, "little") + content[start - 6 :])
        with path.open("rb") as file:
            if outcome == "whole":
                check_tree(file.fileno(), PAGE, len(content))
            else:
                assert_raises(ValueError, outcome, check_tree, file.fileno(), PAGE, len(content))


def test_a_record_of_an_unlabelled_file_has_label_0(tmp_path, monkeypatch):
    path = tmp_path / "x.lmdb"
    pack_arrays(path, sample_images(3), encoding="png")
    encoded = LMDBReader.encoded

    @contextmanager
    def labelled(reader: LMDBReader, index: int) -> Iterator[Any]:
        with encoded(reader, index) as (entry, payload, _):
            yield {"label": index % 2, "codec": entry["codec"]}, payload, (8, 8 - index)

    monkeypatch.setattr(LMDBReader, "encoded", labelled)
    with LMDBReader(path) as reader:
        np.testing.assert_array_equal(stored_image(reader, 0)[0], sample_images(3)[0].transpose(1, 2, 0))
        assert_raises(DamageError, "label 1 has no class, the file has 0 classes", stored_image, reader, 1)
        assert_raises(DamageError, "is 8x8 px by its header, 6x8 px by its record", stored_image, reader, 2)
        for index in (-1, 3):
            assert_raises(IndexError, f"record {index} of 3", stored_image, reader, index)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))


@pytest.mark.parametrize(
    ("encoding", "records", "least"),
    [
        ("raw", 2 * (2 + 3), 5 * (2 * ENTRY.itemsize + 3 * (4 * 4 + 8 * 8))),
        ("png", 5 + 2 + 5 + 3, 5 * 4 * ENTRY.itemsize),
    ],
)
def test_a_file_may_have_lost_half_of_its_records(tmp_path, encoding, records, least):
    content = (sample_images(5), np.zeros(5, np.int64), CLASSES)
    meta = pack_arrays(tmp_path / "x.lmdb", *content, encoding=encoding, smallest=4)
    meta = meta.model_copy(update={"blocks": [3, 2]})  # images in a block at 4 and at 8 px
    size, entries = -(-least // 2), -(-records // 2)
    meta.check_room(size, entries)
    for smaller in ((size - 1, entries), (size, entries - 1)):
        assert_raises(ValueError, r"count is 5, more than a file of", meta.check_room, *smaller)
