"""Parquet files, and Arrow files as Hugging Face's `save_to_disk` writes them (H24), as sources."""

import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import tables
from duetgan.utils.errors import UserError
from tests.data.conftest import flip, save, source_at
from tests.data.packing.sources.source_files import arrow, cells, content_of, contents, item_refused, parquet, refused

pa = pytest.importorskip("pyarrow")
REPOSITORY = Path(__file__).parents[4]


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "IMAGE_ROWS", 2)
    table = {"image": cells(*range(9)), "label": [0, 1, 1] * 3}
    path = parquet(tmp_path / "x.parquet", table, names=["b", "a"], rows=5)
    with source_at(path) as source:
        assert (source.name, source.classes, len(source)) == ("x.parquet", ["b", "a"], 9)
        for index in (0, 8, 3, 4, 5, 1, 0, 7, 6, 2):
            assert source.content(index) == content_of(index)
            assert source.labels()[index] == (0 if index % 3 == 0 else 1)
        assert source.item_name(7) == f"{path}: row 7"
    assert pack(source, tmp_path / "x.lmdb").meta.histogram == [3, 6]


def test_parquet_column_of_bytes_text_labels_and_names_that_no_image_has(tmp_path: Path) -> None:
    table = {"img": [content_of(1), content_of(2), content_of(3)], "label": ["dog", "cat", "dog"], "n": [1, 2, 3]}
    with source_at(parquet(tmp_path / "x.parquet", table)) as source:
        assert (source.classes, source.labels().tolist()) == (["cat", "dog"], [1, 0, 1])
        assert source.content(2) == content_of(3)
    assert source_at(parquet(tmp_path / "y.parquet", {"img": table["img"]})).classes == []
    table = {"image": cells(1, 2, 3, 4), "label": [3, 1, -1, 3]}
    path = parquet(tmp_path / "x.parquet", table, names=["ant", "bee", "cat", "dog", "emu"])
    with source_at(path) as source:
        assert (source.classes, source.labels().tolist()) == (["bee", "dog"], [1, 0, 1])
        assert len(source.problems) == 1
        meta = pack(source, tmp_path / "x.lmdb", on_error="skip").meta
    assert (meta.classes, meta.histogram) == (["bee", "dog"], [1, 2])


def test_parquet_shards(tmp_path):
    folder = tmp_path / "pets"
    shards = {"train-00001-of-00002": {4: "b", 5: "c"}, "train-00000-of-00002": {1: "c", 2: "a", 3: "c"}}
    for name, labels in {**shards, "validation-00000-of-00001": {6: "a"}}.items():
        parquet(folder / f"{name}.parquet", {"image": cells(*labels), "label": list(labels.values())})
    (folder / "README.md").write_text("about")
    with source_at(folder) as source:
        assert (source.classes, source.ignored) == (["a", "b", "c"], ["README.md"])
        assert source.labels().tolist() == [2, 0, 2, 1, 2]
        assert contents(source) == [content_of(shade) for shade in (1, 2, 3, 4, 5)]
        assert source.item_name(3).endswith("train-00001-of-00002.parquet: row 0")
    assert source_at(folder, split="test").content(0) == content_of(6)
    only = folder / "validation-00000-of-00001.parquet"
    assert len(source_at(only)) == len(source_at(only, split="test")) == 1
    (folder / "train-00001-of-00002.parquet").unlink()
    refused(folder, r"train-00001-of-00002\.parquet is missing")
    parquet(folder / "more.parquet", {"image": cells(1)})
    refused(folder, r"names a split, more\.parquet does not")
    save(folder / "cat" / "a.png")
    assert source_at(folder).classes == ["cat"]  # a folder of images with Parquet files beside them


