"""Splits and classes of folders, and columns of labels: the usual names, and a question where it is unclear."""

import itertools
from pathlib import Path

import pytest

from duetgan.data.packing.sources import open_source
from tests.data.conftest import save, source_at
from tests.data.packing.sources.source_files import cells, manifest, parquet, refused
from tests.data.packing.sources.test_sources import zipped


def folder(place: Path, *names: str) -> Path:
    for shade, name in enumerate(names):
        save(place / name, shade=5 * shade)
    return place


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize(
    ("train", "test"),
    [
        *[("train", "val"), ("training", "testing"), ("Train", "Test"), ("TRAIN", "Valid")],
        *[("training_set", "test-set"), ("train", "Validation")],
    ],
)
def test_split_folders_under_other_names(tmp_path, kind, train, test):
    where = folder(tmp_path / "x", f"{train}/cat/a.png", f"{train}/dog/b.png", f"{test}/cat/c.png", f"{test}/dog/d.png")
    where = where if kind == "folder" else zipped(where, tmp_path / "x.zip")
    for split, part, names in ((None, train, "ab"), ("train", train, "ab"), ("test", test, "cd"), ("val", test, "cd")):
        source = source_at(where, split=split)
        assert (source.classes, source.splits) == (["cat", "dog"], tuple(sorted([train, test])))
        expected = [f"{part}/{label}/{name}.png" for label, name in zip(source.classes, names, strict=True)]
        assert [source.stored_name(index) for index in range(2)] == expected
        assert source.remarks == []


def test_val_is_val_and_other_folders_beside_splits_are_left_out_and_told(tmp_path):
    three = str(folder(tmp_path / "three", "train/cat/a.png", "test/cat/b.png", "val/cat/c.png"))
    assert [open_source(three, split=split).stored_name(0)[:4] for split in ("test", "val")] == ["test", "val/"]
    where = folder(tmp_path / "x", "train/cat/a.png", "test/cat/b.png", "sample_submission/c.png")
    source = source_at(where)
    assert (source.classes, len(source)) == (["cat"], 1)
    assert source.remarks == ["left out: sample_submission, beside test and train"]
    (where / "sample_submission" / "c.png").unlink()
    (where / "sample_submission" / "list.csv").write_text("id")
    source = source_at(where)
    assert (source.classes, source.ignored, source.remarks) == (["cat"], ["sample_submission/list.csv"], [])
    assert source_at(folder(tmp_path / "y", "train/cat/a.png", "extra.txt/.keep.png")).classes == ["cat"]


def test_a_class_may_be_called_train(tmp_path):
    where = str(folder(tmp_path / "x", "train/a.png", "bus/b.png", "car/c.png"))
    for split in (None, "train"):
        source = open_source(where, split=split)
        assert (source.classes, source.splits) == (["bus", "car", "train"], ())
    refused(where, r"has no split folders: leave --split out .* or add --val-share 0\.1", split="test")


def test_folders_beside_splits_are_classes_if_asked_for(tmp_path):
    where = folder(tmp_path / "x", "train/e.png", "test/f.png", "extra/g.png")
    with source_at(where) as source:
        assert (source.classes, len(source)) == ([], 1)
        assert source.remarks == ["left out: extra, beside test and train"]
    assert source_at(where, classes_from="top").classes == ["extra", "test", "train"]


def test_classes_are_the_folders_at_the_top_or_those_of_the_images(tmp_path: Path) -> None:
    where = folder(tmp_path / "x", *(f"{year}/{label}/{year}.png" for year in (2020, 2021) for label in ("cat", "dog")))
    years = (["2020", "2021"], [0, 0, 1, 1])
    cases = ((None, *years), ("top", *years), ("parent", ["cat", "dog"], [0, 1, 0, 1]))
    for place in (where, zipped(where, tmp_path / "x.zip")):
        for option, classes, labels in cases:
            source = source_at(place, classes_from=option)
            assert (source.classes, source.labels().tolist()) == (classes, labels)
    names = ["/".join(parts) for parts in itertools.product(("train", "test"), "xy", ("cat", "dog"), ["a.png"])]
    source = source_at(folder(tmp_path / "y", *names), split="test", classes_from="parent")
    assert (source.classes, len(source), source.stored_name(0)) == (["cat", "dog"], 4, "test/x/cat/a.png")


@pytest.mark.parametrize("column", ["label", "class", "category", "target", "Labels"])
def test_label_columns_under_other_names(tmp_path: Path, column: str) -> None:
    where = manifest(tmp_path, f"path,{column}\na.png,dog\nb.png,cat\ndeep/c.png,dog\n")
    source = open_source(where)
    assert (source.classes, source.labels().tolist()) == (["cat", "dog"], [1, 0, 1])
    assert source.remarks == ([] if column == "label" else [f'{where}: labels from column "{column}"'])
    source = open_source(where, label_column="none")
    assert (source.classes, source.remarks) == ([], [])


def test_columns_that_are_asked_for(tmp_path: Path, photos: Path) -> None:
    where = manifest(tmp_path, "path,target,class\na.png,0,dog\nb.png,1,cat\n")
    assert open_source(where).classes == ["cat", "dog"]
    assert open_source(where, label_column="Target").classes == ["0", "1"]
    refused(where, r"--label-column clas: no such column .did you mean 'class'", label_column="clas")
    refused(photos, r"--label-column does not apply to .*photos: leave it out", label_column="x")
    refused("sample", "--classes-from does not apply to sample: leave it out", classes_from="top")
    assert open_source("sample").splits == ("test", "train")


def test_parquet_labels_under_other_names(tmp_path: Path) -> None:
    table = {"image": cells(1, 2, 3, 4), "breed": [1, 0, 1, 1], "size": [1, 1, 2, 2]}
    named = str(parquet(tmp_path / "b.parquet", table, names=["pug", "lab"], columns=["breed"]))
    source = open_source(named, label_column="breed")
    assert (source.classes, source.labels().tolist()) == (["pug", "lab"], [1, 0, 1, 1])
    assert (open_source(named).classes, open_source(named, label_column="size").classes) == ([], ["1", "2"])
    refused(named, "--label-column image: no such column", label_column="image")


def test_h15_two_spellings_of_a_name_are_one_class(tmp_path):
    """As macOS writes names, and as others do: they look the same, and were two classes."""
    one, two = "caf\u00e9", "cafe\u0301"
    for folder in (one, two, "tea"):
        save(tmp_path / "x" / folder / f"{ord(folder[-1])}.png")
    source = source_at(tmp_path / "x")
    assert (source.classes, sorted(source.labels())) == ([one, "tea"], [0, 0, 1])
    rows = "".join(f"x/{f}/{ord(f[-1])}.png,{f}\n" for f in (one, two, "tea"))
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    source = source_at(tmp_path / "list.csv")
    assert (source.classes, source.labels().tolist()) == ([one, "tea"], [0, 0, 1])
