"""What is found where, in which order, with which labels; what is missing or ambiguous is named."""

import json
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.sources import Source, open_source
from tests.data.conftest import save
from tests.data.sources.source_files import item_refused, refused


def zipped(folder: Path, target: Path, extra: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder).as_posix())
        for name, content in (extra or {}).items():
            archive.writestr(name, content)
    return target


def entries(source: Source) -> list[tuple[str, int]]:
    return [(source.item_name(index), int(label)) for index, label in enumerate(source.labels())]


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_class_folders(photos: Path, tmp_path: Path, kind: str) -> None:
    save(photos / "dog" / "deep" / "er.JPG")
    (photos / "dog" / "notes.txt").write_text("not an image")
    save(photos / ".thumbnails" / "x.png")
    save(photos / "cat" / ".hidden.png")
    where = photos if kind == "folder" else zipped(photos, tmp_path / "photos.zip")
    with open_source(str(where)) as source:
        assert source.classes == ["cat", "dog"]
        names = ["cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png", "dog/deep/er.JPG"]
        assert [name.removeprefix(f"{where}")[1:] for name, _ in entries(source)] == names
        assert source.labels().tolist() == [0, 0, 1, 1, 1]
        assert source.ignored == ["dog/notes.txt"]
        assert source.problems == []
        for index, name in enumerate(names):
            item = source.item(index)
            assert item.content == (photos / name).read_bytes()
            assert item.label == source.labels()[index]


