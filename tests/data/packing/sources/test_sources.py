"""What is found where, in which order, with which labels; what is missing or ambiguous is named."""

import json
import os
import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import READERS, Source, open_images, open_source
from duetgan.data.packing.sources.base import ArraySource, SourceOptions
from duetgan.data.packing.sources.files import LocalSource
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.data.conftest import CLASSES, flip, sample_images, save, source_at
from tests.data.packing.sources.source_files import contents, item_refused, manifest, refused


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
def test_class_folders(photos, tmp_path, kind):
    save(photos / "dog" / "deep" / "er.JPG")
    (photos / "dog" / "notes.txt").write_text("not an image")
    save(photos / ".thumbnails" / "x.png")
    save(photos / "cat" / ".hidden.png")
    where = photos if kind == "folder" else zipped(photos, tmp_path / "photos.zip")
    with source_at(where) as source:
        assert source.classes == ["cat", "dog"]
        names = ["cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png", "dog/deep/er.JPG"]
        assert [name.removeprefix(f"{where}")[1:] for name, _ in entries(source)] == names
        assert source.labels().tolist() == [0, 0, 1, 1, 1]
        assert source.ignored == ["dog/notes.txt"]
        assert source.problems == []
        for index, name in enumerate(names):
            assert source.content(index) == (photos / name).read_bytes()


def test_flat_is_unlabelled(tmp_path):
    for name in ("b.png", "a.png", "x.grid.png"):  # the last one as data.inspect draws it
        save(tmp_path / "photos" / name)
    for where in (tmp_path / "photos", zipped(tmp_path / "photos", tmp_path / "photos.zip")):
        with source_at(where) as source:
            assert source.classes == []
            assert [(name[-5:], label) for name, label in entries(source)] == [("a.png", 0), ("b.png", 0)]


