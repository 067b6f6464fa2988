"""Tar files as sources: webdataset's samples and shards."""

import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from duetgan.commands.pack import main
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source, tars
from duetgan.utils import files
from tests.data.conftest import source_at
from tests.data.packing.sources.source_files import content_of, contents, item_refused, refused


def tar(path: Path, members: Mapping[str, bytes | str], mode: str = "w") -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(*labels: object, first: int = 0, suffix: str = "cls") -> dict[str, bytes | str]:
    """Images and what is said of each."""
    found: dict[str, bytes | str] = {}
    for number, label in enumerate(labels, start=first):
        found |= {f"{number:06d}.jpg": content_of(number), f"{number:06d}.{suffix}": str(label)}
    return found


def test_webdataset_shards_of_a_split(tmp_path):
    tar(tmp_path / "set" / "birds-train-000001.tar", samples(0, 2, first=3))
    tar(tmp_path / "set" / "birds-train-000000.tar", samples(1, 0, 1))
    tar(tmp_path / "set" / "birds-val-000000.tar", samples(2, 1, 0, first=9))
    (tmp_path / "set" / "README.md").write_text("about")
    with source_at(tmp_path / "set") as source:
        assert (source.classes, source.splits, source.ignored) == (["0", "1", "2"], ("train", "val"), ["README.md"])
        assert source.labels().tolist() == [1, 0, 1, 0, 2]
        assert contents(source) == [content_of(shade) for shade in range(5)]
        assert source.item_name(3) == f"{tmp_path}/set/birds-train-000001.tar:000003.jpg"
        assert source.stored_name(3) == "birds-train-000001.tar:000003.jpg"
        parts = [pack(source, tmp_path / f"{n}.lmdb", workers=n).meta for n in (0, 2)]
    assert parts[0].content_hash == parts[1].content_hash
    assert parts[0].histogram == [2, 2, 1]
    with source_at(tmp_path / "set", split="val") as source:
        assert source.labels().tolist() == [2, 1, 0]
    tar(tmp_path / "set" / "more.tar", samples(1))
    refused(tmp_path / "set", r"birds-train-000000\.tar names a split, more\.tar does not")


@pytest.mark.parametrize(
    ("told", "suffix", "classes"),
    [
        (["dog", "cat", "dog", "cat"], "cls", ["cat", "dog"]),
        ([10, 2, 10, 2], "cls", ["2", "10"]),
        (["a dog", "a cat", "two", "three"], "txt", []),  # captions
        ([json.dumps({"label": label, "url": "x"}) for label in "abab"], "json", ["a", "b"]),
        ([json.dumps({"label": n % 2 / 1}) for n in range(4)], "json", ["0.0", "1.0"]),
        (["cafe\u0301", "caf\u00e9", "cafe\u0301", "b"], "cls", ["b", "caf\u00e9"]),
    ],
)
def test_labels(tmp_path: Path, told: list[object], suffix: str, classes: list[str]) -> None:
    with source_at(tar(tmp_path / "x.tar", samples(*told, suffix=suffix))) as source:
        assert (source.classes, len(source), source.remarks) == (classes, 4, [])
        if suffix == "cls" and isinstance(told[0], int):
            assert [int(classes[label]) for label in source.labels()] == told


def test_labels_that_are_asked_for(tmp_path):
    members = samples(0, 1, 0)
    for number, name in enumerate(("wren", "owl", "wren")):
        members[f"{number:06d}.json"] = json.dumps({"class_name": name, "cls": 7})
    ordered = {name: members[name] for name in sorted(members)}
    path = str(tar(tmp_path / "x.tar", ordered))
    assert open_source(path).classes == ["0", "1"]
    assert open_source(path, label_column="class_name").classes == ["owl", "wren"]
    assert open_source(path, label_column="none").classes == []
    message = r"no such column \(did you mean 'class_name'\?\); there are cls, class_name"
    refused(path, message, label_column="classname")
    refused(path, "has no splits: leave --split out", split="test")
    refused(tar(tmp_path / "y.tar", samples(0, -9)), "000001.jpg: label -9; labels are names, or whole numbers from 0")