def test_flat_is_unlabelled(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        save(tmp_path / "photos" / name)
    for where in (tmp_path / "photos", zipped(tmp_path / "photos", tmp_path / "photos.zip")):
        with open_source(str(where)) as source:
            assert source.classes == []
            assert [(name[-5:], label) for name, label in entries(source)] == [("a.png", 0), ("b.png", 0)]


def test_wrapping_and_linked_folders_and_splits_that_are_not_there(photos: Path, tmp_path: Path) -> None:
    with open_source(str(zipped(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip"))) as source:
        assert source.classes == ["cat", "dog"]
    assert photos.is_dir()
    save(tmp_path / "elsewhere" / "e.png")
    os.symlink(tmp_path / "elsewhere", photos / "emu")
    assert open_source(str(photos)).classes == ["cat", "dog", "emu"]
    refused(photos, "no split folders: leave --split out", split="test")
    save(tmp_path / "other" / "train" / "cat" / "a.png")
    refused(tmp_path / "other", "no test split, only train", split="test")
    refused(photos, "split 'dev'", split="dev")


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_empty_class_folder_is_a_problem(photos: Path, tmp_path: Path, kind: str) -> None:
    (photos / "emu").mkdir()
    (photos / "fox").mkdir()
    (photos / "fox" / "readme.txt").write_text("soon")
    where = photos if kind == "folder" else zipped(photos, tmp_path / "photos.zip")
    with open_source(str(where)) as source:
        assert source.classes == ["cat", "dog"]
        emu, fox = map(str, source.problems)
        assert emu == f"{where}/emu is a class folder without images (it is empty)"
        assert fox == f"{where}/fox is a class folder without images (only 1 .txt)"


def test_what_is_no_source(photos: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, r"empty holds no images \(it is empty\)")
    (empty / "a.txt").write_text("text")
    (empty / "b.txt").write_text("text")
    refused(empty, r"holds no images \(only 2 \.txt\); supported are .*\.jpg")
    refused(empty / "a.txt", r"a.txt is not a source of images; give a folder, a .zip, .tar, .csv, .parquet, .arrow")
    instead = "archives of this kind are not read; unpack it first or make a zip"
    for name, told in {"a.TAR.GZ": "its images cannot be found without", "a.7z": instead, "a.rar": instead}.items():
        (empty / name).write_bytes(b"archive")
        refused(empty / name, f"{name}: {told}")
    refused(tmp_path / "photso", r"photso: no such folder.*did you mean 'photos'")
    refused("fashion-minst", "did you mean 'fashion-mnist'")
    save(photos / "loose.png")
    refused(photos, r"both at the top \(loose.png\) and in sub-folders")


def manifest(labels: object) -> dict[str, bytes]:
    return {"dataset.json": json.dumps({"labels": labels}).encode()}


def test_stylegan_zip(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "x" / "00000" / f"img{number}.png", shade=number)
    labels = [[f"00000/img{number}.png", label] for number, label in ((2, 1), (0, 1), (1, 0), (0, 1))]
    with open_source(str(zipped(tmp_path / "x", tmp_path / "x.zip", manifest(labels)))) as source:
        assert source.classes == ["0", "1"]
        assert source.labels().tolist() == [1, 0, 1]  # in order of name
        assert source.item(1).content == (tmp_path / "x" / "00000" / "img1.png").read_bytes()
        assert source.ignored == []
    with open_source(str(zipped(tmp_path / "x", tmp_path / "y.zip", manifest(None)))) as source:
        assert source.classes == []
        assert len(source) == 3
    (tmp_path / "x" / "dataset.json").write_bytes(manifest(labels)["dataset.json"])
    assert open_source(str(tmp_path / "x")).labels().tolist() == [1, 0, 1]  # unpacked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is not"),
        (b"[]", "is not"),
        (b'{"labels": [3]}', "is not"),
        (manifest([["img.png", 0], ["gone.png", 1]])["dataset.json"], "gone.png is in one of them only"),
        (manifest([["other.png", 0]])["dataset.json"], "do not match"),
        (manifest([["img.png", "cat"]])["dataset.json"], "label of img.png is 'cat'"),
        (manifest([["img.png", -1]])["dataset.json"], "label of img.png is -1"),
        (manifest([["img.png", 7]])["dataset.json"], "labels go up to 7"),
        (manifest([["img.png", 0], ["img.png", 1]])["dataset.json"], "gives img.png the labels 0 and 1: remove one"),
    ],
)
def test_wrong_manifest(tmp_path: Path, content: bytes, message: str) -> None:
    save(tmp_path / "x" / "img.png")
    refused(zipped(tmp_path / "x", tmp_path / "x.zip", {"dataset.json": content}), message)


def test_damaged_zips_and_a_member_larger_than_it_says(photos: Path, tmp_path: Path) -> None:
    path = zipped(photos, tmp_path / "photos.zip")
    content = path.read_bytes()
    image = (photos / "cat" / "b.png").read_bytes()
    damaged = bytearray(image)
    damaged[-1] ^= 1
    path.write_bytes(content.replace(image, bytes(damaged)))
    with open_source(str(path)) as source:
        assert source.item(0).content
        item_refused(source, 1, r"cannot be unpacked.*CRC")
    path.write_bytes(content[: len(content) // 2])
    refused(path, r"photos\.zip cannot be read")
    path = tmp_path / "x.zip"
    noise = np.random.default_rng(0).integers(0, 256, 1 << 18, dtype=np.uint8).tobytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", noise + bytes(30 << 20))
    patched(path, 24, (1 << 16).to_bytes(4, "little"))
    with open_source(str(path)) as source:
        tracemalloc.start()
        item_refused(source, 0, r"cannot be unpacked.*CRC")
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
        tracemalloc.stop()


def test_zip_members_never_touch_the_disk(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    path = tmp_path / "in" / "evil.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "a.png", "cat/a.png")
        for name in ("cat/../../evil.png", "/cat/abs.png", "../dog/", "/emu/"):
            archive.writestr(name, b"" if name.endswith("/") else (tmp_path / "a.png").read_bytes())
    before = sorted(tmp_path.rglob("*"))
    with open_source(str(path)) as source:
        assert entries(source) == [(f"{path}:cat/a.png", 0)]
        assert source.ignored == ["/cat/abs.png", "cat/../../evil.png"]
        assert source.problems == []
        source.item(0)
    assert sorted(tmp_path.rglob("*")) == before


def patched(path: Path, offset: int, value: bytes) -> None:
    """Change a field of the only member's entry in the central directory of a zip file."""
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02") + offset
    content[start : start + len(value)] = value
    path.write_bytes(content)


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


@pytest.mark.parametrize(
    ("member", "method", "patch", "message"),
    [
        ("a.png", zipfile.ZIP_BZIP2, None, "not compressed by deflate"),
        ("a.png", zipfile.ZIP_LZMA, None, "not compressed by deflate"),
        ("a.png", zipfile.ZIP_DEFLATED, (24, b"\x01\0\x10\0"), "1,048,577 bytes, more than the 1 MiB"),
        ("a.png", zipfile.ZIP_DEFLATED, (24, b"\x65"), "cannot be unpacked .100 of 101"),
        ("a.png", zipfile.ZIP_DEFLATED, (8, b"\x01"), "is encrypted; make the zip file without"),
        (link("cat/b.png"), zipfile.ZIP_STORED, None, "is a symbolic link"),
    ],
)
def test_zip_members_that_are_refused(tmp_path, monkeypatch, member, method, patch, message):
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, bytes(100), method)
    if patch:
        patched(path, *patch)
    with open_source(str(path)) as source, pytest.raises(ImageError, match=message):
        source.item(0)