def test_parquet_splits_labels_and_names_that_do_not_fit(tmp_path):
    parquet(tmp_path / "x" / "train.parquet", {"image": cells(1)})
    refused(tmp_path / "x", "has no test split, only train", split="test")
    path = parquet(tmp_path / "y.parquet", {"image": cells(1)})
    refused(path, "has no splits: leave --split out", split="test")
    table = {"image": cells(1, 2), "label": [0, 2]}
    refused(parquet(tmp_path / "x.parquet", table, names=["a", "b"]), "a label is none of its 2 classes")
    bools = table | {"label": [False, True]}
    refused(parquet(tmp_path / "x.parquet", bools, names=["a", "b"]), "a label is none of its 2 classes")
    parquet(tmp_path / "y" / "a.parquet", table, names=["a", "b", "c"])
    parquet(tmp_path / "y" / "b.parquet", {"image": cells(1), "label": ["a"]})
    refused(tmp_path / "y", r"b\.parquet has other columns than a\.parquet")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"left": [b"1"], "right": [b"2"]}, r"left and right could be images.*left .binary., right .binary."),
        ({"file": ["a.png"]}, r"no column holds bytes of images; for paths give a CSV.*columns are file .string"),
        ({"image": [b"1"], "label": [None]}, "no image has a label; give some, or pack without"),
    ],
)
def test_wrong_parquet(tmp_path, table, message):
    refused(parquet(tmp_path / "x.parquet", table), message)


@pytest.mark.parametrize("labels", [["a", None, "b", "", "a"]])
def test_parquet_without_some_labels_and_bytes(tmp_path: Path, labels: list[Any]) -> None:
    rows = [*cells(1, 2, 3, 4), {"bytes": None, "path": "elsewhere.png"}]
    source = source_at(parquet(tmp_path / "x.parquet", {"image": rows, "label": labels}))
    assert [str(problem)[-22:] for problem in source.problems] == [f"et: row {row} has no label" for row in (1, 3)]
    assert source.labels().tolist() == [0, 1, 0]
    assert source.content(1) == content_of(3)
    item_refused(source, 2, "holds no bytes, perhaps only a path")
    assert source.item_name(2).endswith("row 4")


