"""Metadata that lies with a right checksum is refused whole when the file is opened, in one line (H17)."""

import itertools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.errors import DamageError
from duetgan.data.lmdb.format import COMPLETE_KEY, META_KEY, index_key
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import make_plan, pack_arrays
from duetgan.data.sources.base import ArraySource
from duetgan.utils.errors import UserError
from tests.data.conftest import CLASSES, change, sample_images

OTHERS: list[Any] = [None, True, -1, 0, 1, 2, 2**31, 10**9, 2**63, 10**30, 0.5, 1e400, float("nan"), {}, {"a": 1}]
OTHERS += ["", "raw", "\ud800", [], [0], [1], [-1], [10**9], [0.5], [None], ["a"], [[]]]
OTHERS += [[10**9] * 3, [1e400] * 3, ["x"] * 5000]
HARMLESS = ("source", "resize_filter", "fingerprint", "content_hash", "mean", "std")  # for people; or only verified


def read(path: Path, key: bytes) -> Any:
    with LMDBReader(path) as reader, reader.handle().environment.begin() as transaction:
        return json.loads(transaction.get(key) or b"")


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
def test_a_lie_is_an_error_of_one_line(tmp_path: Path, encoding: str) -> None:
    path, numbers = tmp_path / "x.lmdb", itertools.count()
    pack_arrays(path, sample_images(20), np.arange(20) % 3, CLASSES, encoding=encoding)
    true = read(path, META_KEY)
    assert use(path) == ""
    for field in true:
        lies = [true | {field: other} for other in OTHERS if json.dumps(other) != json.dumps(true[field])]
        for lie in [*lies, {key: value for key, value in true.items() if key != field}]:
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
        ({"count": -1}, r"count is -1, but must be a whole number at least 1 and below 10,000,000,000"),
        ({"count": True}, "count is true"),
        ({"blocks": [0]}, r"blocks\[0\] is 0"),
        ({"blocks": [1], "count": 21, "histogram": [21, 0, 0]}, "6 records"),
        ({"resolutions": [-8]}, r"resolutions\[0\] is -8"),
        ({"resolutions": [0]}, "do not fit encoding 'raw'"),
        ({"resolutions": [8, 24], "blocks": [4096, 4096]}, "do not fit"),
        ({"resolutions": [8192]}, "more than a file"),
        ({"classes": ["a"] * 100_000}, "histogram has 3 values, but must have 100000"),
        ({"classes": ["a", 3, None]}, r"classes\[1\] is 3, but must be text"),
        ({"mean": [0.5]}, "mean has 1 values, but must have 3"),
        ({"std": [0.5, float("nan"), 0]}, r"std\[1\] is nan"),
        ({"encoding": "jpeg2000"}, "encoding is 'jpeg2000', but must be one of raw"),
        ({"channels": 4}, "channels is 4"),
        ({"version": 2}, "version is 2"),
        ({"split": {"part": "train"}}, "split.share is missing"),
        ({"split": 3}, "split is 3, but must be a mapping"),
    ],
)
def test_the_field_is_named(packed: Path, lie: dict[str, Any], message: str) -> None:
    forge(packed, read(packed, META_KEY) | lie)
    with pytest.raises(UserError, match=rf"packed\.lmdb: its metadata record is damaged \(.*{message}.*pack it again"):
        LMDBReader(packed)


@pytest.mark.parametrize("record", [b"", b"[]", b"3", b"null", b"[" * 100_000, b"{", b"\xff", b"1" * 5000])
@pytest.mark.parametrize("key", [META_KEY, COMPLETE_KEY])
def test_records_that_are_no_mapping(packed: Path, record: bytes, key: bytes) -> None:
    if key == META_KEY:
        forge(packed, record)
    else:
        change(packed, key, record)
    with pytest.raises(UserError, match="metadata record is damaged"):
        LMDBReader(packed)


def test_the_completion_record_must_agree_and_a_version_must_be_one(packed: Path) -> None:
    true = read(packed, META_KEY)
    forge(packed, true, count=19)
    with pytest.raises(UserError, match="completion record has another count"):
        LMDBReader(packed)
    forge(packed, true)
    for version in ("²", "1" * 5000, "", "01", "-1", "1 1"):
        change(packed, b"format", b"duet-lmdb " + version.encode())
        with pytest.raises(UserError, match="pack"):
            LMDBReader(packed)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *(("label", label, f"label {label} has no class, the file has 3 classes") for label in (3, -1, 2**62)),
        ("height", 2**32 - 1, "size"),
    ],
)
def test_an_entry_that_cannot_be_is_named(packed: Path, field: str, value: int, reason: str) -> None:
    with LMDBReader(packed) as reader, reader.handle().environment.begin(buffers=True) as transaction:
        head, entries = reader.index_record(transaction, 0)
        head = head.copy()
    entries[field][7] = value
    head["checksum"] = zlib.crc32(entries.tobytes())
    change(packed, index_key(0, 8), head.tobytes() + entries.tobytes())
    with pytest.raises(DamageError, match=rf"record 7 is damaged: .*{reason}"):
        Dataset(packed).read([3])


def test_a_size_that_could_not_be_read_back_is_not_packed() -> None:
    source = ArraySource("x", np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64), [])
    with pytest.raises(UserError, match="at most 9459 px: lower --size"):
        make_plan(source, size=20000, encoding="raw", channels=3, resize="auto")