def test_samples_that_are_none_are_named(tmp_path):
    members: dict[str, bytes | str] = samples(0, 1) | {"2.cls": "1"}
    members |= {"3.jpg": content_of(3), "3.PNG": content_of(4), "3.cls": "0"}
    members |= {"dir/4.jpg": content_of(5), "dir/4.seg.png": content_of(9), "dir/4.cls": "1"}
    members |= {"5.jpg": content_of(6), "__meta__": "1", "plain": "x"}
    members |= {"6.jpg": content_of(7), "6.json": "[" * 5000, "6.cls": "0"}
    with source_at(tar(tmp_path / "x.tar", members)) as source:
        assert source.labels().tolist() == [0, 1, 1, 0]
        assert source.content(2) == content_of(5)
        assert source.ignored == ["plain"]
        problems = [str(problem).partition("x.tar")[2] for problem in source.problems]
    assert problems.pop(2).startswith(":6.json cannot be read")
    assert problems == [
        ": sample 2 has 0 images; a sample has one",
        ": sample 3 has 2 images; a sample has one",
        ":5.jpg has no label",
    ]


def test_links_and_special_members_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(content_of(99))
    with tarfile.open(tar(tmp_path / "x.tar", samples(0)), "a") as archive:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE), start=1):
            info = tarfile.TarInfo(f"00000{number}.jpg")
            info.type, info.linkname = kind, str(secret)
            archive.addfile(info)
        outside = tarfile.TarInfo("../../etc/a.jpg")
        outside.size = len(content_of(8))
        archive.addfile(outside, io.BytesIO(content_of(8)))
    with source_at(tmp_path / "x.tar", label_column="none") as source:
        reasons = [str(problem).partition(" ")[2] for problem in source.problems]
        assert contents(source) == [content_of(0), content_of(8)]
    assert reasons == ["is not a regular file; put the file itself into the tar"] * 4


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


LONG_NAME = header("././@LongLink", 1 << 40, tarfile.GNUTYPE_LONGNAME)
DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {  # of a tar, where a member of its middle begins
    "cut": lambda content, at: content[: at + 700],
    "between": lambda content, at: content[:at],  # two members: only the mark of the end is missing
    "head": lambda content, at: content[: at + 100] + b"\xee" * 100 + content[at + 200 :],  # tarfile says nothing
    "joined": lambda content, at: content * 2,
    "negative": lambda content, at: content[:at] + header("000020.jpg", -(1 << 20)) + content[at + 512 :],
    "long name": lambda content, at: content[:at] + LONG_NAME + content[at + 512 :],
    "compressed": lambda content, at: b"\x1f\x8b\x08" + bytes(2000),
    "empty": lambda content, at: b"",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_line_and_loses_nothing_in_silence(tmp_path, how, refused):
    path = tar(tmp_path / "x.tar", samples(*[n % 2 for n in range(40)]))
    content = path.read_bytes()
    path.write_bytes(DAMAGE[how](content, content.index(b"000020.jpg")))
    error = refused(main, path, tmp_path / "x.lmdb", "--workers", "0", alone=True)
    assert f"{path} is damaged or was cut off (" in error
    assert list(tmp_path.glob("*.lmdb*")) == []
    if how not in ("compressed", "empty"):
        with source_at(path) as source:
            assert len(source) >= 20


def test_limits(tmp_path, monkeypatch):
    path = tar(tmp_path / "x.tar", samples(0, 1) | {"9.cls": "1" * (tars.NOTE_BYTES + 1)})
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    noise = np.random.default_rng(0).bytes(2 << 20)
    with source_at(path) as source:
        assert "more than a label has" in str(source.problems[0])
    with source_at(tar(tmp_path / "y.tar", {"a.jpg": noise, "b.jpg": b"x"})) as source:
        item_refused(source, 0, r"more than the 1 MiB for an image file: make it smaller or set DUET")
        os.truncate(tmp_path / "y.tar", 1 << 20)
        item_refused(source, 1, "is cut off: 0 of 1 bytes")
    os.mkfifo(tmp_path / "pipe.tar")
    refused(tmp_path / "pipe.tar", "is a named pipe, not a regular file")
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b")
    refused(tmp_path / "x.tar.gz", r"x\.tar\.gz is not a source of images")
    assert files.IMAGE.limit == 1 << 20
