"""Parquet files as sources."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.pack import pack
from duetgan.data.sources import open_source, tables
from tests.data.conftest import flip, save
from tests.data.sources.source_files import cells, content_of, contents, item_refused, parquet, refused


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE_ROWS", 2)
    path = parquet(
        tmp_path / "x.parquet", {"image": cells(*range(9)), "label": [0, 1, 1] * 3}, names=["b", "a"], rows=5
    )
    with open_source(str(path)) as source:
        assert (source.name, source.classes, len(source)) == ("x.parquet", ["b", "a"], 9)
        for index in (0, 8, 3, 4, 5, 1, 0, 7, 6, 2):
            assert source.item(index).content == content_of(index)
            assert source.item(index).label == (0 if index % 3 == 0 else 1)
        assert source.item_name(7) == f"{path}: row 7"
    assert pack(source, tmp_path / "x.lmdb").meta.histogram == [3, 6]


def test_parquet_column_of_bytes_and_text_labels(tmp_path: Path) -> None:
    table = {"img": [content_of(1), content_of(2), content_of(3)], "fine_label": ["dog", "cat", "dog"], "n": [1, 2, 3]}
    with open_source(str(parquet(tmp_path / "x.parquet", table))) as source:
        assert (source.classes, source.labels().tolist()) == (["cat", "dog"], [1, 0, 1])
        assert source.item(2).content == content_of(3)
    assert open_source(str(parquet(tmp_path / "y.parquet", {"img": table["img"]}))).classes == []
    numbers = {"img": table["img"], "target": [2, 0, 1]}
    assert open_source(str(parquet(tmp_path / "z.parquet", numbers))).classes == ["0", "1", "2"]


def test_parquet_shards(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    for name, shades, labels in (
        ("train-00001-of-00002", (4, 5), ["b", "c"]),
        ("train-00000-of-00002", (1, 2, 3), ["c", "a", "c"]),
        ("validation-00000-of-00001", (6,), ["a"]),
    ):
        parquet(folder / f"{name}.parquet", {"image": cells(*shades), "label": labels})
    (folder / "README.md").write_text("about")
    with open_source(str(folder)) as source:
        assert (source.classes, source.ignored) == (["a", "b", "c"], ["README.md"])
        assert source.labels().tolist() == [2, 0, 2, 1, 2]
        assert contents(source) == [content_of(shade) for shade in (1, 2, 3, 4, 5)]
        assert source.item_name(3).endswith("train-00001-of-00002.parquet: row 0")
    assert open_source(str(folder), split="test").item(0).content == content_of(6)
    only = folder / "validation-00000-of-00001.parquet"
    assert len(open_source(str(only))) == len(open_source(str(only), split="test")) == 1
    (folder / "train-00001-of-00002.parquet").unlink()
    refused(folder, r"train-00001-of-00002\.parquet is missing")
    parquet(folder / "more.parquet", {"image": cells(1)})
    refused(folder, r"names a split, more\.parquet does not")
    save(folder / "cat" / "a.png")
    assert open_source(str(folder)).classes == ["cat"]  # a folder of images with Parquet files beside them


def test_parquet_splits_labels_and_names_that_do_not_fit(tmp_path: Path) -> None:
    parquet(tmp_path / "x" / "train.parquet", {"image": cells(1)})
    refused(tmp_path / "x", "has no test split, only train", split="test")
    refused(
        parquet(tmp_path / "y.parquet", {"image": cells(1)}),
        "no splits in its files' names: leave --split out",
        split="test",
    )
    table = {"image": cells(1, 2), "label": [0, 2]}
    refused(parquet(tmp_path / "x.parquet", table, names=["a", "b"]), "labels go up to 2, but there are only 2 classes")
    parquet(tmp_path / "y" / "a.parquet", table, names=["a", "b", "c"])
    parquet(tmp_path / "y" / "b.parquet", table, names=["a", "c", "b"])
    refused(tmp_path / "y", "name their classes differently")
    parquet(tmp_path / "y" / "b.parquet", {"image": cells(1), "label": ["a"]})
    refused(tmp_path / "y", r"b\.parquet: the column label is string, in a\.parquet int64")
    (tmp_path / "hub").mkdir()
    parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", {"image": cells(1), "label": ["a"]})
    (tmp_path / "hub" / "README.md").write_text("about")
    refused(tmp_path / "hub", rf"its Parquet files lie below: give {tmp_path}/hub/data$")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"left": [b"1"], "right": [b"2"]}, r"left and right could be images.*left .binary., right .binary."),
        (
            {"file": ["a.png"]},
            r"no column holds bytes, perhaps only paths: give the folder.*columns are file .string.",
        ),
        ({"image": [b"1"], "labels": [0], "target": [0]}, "labels and target could be labels"),
        ({"image": [b"1"], "label": [0.5]}, "column label is double"),
        ({"image": [b"1"], "label": [1]}, "labels go up to 1, but there are only 1 images"),
        ({"image": [b"1"], "label": [-1]}, "no row has a label"),
    ],
)
def test_wrong_parquet(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    refused(parquet(tmp_path / "x.parquet", table), message)


@pytest.mark.parametrize("labels", [[0, None, 1, -1, 0], ["a", None, "b", "", "a"]])
def test_parquet_without_some_labels_and_bytes(tmp_path: Path, labels: list[Any]) -> None:
    rows = [*cells(1, 2, 3, 4), {"bytes": None, "path": "elsewhere.png"}]
    source = open_source(str(parquet(tmp_path / "x.parquet", {"image": rows, "label": labels})))
    assert [str(problem)[-22:] for problem in source.problems] == [f"et: row {row} has no label" for row in (1, 3)]
    assert source.labels().tolist() == [0, 1, 0]
    assert source.item(1).content == content_of(3)
    item_refused(source, 2, "holds no bytes, perhaps only paths: give the folder of the images, or a CSV")
    assert source.item_name(2).endswith("row 4")


def test_h24_names_that_no_image_has_are_left_out(tmp_path: Path) -> None:
    table = {"image": cells(1, 2, 3, 4), "label": [3, 1, -1, 3]}
    path = parquet(tmp_path / "x.parquet", table, names=["ant", "bee", "cat", "dog", "emu"])
    with open_source(str(path)) as source:
        assert (source.classes, source.labels().tolist()) == (["bee", "dog"], [1, 0, 1])
        assert source.remarks == ["left out: ant, cat, emu: classes of x.parquet that no image belongs to"]
        assert len(source.problems) == 1
        meta = pack(source, tmp_path / "x.lmdb", on_error="skip").meta
    assert (meta.classes, meta.histogram) == (["bee", "dog"], [1, 2])


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., Path]:
    """Four images whose bytes stand in the file as they are; a bit of the third is flipped."""

    def write(**options: Any) -> Path:
        options |= {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        path = parquet(tmp_path / "x.parquet", {"image": [content_of(shade) for shade in range(4)]}, **options)
        flip(path, content_of(2), 40)
        return path

    return write


def test_damaged_parquet(plain: Callable[..., Path]) -> None:
    path = plain()
    source = open_source(str(path))
    assert source.item(1).content == content_of(1)
    for index in (2, 3, 2):
        item_refused(source, index, r"cannot be read.*CRC")
    assert source.item(0).content == content_of(0)
    content = path.read_bytes()
    for damaged in (content[:-20], content[:50], b"", b"text" * 10):
        path.write_bytes(damaged)
        refused(path, r"x\.parquet cannot be read")


def test_damage_between_pieces_of_a_row_group(plain: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PIECE_ROWS", 1)
    source = open_source(str(plain(rows=4, write_batch_size=1, data_page_size=1)))  # a page for each row
    for index in (0, 1, 2, 2, 3, 1, 2, 0):
        if index < 2:
            assert source.item(index).content == content_of(index)
        else:
            item_refused(source, index, "cannot be read")


@pytest.mark.parametrize("rows", [1000, 10])
def test_parquet_memory_is_flat(tmp_path: Path, rows: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    noise = np.random.default_rng(0).integers(0, 256, (1000, 20_000), dtype=np.uint8)
    # Small pages: a page is the least that can be read.
    path = parquet(tmp_path / "x.parquet", {"image": [row.tobytes() for row in noise]}, rows=rows, write_batch_size=16)
    source, before, most = open_source(str(path)), arrow.total_allocated_bytes(), 0
    for index in range(1000):
        assert source.item(index).content == noise[index].tobytes()
        most = max(most, arrow.total_allocated_bytes() - before)
    assert most < 6 << 20  # the file holds 20 MB


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    refused(tmp_path / "x.parquet", "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow")
