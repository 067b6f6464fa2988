"""Label files as Kaggle, fastai, Keras, torchvision and Hugging Face users have them (D2 to D5, D9, D10):
each is read as it is meant, or refused with the option that settles it.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.lmdb.format import multi_hot
from duetgan.data.packing.sources import Source
from tests.data.conftest import save, source_at
from tests.data.packing.sources.source_files import cells, content_of, parquet, refused
from tests.data.packing.sources.test_sources import zipped
from tests.data.packing.sources.test_tars import samples, tar

AB = "a.png b.png"
KINDS = ("folder", "zip")
USAGE = "path,label,Usage\na.png,x,Training\nb.png,y,PublicTest\nc.png,x,PrivateTest\n"
FOLDS = "path,label,fold\na.png,x,0\nb.png,y,1\nc.png,x,2\n"

# the file and its text, the images that are there, the options; the images that are read with their labels, or "!" and
# the refusal; what is said
CASES: dict[str, tuple[str, str, str, dict[str, str], str, str]] = {
    "kaggle ids": (
        *("train.csv", "id,label\n1,cat\n2,dog\n", "train/1.jpg train/2.jpg", {"root": "train", "suffix": "jpg"}),
        *("1.jpg:cat 2.jpg:dog", ""),
    ),
    "kaggle ids, suffix": (
        *("train.csv", "image_id,diagnosis\n1,0\n2,2\n3,2\n4,0\n", "1_s.png 2_s.png 3_s.png 4_s.png 1.jpg"),
        *({"suffix": "_s.png", "label_column": "diagnosis"}, "1_s.png:0 2_s.png:2 3_s.png:2 4_s.png:0", ""),
    ),
    "no such files": ("x.csv", "id,label\n7,cat\n", AB, {}, "!/7, which is no file; pass --root .* and --suffix", ""),
    "kaggle usage": ("x.csv", USAGE, f"{AB} c.png", {}, "a.png:x", 'split from column "Usage"$'),
    "kaggle usage, all": ("x.csv", USAGE, f"{AB} c.png", {"split_column": "none"}, "a.png:x b.png:y c.png:x", ""),
    "kaggle folds": ("x.csv", FOLDS, f"{AB} c.png", {}, "a.png:x b.png:y c.png:x", ""),
    "kaggle folds, held out": ("x.csv", FOLDS, f"{AB} c.png", {"split_column": "Fold=1,2"}, "a.png:x", "fold"),
    "no name of a split": ("x.csv", FOLDS, AB, {"split_column": "fold"}, "!column fold: '0' is no name of a split", ""),
    "a split, no labels": ("x.csv", "path,set\na.png,Train set\nb.png,dev\n", AB, {"split": "val"}, "b.png:", "set"),
    "one label": ("x.csv", 'path,label\na.png,x|y\nb.png,"x, y"\n', AB, {}, "a.png:x|y b.png:x, y", ""),
    "several": (
        "x.csv",
        'path,label\na.png,"cat, dog"\nb.png,\n',
        AB,
        {"label_separator": ","},
        "a.png:cat+dog b.png:",
        "",
    ),
    "tsv": (
        "x.tsv",
        "file\tlabel\twords\ns\\a.png\tcat\ta, b, c\nb.png\tdog\td\n",
        "s/a.png b.png",
        {},
        "s/a.png:cat b.png:dog",
        "",
    ),
}


def read(source: Source) -> list[tuple[str, str]]:
    """Return the names of the images, and their labels."""
    numbers = source.labels()
    hot = np.eye(len(source.classes), dtype=bool)[numbers] if source.classes and source.label_sets is None else None
    if source.label_sets is not None:
        hot = multi_hot(source.label_sets, len(source.classes))[numbers] > 0
    found = []
    for index in range(len(source)):
        names = [] if hot is None else [source.classes[place] for place in np.flatnonzero(hot[index])]
        found.append((source.stored_name(index), "+".join(names)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_label_files(tmp_path, case):
    file, text, images, options, expected, said = CASES[case]
    for name in images.split():
        save(tmp_path / name)
    (tmp_path / file).write_text(text)
    options = {name: str(tmp_path / value) if name == "root" else value for name, value in options.items()}
    if expected.startswith("!"):
        refused(tmp_path / file, expected[1:], **options)
        return
    with source_at(tmp_path / file, **options) as source:
        found = " ".join(map(":".join, read(source)))
        assert (found, list(map(str, source.problems))) == (expected, [])
    assert bool(source.remarks) == bool(said), source.remarks
    assert not said or re.search(said, "\n".join(source.remarks), re.MULTILINE), source.remarks


IMAGES = {"image": cells(1, 2, 3)}


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        (IMAGES | {"label": ["x|y", "x", ""]}, {"label_separator": "|"}, "x+y x -"),
        (IMAGES | {"tags": [["x", "y"], ["x"], []]}, {}, "x+y x -"),
        (IMAGES | {"label": ["x", "y", "z"], "other": [[1], [], None]}, {}, "x y z"),
    ],
)
def test_parquet_and_tars_have_the_same_rules(tmp_path, columns, options, expected):
    notes = {name: values for name, values in columns.items() if name != "image"}
    rows = [json.dumps(dict(zip(notes, row, strict=True))) for row in zip(*notes.values(), strict=True)]
    files = [parquet(tmp_path / "x.parquet", columns), tar(tmp_path / "x.tar", samples(*rows, suffix="json"))]
    for file in files:
        with source_at(file, **options) as source:
            labels = [label or "-" for _, label in read(source)]
            assert (" ".join(labels), source.problems) == (expected, [])


def arranged(folder: Path, kind: str, files: dict[str, str]) -> Path:
    """A folder or zip of small images and texts, by the files' names."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode() or content_of(len(name)))
    return folder if kind == "folder" else zipped(folder, folder.with_suffix(".zip"))


