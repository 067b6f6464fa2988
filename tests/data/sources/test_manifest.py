"""CSV manifests as sources."""

import re
from pathlib import Path

import pytest

from duetgan.data.pack import pack
from duetgan.data.sources import open_source
from duetgan.utils.errors import UserError
from tests.data.sources.source_files import contents, item_refused, manifest, refused


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_manifest(tmp_path: Path, delimiter: str, encoding: str) -> None:
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


def test_manifest_labels_and_split(tmp_path: Path) -> None:
    assert open_source(manifest(tmp_path, "path\na.png\n")).classes == []
    source = open_source(manifest(tmp_path, "path,label\na.png,2\nb.png,0\ndeep/c.png,1\n"))
    assert (source.classes, source.labels().tolist()) == (["0", "1", "2"], [2, 0, 1])
    source = open_source(manifest(tmp_path, "path,label\na.png,10\nb.png,9\ndeep/c.png,x\n"))
    assert (source.classes, source.labels().tolist()) == (["10", "9", "x"], [0, 1, 2])
    where = manifest(tmp_path, "path,label,split\na.png,dog,Train\nb.png,cat,val\ngone.png,emu,val\n")
    for split, label, problems in (("train", 1, 0), ("test", 0, 1)):
        source = open_source(where, split=split)
        assert source.labels().tolist() == [label]
        assert (source.classes, len(source.problems)) == (["cat", "dog", "emu"], problems)
    refused(manifest(tmp_path, "path,split\na.png,train\n"), "no test split, only train", split="test")
    refused(manifest(tmp_path, "path\na.png\n"), "no column split: leave --split out", split="test")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("gone.png,x", r"gone\.png is no file .line 3 of list\.csv.$"),
        ("deep,x", r"deep is no file .line 3"),
        ("b.png,", r"list\.csv line 3 has an empty label$"),
        (",x", r"list\.csv line 3 has an empty path$"),
        ("b.png", r"list\.csv line 3 has 1 fields where the header has 2$"),
        ("b.png,x,y", r"line 3 has 3 fields"),
        ("./deep/../a.png,x", r"list\.csv line 3 repeats \./deep/\.\./a\.png of line 2$"),
        ('"b\n.png",x\ngone.png,x', r"line 5 of list"),
    ],
)
def test_manifest_problems(tmp_path: Path, rows: str, problem: str) -> None:
    source = open_source(manifest(tmp_path, f"path,label\na.png,x\n{rows}\n"))
    assert len(source) == 1
    assert re.search(problem, str(source.problems[-1]))
    with pytest.raises(UserError, match="fix it, or pass --on-error skip"):
        pack(source, tmp_path / "x.lmdb")
    assert pack(source, tmp_path / "x.lmdb", on_error="skip").meta.count == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column path, its columns are none"),
        ("path,label\n", "has no rows below its header"),
        ("paht,label\na.png,x\n", r"line 1: no column path .did you mean 'paht'"),
        ("path,lable\na.png,x\n", r"line 1: no column label .did you mean 'lable'"),
        ("path,path\na.png,x\n", "column path appears 2 times"),
        ("path,label\na.png,-1\nb.png,0\n", "line 2: label -1"),
        ("path,label\na.png,7\n", "line 2: label 7; labels are names, or whole numbers from 0 below the 1 images"),
        ("path,label\na.png,x\na.png,y\n", "line 3: a.png has label y, in line 2 x"),
        ("path,split\na.png,train\na.png,test\n", "line 3: a.png has split test, in line 2 train"),
        ("path,split\na.png,trian\n", "line 2: split 'trian' .did you mean 'train'"),
        ('path,label\n"a.png,x\n', "line 2 cannot be read"),
        ("path,label\na.png,ü\n", "is not UTF-8"),
    ],
)
def test_wrong_csv(tmp_path: Path, text: str, message: str) -> None:
    refused(manifest(tmp_path, text, "latin-1"), message)


@pytest.mark.parametrize("column", ["path", "file", "filename", "image"])
def test_the_usual_names_of_the_column_of_paths(tmp_path: Path, column: str) -> None:
    """J30: `path` alone was known."""
    with open_source(manifest(tmp_path, f"{column};label\ndeep/c.png;dog\nb.png;cat\n")) as source:
        assert (source.classes, source.labels().tolist()) == (["cat", "dog"], [1, 0])
        assert contents(source)[0] == (tmp_path / "deep" / "c.png").read_bytes()
