"""Images of several labels or none: CSV and JSON lists, what is packed and shown, how a part is held out."""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from duetgan.commands import inspect as command
from duetgan.data.lmdb.format import Meta
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing import inspect
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import Source
from duetgan.data.packing.split import strata
from duetgan.utils.errors import UserError
from tests.data.conftest import save, source_at

LISTS = [["cat", "dog"], ["cat"], [], ["dog"], ["dog", "cat"], ["bird", "cat", "dog"]]
SETS = [[], [0, 1, 2], [1], [1, 2], [2]]  # of bird, cat, dog
NUMBERS = [3, 2, 0, 4, 3, 1]


def images(place: Path, count: int = len(LISTS)) -> Path:
    for number in range(count):
        save(place / f"{number}.png", shade=9 * number)
    return place


def csv_of(place: Path, cells: list[str], name: str = "list.csv") -> Path:
    images(place, len(cells))
    quoted = ('"' + cell.replace('"', '""') + '"' for cell in cells)
    (place / name).write_text("path,label\n" + "".join(f"{n}.png,{cell}\n" for n, cell in enumerate(quoted)))
    return place / name


def separated(path: Path) -> Source:
    return source_at(path, label_separator=";")


def json_of(place: Path, labels: Sequence[object]) -> Path:
    images(place, len(labels))
    pairs = [[f"{number}.png", label] for number, label in enumerate(labels)]
    (place / "dataset.json").write_text(json.dumps({"labels": pairs}))
    return place


def test_separated_labels_of_a_csv_file_are_sets_of_labels(tmp_path):
    source = separated(csv_of(tmp_path, list(map(" ; ".join, LISTS))))
    assert (source.classes, source.label_sets, source.labels().tolist()) == (["bird", "cat", "dog"], SETS, NUMBERS)
    source.check_classes()


def test_lists_of_dataset_json_hold_numbers_or_names(tmp_path):
    classes = ["bird", "cat", "dog"]
    numbers = [[classes.index(label) for label in labels] for labels in LISTS]
    for lists, names in ((LISTS, classes), (numbers, ["0", "1", "2"])):
        source = source_at(json_of(tmp_path / names[0], lists))
        assert (source.classes, source.label_sets, source.labels().tolist()) == (names, SETS, NUMBERS)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["", ""], "no image has a label; give some, or pack without: --label-column none"),
        (["0;1", "-1"], "label -1; labels are names, or whole numbers from 0"),
    ],
)
def test_odd_lists_of_a_csv_file_are_refused_by_line(tmp_path, cells, words):
    with pytest.raises(UserError, match=words) as refused:
        separated(csv_of(tmp_path, cells))
    assert "\n" not in str(refused.value)


def test_odd_lists_of_dataset_json_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"1.png: label -1; labels are names, or whole numbers from 0"):
        source_at(json_of(tmp_path, [[0], [-1]]))


def test_a_label_twice_or_empty_counts_once(tmp_path):
    source = separated(csv_of(tmp_path, ["cat;dog", "dog;dog;", "e\u0301;\xe9"]))
    assert (source.classes, source.label_sets) == (["cat", "dog", "\xe9"], [[0, 1], [1], [2]])


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_a_packed_file_keeps_sets_and_is_packed_again_the_same(tmp_path, encoding):
    source = separated(csv_of(tmp_path, list(map(";".join, LISTS))))
    first = pack(source, tmp_path / "x.lmdb", encoding=encoding).meta
    assert (first.sets, first.histogram, first.by_class, first.labels) == (SETS, [1, 1, 1, 2, 1], [1, 4, 4], 5)
    hot = first.multi_hot[NUMBERS]
    assert hot.tolist() == [[name in labels for name in first.classes] for labels in LISTS]
    again = pack(source_at(tmp_path / "x.lmdb"), tmp_path / "again.lmdb", encoding=encoding).meta
    assert (again.sets, again.content_hash) == (first.sets, first.content_hash)
    with LMDBReader(tmp_path / "x.lmdb") as reader:
        assert not inspect.verify(reader)
        assert reader.labels().tolist() == NUMBERS


