"""What is a split, a class, a label: the usual names, and a question where it is unclear (H2, H3)."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from duetgan.commands.pack import main
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import looks_like_labels
from tests.data.conftest import save, source_at, succeed
from tests.data.packing.sources.source_files import cells, manifest, parquet, refused
from tests.data.packing.sources.test_sources import zipped
from tests.data.packing.sources.test_tars import tar


def test_what_looks_like_labels():
    assert looks_like_labels("x", {"id": Counter("abcdefgh"), "same": Counter("aaaaaaaa")}) == []
    assert len(looks_like_labels("x", {"id": Counter("abcdefgh"), "kind": Counter("aabbccdd")})) == 1
    assert looks_like_labels("x", {"kind": Counter("aabbccde")}) == []  # more than one of two is another


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


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_class_folders_below_every_folder_are_asked_for(tmp_path, kind):
    where = folder(tmp_path / "x", *(f"{year}/{label}/{year}.png" for year in (2020, 2021) for label in ("cat", "dog")))
    where = where if kind == "folder" else zipped(where, tmp_path / "x.zip")
    message = (
        r"below every folder \(2020/cat, \.\.\.\): pass --classes-from top for the classes 2020, 2021, or"
        r" --classes-from parent for the classes cat, dog; or give one folder alone, for example .*/2020$"
    )
    refused(where, message)
    for asked, classes, labels in (("top", ["2020", "2021"], [0, 0, 1, 1]), ("parent", ["cat", "dog"], [0, 1, 0, 1])):
        source = source_at(where, classes_from=asked)
        assert (source.classes, source.labels().tolist()) == (classes, labels)


def test_class_folders_below_a_split_are_asked_for_too_but_not_one_in_each_class(tmp_path):
    names = ["/".join(parts) for parts in itertools.product(("train", "test"), "xy", ("cat", "dog"), ["a.png"])]
    refused(folder(tmp_path / "x", *names), r"below every folder \(train/x/cat, ")
    source = source_at(tmp_path / "x", split="test", classes_from="parent")
    assert (source.classes, len(source), source.stored_name(0)) == (["cat", "dog"], 4, "test/x/cat/a.png")
    for place, *files in (
        ("y", "cat/images/a.png", "dog/images/b.png"),
        ("z", "cat/a.png", "dog/x/b.png", "dog/y/c.png"),
    ):
        assert source_at(folder(tmp_path / place, *files)).classes == ["cat", "dog"]


@pytest.mark.parametrize("column", ["class", "category", "target", "label_name", "Labels"])
def test_label_columns_under_other_names(tmp_path, column):
    where = manifest(tmp_path, f"path,{column}\na.png,dog\nb.png,cat\ndeep/c.png,dog\n")
    source = open_source(where)
    assert (source.classes, source.labels().tolist()) == (["cat", "dog"], [1, 0, 1])
    assert source.remarks == [f'{where}: labels from column "{column}", one per image']
    source = open_source(where, label_column="none")
    assert (source.classes, source.remarks) == ([], [])


def test_several_label_columns_are_asked_for(tmp_path, photos):
    where = manifest(tmp_path, "path,target,class\na.png,0,dog\nb.png,1,cat\n")
    refused(where, r"class and target could be labels: pass --label-column class, .*path, target, c")
    assert open_source(where, label_column="class").classes == ["cat", "dog"]
    assert open_source(where, label_column="Target").classes == ["0", "1"]
    refused(where, r"--label-column clas: no such column .did you mean 'class'", label_column="clas")
    where = manifest(tmp_path, "path,label,class\na.png,0,dog\nb.png,1,cat\n")
    assert (open_source(where).classes, open_source(where).remarks) == (["0", "1"], [])
    refused(photos, r"--label-column does not apply to .*photos: leave it out", label_column="x")
    refused("sample", "--classes-from does not apply to sample: leave it out", classes_from="top")
    assert open_source("sample").splits == ("test", "train")


def test_a_column_that_looks_like_labels_is_a_warning(tmp_path, capsys):
    save(tmp_path / "d.png")
    where = manifest(tmp_path, "path,breed,size\na.png,x,0\nb.png,y,1\ndeep/c.png,x,7\nd.png,y,9\n")
    message = (
        f"warning: {where}: packed without labels, although the column breed has 2 values for 4 images; if they are"
        " labels, pass --label-column breed"
    )
    assert open_source(where).remarks == [message]
    succeed(main, where, tmp_path / "x.lmdb")
    assert capsys.readouterr().err.splitlines() == [message]
    assert open_source(where, label_column="breed").classes == ["x", "y"]
    assert open_source(where, label_column="none").remarks == []


@pytest.mark.parametrize("names", [("train/a.png", "test/b.png"), ("images/a.png", "images/b.png")])
def test_a_table_beside_unlabelled_images_is_a_warning(tmp_path, names):
    where = folder(tmp_path / "x", *names)
    (where / "labels.csv").write_text("id,breed")
    for place in (where, zipped(where, tmp_path / "x.zip")):
        (remark,) = source_at(place).remarks
        told = f"warning: {place}: packed without labels, although labels.csv lies there; if it holds"
        assert remark.startswith(told)
    assert source_at(where, classes_from="top").remarks == []
    folder(where, names[0].replace("/", "/cat/"), names[0].replace("/", "/dog/"))
    (where / names[0]).unlink()
    (where / "images" / "b.png").unlink(missing_ok=True)
    assert source_at(where).remarks == []


def test_parquet_labels_under_other_names(tmp_path):
    image = cells(1, 2, 3, 4)
    table = {"image": image, "breed": [1, 0, 1, 1], "size": [1, 1, 2, 2]}
    named = str(parquet(tmp_path / "b.parquet", table, names=["pug", "lab"], columns=["breed"]))
    source = open_source(named)
    assert (source.classes, source.labels().tolist()) == (["pug", "lab"], [1, 0, 1, 1])
    assert 'labels from column "breed", one per image' in source.remarks[0]
    assert open_source(named, label_column="none").classes == []
    plain = str(parquet(tmp_path / "c.parquet", table, rows=4))
    assert open_source(plain, label_column="size").classes == ["1", "2"]
    refused(plain, "--label-column image: no such column", label_column="image")
    columns = {"fine": [1, 0, 1, 1], "coarse": [1, 1, 0, 0]}
    two = parquet(tmp_path / "d.parquet", {"image": image} | columns, names=["pug", "lab"], columns=list(columns))
    refused(two, "fine and coarse could be labels: pass --label-column fine")


def test_classes_in_the_names_of_files(tmp_path):
    names = ("cat.0.jpg", "cat.1.jpg", "guinea_pig_12.png", "guinea_pig_7.png", "dog (3).png", "dog-4.png")
    where = folder(tmp_path / "x", *names)
    (remark,) = source_at(where).remarks
    told = "all names begin with one of 3 words; for the classes cat, dog, guinea_pig pass --classes-from name"
    assert told in remark
    source = source_at(where, classes_from="name")
    assert (source.classes, source.remarks) == (["cat", "dog", "guinea_pig"], [])
    labels = {source.stored_name(index): source.classes[label] for index, label in enumerate(source.labels())}
    assert labels == dict(zip(names, ["cat", "cat", "guinea_pig", "guinea_pig", "dog", "dog"], strict=True))
    folder(where, "77.png")
    refused(where, r"x: 77\.png has no class in its name", classes_from="name")
    split = folder(tmp_path / "y", "train/cat1.png", "train/dog1.png", "test/cat2.png")
    assert source_at(split, classes_from="name").labels().tolist() == [0, 1]
    cameras = "IMG_1 IMG_2 DSC_1 DSC_2"
    for others in (cameras, "1 2 3 4", "a b c d", "cat1 cat2 cat3 cat4", "cat1 cat2 dog1 3"):  # names are no classes
        plain = folder(tmp_path / others, *(f"{name}.png" for name in others.split()))
        assert source_at(plain).remarks == []


def test_h15_two_spellings_of_a_name_are_one_class(tmp_path):
    """As macOS writes names, and as others do: they look the same, and were two classes."""
    one, two = "caf\u00e9", "cafe\u0301"
    for folder in (one, two, "tea"):
        save(tmp_path / "x" / folder / f"{ord(folder[-1])}.png")
    source = source_at(tmp_path / "x")
    assert (source.classes, sorted(source.labels())) == ([one, "tea"], [0, 0, 1])
    for name in (f"{one}.1", f"{two}.2", "tea.3"):
        save(tmp_path / "y" / f"{name}.png")
    assert source_at(tmp_path / "y", classes_from="name").classes == [one, "tea"]
    rows = "".join(f"x/{f}/{ord(f[-1])}.png,{f}\n" for f in (one, two, "tea"))
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    source = source_at(tmp_path / "list.csv")
    assert (source.classes, source.labels().tolist()) == ([one, "tea"], [0, 0, 1])


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
@pytest.mark.parametrize("name", ["unlabelled", "Unlabeled"])
@pytest.mark.parametrize("above", ["", "photos/", "train/"])
def test_a_folder_of_images_without_labels_is_no_class(tmp_path, kind, name, above):
    names = [f"{above}cat/a.png", f"{above}dog/b.png", f"{name}/c.png", f"{name}/deep/d.png"]
    names += ["test/cat/e.png", "test/dog/f.png"] if above == "train/" else []
    where = folder(tmp_path / "x", *names)
    if kind == "zip":
        where = zipped(where, tmp_path / "x.zip")
    elif kind == "tar":
        where = tar(tmp_path / "x.tar", {name: (tmp_path / "x" / name).read_bytes() for name in names})
    with source_at(where) as source:
        assert (source.classes, source.labels().tolist(), source.unlabelled) == (["cat", "dog"], [0, 1], 2)
        assert [source.stored_name(index) for index in range(2)] == names[:2]
        assert source.problems == []
        told = "2 images without labels are left out: --classes-from none packs all without, top makes them a class"
        assert source.remarks == [f"{where}: {told}"]
    with source_at(where, classes_from="none") as source:
        assert (source.classes, sorted(map(source.stored_name, range(len(source))))) == ([], sorted(names))
    refused(where, "--classes-from none takes the images of all splits", classes_from="none", split="train")
    if above != "photos/":
        classes = ["cat", "dog", name] if not above else ["test", "train", name]
        with source_at(where, classes_from="top") as source:
            assert (source.classes, source.unlabelled, source.remarks) == (sorted(classes), 0, [])


def test_images_without_labels_alone_are_a_flat_set_and_beside_loose_ones_still_unclear(tmp_path):
    where = folder(tmp_path / "x", "unlabelled/a.png", "unlabelled/b.png")
    for place, classes in ((where / "unlabelled", []), (where, ["unlabelled"])):
        source = source_at(place)
        assert (source.classes, len(source), source.unlabelled, source.remarks) == (classes, 2, 0, [])
    refused(folder(tmp_path / "y", "a.png", "unlabelled/b.png"), "both at the top")