def test_wrapping_and_linked_folders_and_splits_that_are_not_there(photos, tmp_path):
    with source_at(zipped(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip")) as source:
        assert source.classes == ["cat", "dog"]
    assert photos.is_dir()
    save(tmp_path / "elsewhere" / "e.png")
    os.symlink(tmp_path / "elsewhere", photos / "emu")
    assert source_at(photos).classes == ["cat", "dog", "emu"]
    (photos / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    for name, target in (("all", photos), ("self", "self"), ("gone", "nowhere")):
        (photos / "dog" / name).symlink_to(target)
    (photos / "emu" / "back").symlink_to(photos)
    with source_at(photos) as source:
        assert isinstance(source, LocalSource)
        assert [source.names[0], source.names[2], len(source)] == ["cat/a.png", "cat/more/e.png", 6]
        assert source.ignored == ["cat/more/back", "dog/all", "dog/gone", "dog/self", "emu/back"]
    refused(photos, "no split folders: leave --split out", split="test")
    save(tmp_path / "other" / "train" / "cat" / "a.png")
    refused(tmp_path / "other", "no test split, only train", split="test")


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_empty_class_folder_is_a_problem(photos, tmp_path, kind):
    (photos / "emu").mkdir()
    (photos / "fox").mkdir()
    (photos / "fox" / "readme.txt").write_text("soon")
    where = photos if kind == "folder" else zipped(photos, tmp_path / "photos.zip")
    with source_at(where) as source:
        assert source.classes == ["cat", "dog"]
        emu, fox = map(str, source.problems)
        assert emu == f"{where}/emu is a class folder without images"
        assert fox == f"{where}/fox is a class folder without images"


def test_what_is_no_source(photos, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, r"empty holds no images")
    (empty / "a.txt").write_text("text")
    refused(empty, r"holds no images; supported are .*\.jpg")
    refused(empty / "a.txt", r"a.txt is not a source of images; give a folder, a file \(.lmdb, .mdb, .parquet")
    for name, told in (("a.tar.gz", " is not a source of images"), ("a.rar", " is not a source of images")):
        (empty / name).write_bytes(b"archive")
        refused(empty / name, f"{name}{told}")
    refused(tmp_path / "photso", r"photso: no such folder.*did you mean 'photos'")
    refused("fashion-minst", "did you mean 'fashion-mnist'")
    save(photos / "loose.png")
    refused(photos, r"both at the top \(loose.png\) and in sub-folders")


def test_own_readers_take_files_and_folders_of_them(tmp_path, monkeypatch):
    def arrays(path: Path, options: SourceOptions) -> ArraySource:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return ArraySource(str(path), np.stack([np.load(file) for file in files]), np.zeros(len(files)), [])

    for number in range(2):
        with open(tmp_path / f"{number}.own", "wb") as file:
            np.save(file, np.full((8, 8, 3), number, np.uint8))
    refused(tmp_path, r"holds no images")
    monkeypatch.setitem(READERS, ".own", arrays)
    assert len(source_at(tmp_path)) == 2
    assert len(source_at(tmp_path / "0.own")) == 1
    (tmp_path / "a.txt").write_text("text")
    refused(tmp_path / "a.txt", r"a file \(.*\.own")


def test_images_alone_are_those_of_all_folders_and_rows_without_labels(tmp_path, monkeypatch):
    """And a name is that of a folder, not of a data set."""
    monkeypatch.chdir(tmp_path)
    for name in ("c.png", "test/b.png", "train/cat/a.png"):
        save(tmp_path / "sample" / name)
    manifest(tmp_path, "path,label,split\na.png,x,train\nb.png,,val\n")
    for where, names in (("sample", ["c.png", "test/b.png", "train/cat/a.png"]), ("list.csv", ["a.png", "b.png"])):
        with open_images(where) as source:
            assert (source.classes, source.problems) == ([], [])
            assert [source.stored_name(index) for index in range(len(source))] == names


def dataset_json(labels: object) -> dict[str, bytes]:
    return {"dataset.json": json.dumps({"labels": labels}).encode()}


def test_stylegan_zip(tmp_path):
    for number in range(3):
        save(tmp_path / "x" / "00000" / f"img{number}.png", shade=number)
    labels = [[f"00000/img{number}.png", label] for number, label in ((2, 1), (0, 1), (1, 0), (0, 1))]
    with source_at(zipped(tmp_path / "x", tmp_path / "x.zip", dataset_json(labels))) as source:
        assert source.classes == ["0", "1"]
        assert source.labels().tolist() == [1, 0, 1]  # in order of name
        assert source.content(1) == (tmp_path / "x" / "00000" / "img1.png").read_bytes()
        assert source.ignored == []
    with source_at(zipped(tmp_path / "x", tmp_path / "y.zip", dataset_json(None))) as source:
        assert source.classes == []
        assert len(source) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is not"),
        (b"[]", "is not"),
        (b'{"labels": [3]}', "is not"),
        (dataset_json([["img.png", -1]])["dataset.json"], "img.png: label -1; labels are names, or whole"),
    ],
)
def test_wrong_manifest(tmp_path, content, message):
    save(tmp_path / "x" / "img.png")
    refused(zipped(tmp_path / "x", tmp_path / "x.zip", {"dataset.json": content}), message)


def test_damaged_zips_and_a_member_larger_than_it_says(photos, tmp_path):
    path = zipped(photos, tmp_path / "photos.zip")
    content = path.read_bytes()
    image = (photos / "cat" / "b.png").read_bytes()
    damaged = bytearray(image)
    damaged[-1] ^= 1
    path.write_bytes(content.replace(image, bytes(damaged)))
    with source_at(path) as source:
        assert source.content(0)
        item_refused(source, 1, r"cannot be unpacked.*CRC")
    path.write_bytes(content[: len(content) // 2])
    refused(path, r"photos\.zip cannot be read")
    path = tmp_path / "x.zip"
    noise = np.random.default_rng(0).integers(0, 256, 1 << 18, dtype=np.uint8).tobytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", noise + bytes(30 << 20))
    patched(path, 24, (1 << 16).to_bytes(4, "little"))
    with source_at(path) as source:
        tracemalloc.start()
        item_refused(source, 0, r"cannot be unpacked.*CRC")
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
        tracemalloc.stop()


def test_zip_members_never_touch_the_disk(tmp_path):
    save(tmp_path / "a.png")
    path = tmp_path / "in" / "evil.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "a.png", "cat/a.png")
        for name in ("cat/../../evil.png", "/cat/abs.png", "../dog/", "/emu/"):
            archive.writestr(name, b"" if name.endswith("/") else (tmp_path / "a.png").read_bytes())
    before = sorted(tmp_path.rglob("*"))
    with source_at(path) as source:
        assert entries(source) == [(f"{path}:cat/a.png", 0)]
        assert source.ignored == ["/cat/abs.png", "cat/../../evil.png"]
        assert source.problems == []
        source.content(0)
    assert sorted(tmp_path.rglob("*")) == before


def patched(path: Path, offset: int, value: bytes) -> None:
    """Change a field of the only member's entry in the central directory of a zip file."""
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02") + offset
    content[start : start + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("member", "method", "patch", "message"),
    [
        ("a.png", zipfile.ZIP_BZIP2, None, "not compressed by deflate"),
        ("a.png", zipfile.ZIP_LZMA, None, "not compressed by deflate"),
        ("a.png", zipfile.ZIP_DEFLATED, (24, b"\x01\0\x10\0"), "1,048,577 bytes, more than the 1 MiB"),
        ("a.png", zipfile.ZIP_DEFLATED, (24, b"\x65"), "cannot be unpacked .100 of 101"),
        ("a.png", zipfile.ZIP_DEFLATED, (8, b"\x01"), "cannot be unpacked .*encrypted"),
    ],
)
def test_zip_members_that_are_refused(tmp_path, monkeypatch, member, method, patch, message):
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, bytes(100), method)
    if patch:
        patched(path, *patch)
    with source_at(path) as source, pytest.raises(ImageError, match=message):
        source.content(0)


def test_packed_again_at_the_resolution_that_is_chosen_by_size(packed, tmp_path):
    with source_at(packed) as source:
        assert (source.classes, source.spec) == (CLASSES, ImageSpec(3, 8, 8))
        assert source.labels().tolist() == [index % 3 for index in range(20)]
        images = contents(source)
        summary = pack(source, tmp_path / "new.lmdb", size=4)
    assert summary.meta.histogram == [7, 7, 6]
    np.testing.assert_array_equal(np.stack(images).transpose(0, 3, 1, 2), sample_images(20))
    assert LMDBReader(tmp_path / "new.lmdb").resolution == 4
    pack_arrays(tmp_path / "x.lmdb", sample_images(3, side=16), smallest=4)
    for size, side in ((None, 16), (4, 4), (8, 8), (16, 16), (6, 16)):
        with source_at(tmp_path / "x.lmdb", size=size) as source:
            assert source.spec.size == (side, side) == contents(source)[0].shape[:2]
            assert contents(source)[2].shape == (side, side, 3)


def test_damaged_packed_image_is_named(tmp_path, small_blocks):
    images = sample_images(9)
    pack_arrays(tmp_path / "x.lmdb", images)
    flip(tmp_path / "x.lmdb", images[6].tobytes())
    with source_at(tmp_path / "x.lmdb") as source:
        item_refused(source, 6, "is damaged")
        assert source.item_name(6).endswith("x.lmdb: record 6")
        for index in (2, 5, 7, 8):  # of other blocks, and beside it
            np.testing.assert_array_equal(source.content(index), images[index].transpose(1, 2, 0))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_manifest(tmp_path, delimiter, encoding):
    text = f'Label,PATH,note\r\nübel,deep/c.png,x\r\n\r\n"a ""b""",{tmp_path}/a.png,\r\nübel,b.png,y\r\n'
    where = manifest(tmp_path, text.replace(",", delimiter), encoding)
    with open_source(where) as source:
        assert source.classes == ['a "b"', "übel"]
        assert source.labels().tolist() == [1, 0, 1]
        assert contents(source)[0] == (tmp_path / "deep" / "c.png").read_bytes()
        assert source.item_name(1) == str(tmp_path / "a.png")
        assert source.problems == []
        (tmp_path / "b.png").unlink()
        item_refused(source, 2, "cannot be read")


def test_manifest_labels_and_split(tmp_path):
    assert open_source(manifest(tmp_path, "path\na.png\n")).classes == []
    source = open_source(manifest(tmp_path, "path,label\na.png,2\nb.png,0\ndeep/c.png,1\n"))
    assert (source.classes, source.labels().tolist()) == (["0", "1", "2"], [2, 0, 1])
    source = open_source(manifest(tmp_path, "path,label\na.png,10\nb.png,9\ndeep/c.png,101\n"))
    assert (source.classes, source.labels().tolist()) == (["9", "10", "101"], [1, 0, 2])
    source = open_source(manifest(tmp_path, "path,label\na.png,10\nb.png,9\ndeep/c.png,x\n"))
    assert (source.classes, source.labels().tolist()) == (["10", "9", "x"], [0, 1, 2])
    where = manifest(
        tmp_path, "path,label,split\na.png,dog,Train\nb.png,cat,val\ndeep/c.png,emu,val\ngone.png,owl,val\n"
    )
    for split, labels in (("train", [1]), ("test", [0, 2])):
        source = open_source(where, split=split)
        assert source.labels().tolist() == labels
        assert (source.classes, len(source.problems)) == (["cat", "dog", "emu"], 1)
    refused(manifest(tmp_path, "path,split\na.png,train\n"), "no test split, only train", split="test")
    refused(manifest(tmp_path, "path\na.png\n"), "has no splits: leave --split out", split="test")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("gone.png,x", r"list\.csv line 3 names .*gone\.png, which is no file$"),
        ("deep,x", r"line 3 names .*deep, which is no file"),
        ("b.png,", r"list\.csv line 3 has no label$"),
        (",x", r"list\.csv line 3 has an empty path$"),
        ("b.png", r"list\.csv line 3 has 1 fields where the header has 2$"),
        ("b.png,x,y", r"line 3 has 3 fields"),
        ("./deep/../a.png,y", r"list\.csv line 3 repeats \./deep/\.\./a\.png of line 2$"),
        ('"b\n.png",x\ngone.png,x', r"list\.csv line 5 names"),
    ],
)
def test_manifest_problems(tmp_path, rows, problem):
    source = open_source(manifest(tmp_path, f"path,label\na.png,x\n{rows}\n"))
    assert len(source) == 1
    assert re.search(problem, str(source.problems[-1]))
    with pytest.raises(UserError, match="fix it, or pass --on-error skip"):
        pack(source, tmp_path / "x.lmdb")
    assert pack(source, tmp_path / "x.lmdb", on_error="skip").meta.count == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column path"),
        ("path,label\n", "has no rows below its header"),
        ("a.png,x\nb.png,y\n", "no column path, its columns are a.png, x"),
        ("text,label\nzz,x\n", r"no column path, its columns are text, label; pass --path-column NAME"),
        ("path,path\na.png,x\n", "a column appears twice"),
        ("path,label\na.png,-1\nb.png,0\n", "line 2: label -1"),
        ("path,split\na.png,trian\n", "column split: 'trian' is no name of a split"),
        ('path,label\n"a.png,x\n', r"list\.csv cannot be read .*CSV in UTF-8"),
        ("path,label\na.png,ü\n", "save it as CSV in UTF-8"),
    ],
)
def test_wrong_csv(tmp_path, text, message):
    refused(manifest(tmp_path, text, "latin-1"), message)


@pytest.mark.parametrize("column", ["path", "file", "filename", "image", "file_name"])
def test_the_usual_names_of_the_column_of_paths(tmp_path, column):
    """J30: `path` alone was known."""
    with open_source(manifest(tmp_path, f"{column};label\ndeep/c.png;dog\nb.png;cat\n")) as source:
        assert (source.classes, source.labels().tolist()) == (["cat", "dog"], [1, 0])
        assert contents(source)[0] == (tmp_path / "deep" / "c.png").read_bytes()