def test_a_set_may_lose_all_images_but_a_class_may_not(tmp_path):
    file = csv_of(tmp_path, list(map(";".join, LISTS)))
    (tmp_path / "1.png").write_text("no image")  # the only cat alone
    summary = pack(separated(file), tmp_path / "x.lmdb", on_error="skip")
    assert summary.meta.histogram == [1, 1, 0, 2, 1]
    (tmp_path / "5.png").write_text("no image")
    with pytest.raises(UserError, match="no image of class bird could be used, 2 skipped"):
        pack(separated(file), tmp_path / "y.lmdb", on_error="skip")


def test_a_file_of_one_label_says_nothing_of_sets(tmp_path):
    meta = pack(source_at(csv_of(tmp_path, ["a", "b", "a"])), tmp_path / "x.lmdb").meta
    assert b"sets" not in meta.to_json()
    assert (meta.labels, meta.by_class, meta.label_names) == (2, [2, 1], ["a", "b"])
    assert np.array_equal(meta.multi_hot, np.eye(2, dtype=bool))


def test_inspect_counts_labels_and_images_with_none_or_several(tmp_path, capsys):
    pack(separated(csv_of(tmp_path, list(map(";".join, LISTS)))), tmp_path / "x.lmdb")
    command.main([str(tmp_path / "x.lmdb"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["labels_an_image"] == {"none": 1, "one": 2, "several": 3}
    assert document["histogram"] == [1, 4, 4]
    assert document["label_sets"][3] == {"labels": ["cat", "dog"], "count": 2}
    command.main([str(tmp_path / "x.lmdb"), "--out", str(tmp_path / "grid.png")])
    text = capsys.readouterr().out
    assert '{"none": 1, "one": 2, "several": 3}' in text


@pytest.mark.parametrize("sets", [[[0, 0]], [[1, 0]], [[3]], [[0], [1]]])
def test_metadata_that_contradicts_itself_is_refused(tmp_path, sets):
    meta = pack(separated(csv_of(tmp_path, ["a;b", "b;c", "a"])), tmp_path / "x.lmdb").meta
    document = json.loads(meta.to_json()) | {"sets": sets, "histogram": [3]}
    with pytest.raises(ValueError, match=r"sets has|histogram has"):
        Meta.from_json(json.dumps(document).encode())


def test_sets_that_are_frequent_are_held_out_evenly_and_rare_ones_together(tmp_path):
    labels = np.repeat(np.arange(5), [20, 10, 9, 1, 1])
    drawn = strata(labels, [[0], [1], [0, 1], [2], []], Fraction(1, 10))
    assert np.array_equal(drawn, np.repeat([0, 1, 5], [20, 10, 11]))
    assert strata(labels, None, Fraction(1, 10)) is labels
    rng = np.random.default_rng(0)
    for number in range(60):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    cells = ["a;b", "a", "", "b", "a"] * 12
    (tmp_path / "l.csv").write_text("path,label\n" + "".join(f"{n}.png,{cell}\n" for n, cell in enumerate(cells)))
    summary = pack(separated(tmp_path / "l.csv"), tmp_path / "x.lmdb", val_share="0.25")
    assert (summary.meta.histogram, summary.held_out.histogram) == ([9, 18, 9, 9], [3, 6, 3, 3])
    assert summary.held_out.sets == summary.meta.sets
    cells = [*["a"] * 40, *(f"a;{number // 2}" for number in range(20))]  # ten sets of two images
    (tmp_path / "l.csv").write_text("path,label\n" + "".join(f"{n}.png,{cell}\n" for n, cell in enumerate(cells)))
    summary = pack(separated(tmp_path / "l.csv"), tmp_path / "y.lmdb", val_share="0.25")
    assert (summary.held_out.count, summary.held_out.histogram[-1]) == (15, 10)