def stylegan(**labels: object) -> str:
    return json.dumps({"labels": [[f"0\\{name}.png", label] for name, label in labels.items()]})


# folder or zip; the files, without a text images; the options; as CASES
PLACES: list[tuple[str, dict[str, str], dict[str, str], str]] = [
    *((kind, {"0/a.png": "", "0/b.png": "", "dataset.json": stylegan(a=1, b=0)}, {}, "1 0") for kind in KINDS),
    *(
        (kind, {"my/0/a.png": "", "my/0/b.png": "", "my/dataset.json": stylegan(a="x", b="y")}, {}, "x y")
        for kind in KINDS
    ),
    ("zip", {"x/my/0/a.png": "", "x/my/dataset.json": stylegan(a=["x", "y"])}, {}, "x+y"),
    ("zip", {"my/0/a.png": "", "my/dataset.json": stylegan(a="x", b="y")}, {}, "!names my/0/b.png, which is not there"),
    (
        "zip",
        {"my/0/a.png": "", "my/0/b.png": "", "my/dataset.json": stylegan(a="x")},
        {},
        "!has no label for my/0/b.png",
    ),
    ("folder", {"my/a.png": "", "cat/c.png": "", "my/dataset.json": "[]"}, {"classes_from": "top"}, "cat my"),
    ("folder", {"images/a.png": "", "labels.csv": "a"}, {"classes_from": "top"}, "images"),
    ("folder", {"cat/a.png": "", "notes.csv": "a"}, {}, "cat"),
    ("folder", {"train_images/a.png": "", "test_images/b.png": ""}, {}, ""),
    ("zip", {"cat\\a.png": "", "dog\\b.png": ""}, {}, "cat dog"),
]


@pytest.mark.parametrize("case", range(len(PLACES)))
def test_places_of_labels_and_names(tmp_path, case):
    """D1, D7, D9 and D10: `dataset.json` below the root, tables beside folders, dots and backslashes in names."""
    kind, files, options, expected = PLACES[case]
    where = arranged(tmp_path / "x", kind, files)
    if expected.startswith("!"):
        refused(where, expected[1:], **options)
        return
    with source_at(where, **options) as source:
        assert (" ".join(labels for _, labels in read(source)), source.problems) == (expected, [])
        assert isinstance(source.content(0), bytes)