@pytest.fixture
def plain(tmp_path):
    """Four images whose bytes stand in the file as they are; a bit of the third is flipped."""

    def write(**options: Any) -> Path:
        options |= {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        path = parquet(tmp_path / "x.parquet", {"image": [content_of(shade) for shade in range(4)]}, **options)
        flip(path, content_of(2), 40)
        return path

    return write


def test_damaged_parquet(plain):
    path = plain()
    source = source_at(path)
    assert source.content(1) == content_of(1)
    for index in (2, 3, 2):
        item_refused(source, index, r"cannot be read.*CRC")
    assert source.content(0) == content_of(0)
    content = path.read_bytes()
    for damaged in (content[:-20], content[:50], b"", b"text" * 10):
        path.write_bytes(damaged)
        refused(path, r"x\.parquet cannot be read")


@pytest.mark.parametrize("rows", [1000, 10])
def test_parquet_memory_is_flat(tmp_path, rows):
    noise = np.random.default_rng(0).integers(0, 256, (1000, 20_000), dtype=np.uint8)
    # Small pages: a page is the least that can be read.
    path = parquet(tmp_path / "x.parquet", {"image": [row.tobytes() for row in noise]}, rows=rows, write_batch_size=16)
    source = source_at(path)
    tracemalloc.start()
    for index in range(1000):
        assert source.content(index) == noise[index].tobytes()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6 << 20  # the file holds 20 MB


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    refused(tmp_path / "x.parquet", "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow")


def test_a_saved_data_set(tmp_path):
    """Folders of `Dataset.save_to_disk`: one, and one for each split of a dictionary."""
    shards = [{"image": cells(*range(5)), "label": [0, 1, 1, 0, 0]}, {"image": cells(5, 6), "label": [1, 0]}]
    folder = tmp_path / "pets" / "train"
    for number, shard in enumerate(shards):
        arrow(folder / f"data-{number:05d}-of-00002.arrow", shard, names=["dog", "cat"])
    for name in ("state.json", "dataset_info.json", "../dataset_dict.json"):
        (folder / name).write_text("{}")
    with source_at(folder) as source:
        assert (source.name, source.classes, source.splits) == ("train", ["dog", "cat"], ())
        assert source.labels().tolist() == [0, 1, 1, 0, 0, 1, 0]
        for index in (0, 6, 3, 5, 2, 0):
            assert source.content(index) == content_of(index)
        assert source.item_name(5) == f"{folder}/data-00001-of-00002.arrow: row 0"
        metas = [pack(source, tmp_path / f"{n}.lmdb", workers=n).meta for n in (0, 2)]
    assert metas[0].content_hash == metas[1].content_hash
    assert metas[0].histogram == [4, 3]
    refused(folder, "train has no splits: leave --split out", split="test")
    os.remove(folder / "data-00001-of-00002.arrow")
    refused(folder, r"data-00001-of-00002\.arrow is missing beside")


def test_single_files_and_columns_of_bytes(tmp_path: Path) -> None:
    table = {"img": [content_of(1), content_of(2), content_of(3)], "label": ["cafe\u0301", "caf\u00e9", "b"]}
    path = arrow(tmp_path / "x.arrow", table)
    with source_at(path) as source:
        assert (source.classes, source.labels().tolist()) == (["b", "caf\u00e9"], [1, 1, 0])
        assert contents(source) == table["img"]
    assert source_at(path, label_column="none").classes == []
    (tmp_path / "cache").mkdir()
    for split in ("train", "validation"):
        shutil.copy(path, tmp_path / "cache" / f"{split}-00000-of-00001.arrow")
    assert source_at(tmp_path / "cache").splits == ("train", "validation")


def test_what_could_fill_the_memory_is_refused(tmp_path, monkeypatch):
    nulls = arrow(tmp_path / "nulls.arrow", {"image": pa.array([b"x"] * 9), "n": pa.nulls(9)})
    nulls.write_bytes(nulls.read_bytes().replace(struct.pack("<q", 2), struct.pack("<q", 1 << 40)))
    refused(nulls, r"cannot be read|says that it holds")
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    big = {"image": [np.random.default_rng(0).bytes(2 << 20), b"x"]}
    with source_at(arrow(tmp_path / "big.arrow", big)) as source:
        item_refused(source, 0, "more than the 1 MiB for an image file")
        assert source.content(1) == b"x"


def test_the_limit_of_memory_is_lifted_after_blocks_of_two_threads():
    from duetgan.data.packing.sources.table_files import limited

    before = resource.getrlimit(resource.RLIMIT_DATA)
    entered, first_ended = threading.Event(), threading.Event()

    def second_block() -> None:
        with limited():
            entered.set()
            first_ended.wait()

    thread = threading.Thread(target=second_block)
    with limited():
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
        thread.start()
        entered.wait(0.3)
    first_ended.set()
    thread.join()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


OPEN_WITH_300_MIB = """
import sys
from duetgan.data.packing.sources import open_source, table_files
table_files.available_bytes = lambda: 300 << 20
open_source(sys.argv[1])
"""


def test_compressed_batches(tmp_path):
    """They are read; one that unpacks to more than half of the available memory is refused."""
    table = {"image": cells(1, 2), "label": pa.array(["b", "a"]).dictionary_encode()}
    with source_at(arrow(tmp_path / "x.arrow", table, compression="zstd")) as source:
        assert (contents(source), source.classes) == ([content_of(1), content_of(2)], ["a", "b"])
    bomb = arrow(tmp_path / "bomb.arrow", {"image": [bytes(32 << 20)] * 6}, compression="zstd", rows=6)
    assert bomb.stat().st_size < 100_000
    # in a process that holds no freed memory
    command = [sys.executable, "-c", OPEN_WITH_300_MIB, str(bomb)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"duetgan.utils.errors.UserError: {bomb} cannot be read (")
    assert last.endswith("; copy or get it again")


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_damage_never_ends_the_process(tmp_path, count):
    """Offsets that lead out of a batch are found before they are followed; the files are read in another process."""
    command = [sys.executable, "-m", "tests.data.packing.sources.test_tables", str(tmp_path), str(count)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == count
    assert set(outcomes) <= {"read", "told"}
    assert outcomes["told"] > count // 8


def try_damage(folder: Path, count: int) -> dict[str, int]:
    """How often a damaged file was read, or refused in one line."""
    table = {"image": cells(*range(6)), "label": [0, 1, 2, 1, 2, 0]}
    path = arrow(folder / "x.arrow", table, names=["a", "b", "c"])
    content, draw, outcomes = path.read_bytes(), random.Random(0), Counter[str]()
    for _ in range(count):
        at = 4 * draw.randrange(len(content) // 4)
        odd = draw.choice((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0", draw.randbytes(4)))
        path.write_bytes(content[:at] + odd + content[at + 4 :])
        try:
            with source_at(path) as source:
                contents(source)
            outcomes["read"] += 1
        except (UserError, ImageError) as error:
            outcomes["lines" if "\n" in str(error) else "told"] += 1
    return outcomes


if __name__ == "__main__":
    print(json.dumps(try_damage(Path(sys.argv[1]), int(sys.argv[2]))))
