"""Arrow files as Hugging Face's `save_to_disk` writes them (H24)."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.pack import main, pack
from duetgan.data.sources import open_source, tables
from duetgan.utils.errors import UserError
from duetgan.utils.script import run_cli
from tests.data.sources.source_files import arrow_table, cells, content_of, contents, item_refused, refused

pa = pytest.importorskip("pyarrow")
REPOSITORY = Path(__file__).parents[3]


def arrow(path: Path, table: dict[str, Any], *, names: Sequence[str] = (), rows: int = 2, **options: Any) -> Path:
    """A file as the library writes it: a stream of batches, the features in the schema's metadata."""
    made = arrow_table(table, names)
    path.parent.mkdir(exist_ok=True, parents=True)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, made.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer,
    ):
        writer.write_table(made, max_chunksize=rows)
    return path


def saved(folder: Path, *shards: dict[str, Any], names: Sequence[str] = ()) -> Path:
    """A folder of `Dataset.save_to_disk`."""
    files = [f"data-{n:05d}-of-{len(shards):05d}.arrow" for n in range(len(shards))]
    for name, table in zip(files, shards, strict=True):
        arrow(folder / name, table, names=names)
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set(tmp_path: Path) -> None:
    shards = [{"image": cells(*range(5)), "label": [0, 1, 1, 0, 0]}, {"image": cells(5, 6), "label": [1, 0]}]
    folder = saved(tmp_path / "pets", *shards, names=["dog", "cat"])
    with open_source(str(folder)) as source:
        assert (source.name, source.classes, source.splits, source.ignored) == ("pets", ["dog", "cat"], (), [])
        assert source.labels().tolist() == [0, 1, 1, 0, 0, 1, 0]
        for index in (0, 6, 3, 5, 2, 0):
            assert source.item(index).content == content_of(index)
        assert source.item_name(5) == f"{folder}/data-00001-of-00002.arrow: row 0"
        metas = [pack(source, tmp_path / f"{n}.lmdb", workers=n).meta for n in (0, 2)]
    assert metas[0].content_hash == metas[1].content_hash
    assert metas[0].histogram == [4, 3]
    refused(folder, "pets has no splits: leave --split out", split="test")
    os.remove(folder / "data-00001-of-00002.arrow")
    refused(folder, r"data-00001-of-00002\.arrow is missing, which state\.json names")


def test_a_dictionary_of_data_sets_says_which_split_is_packed(tmp_path, capsys):
    root = tmp_path / "pets"
    saved(root / "train", {"image": cells(1, 2), "label": ["b", "a"]})
    saved(root / "test", {"image": cells(3), "label": ["a"]})
    saved(root / "odd", {"image": cells(4), "label": ["a"]})
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test", "odd"]}))
    assert run_cli(main, [str(root), str(tmp_path / "x.lmdb"), "--workers", "0"]) == 0
    assert f"{root}: its split train is packed; others: --split odd or test" in capsys.readouterr().err
    assert run_cli(main, [str(root), str(tmp_path / "y.lmdb"), "--workers", "0", "--split", "test"]) == 0
    assert "its split" not in capsys.readouterr().err
    with open_source(str(root), split="val") as source:  # test stands for it, as everywhere
        assert (source.name, contents(source)) == ("pets test", [content_of(3)])
    shutil.rmtree(root / "test")
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    refused(root, "has no test split, only train: pass another --split", split="test")


def test_single_files_and_columns_of_bytes(tmp_path: Path) -> None:
    table = {"img": [content_of(1), content_of(2), content_of(3)], "fine_label": ["cafe\u0301", "caf\u00e9", "b"]}
    path = arrow(tmp_path / "x.arrow", table)
    with open_source(str(path)) as source:
        assert (source.classes, source.labels().tolist()) == (["b", "caf\u00e9"], [1, 1, 0])
        assert "written in two ways" in source.remarks[1]
        assert contents(source) == table["img"]
    assert open_source(str(path), label_column="none").classes == []
    made = pa.table(table)
    with pa.OSFile(str(tmp_path / "y.arrow"), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
        writer.write_table(made)
    assert contents(open_source(str(tmp_path / "y.arrow"))) == table["img"]  # the kind with an index
    (tmp_path / "cache").mkdir()
    for split in ("train", "validation"):
        shutil.copy(path, tmp_path / "cache" / f"{split}-00000-of-00001.arrow")
    assert open_source(str(tmp_path / "cache")).splits == ("train", "validation")


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "names no files in _data_files"),
        ([], "is no JSON object"),
        ({"_data_files": [{"filename": "../secret.arrow"}]}, "names no files"),
        ({"_data_files": [{"filename": 3}]}, "names no files"),
        ({"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i"}]}, "flatten_indices"),
    ],
)
def test_a_state_that_cannot_be_followed(tmp_path: Path, state: Any, told: str) -> None:
    arrow(tmp_path / "secret.arrow", {"image": cells(1)})
    arrow(tmp_path / "x" / "a.arrow", {"image": cells(1)})
    (tmp_path / "x" / "state.json").write_text(json.dumps(state))
    refused(tmp_path / "x", told)


def test_what_could_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nulls = arrow(tmp_path / "nulls.arrow", {"image": pa.array([b"x"] * 9), "n": pa.nulls(9)})
    content = nulls.read_bytes()
    nulls.write_bytes(content.replace(struct.pack("<q", 2), struct.pack("<q", 1 << 40)))
    refused(nulls, r"cannot be read|says that it holds")
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    big = {"image": [np.random.default_rng(0).bytes(2 << 20), b"x"]}
    with open_source(str(arrow(tmp_path / "big.arrow", big))) as source:
        item_refused(source, 0, "more than the 1 MiB for an image file")
        assert source.item(1).content == b"x"


def test_compressed_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read; one that unpacks to more than the memory of the process that reads is refused."""
    table = {"image": cells(1, 2), "label": pa.array(["b", "a"]).dictionary_encode()}
    path = arrow(tmp_path / "x.arrow", table, compression="zstd")
    with open_source(str(path)) as source:
        assert (contents(source), source.classes) == ([content_of(1), content_of(2)], ["a", "b"])
        monkeypatch.setattr(tables, "_child", tables._Child())
        monkeypatch.setattr(tables, "available_bytes", lambda: 300 << 20)
        bomb = arrow(tmp_path / "bomb.arrow", {"image": [bytes(32 << 20)] * 6}, compression="zstd", rows=6)
        assert bomb.stat().st_size < 100_000
        refused(bomb, r"bomb\.arrow cannot be read \([^\n]+\); copy or get it")
        assert contents(source) == [content_of(1), content_of(2)]  # and reading goes on


def test_damage_never_ends_the_process(tmp_path: Path) -> None:
    """Offsets that lead out of a batch are found before they are followed; 300 files in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.sources.test_arrow", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == 300
    assert set(outcomes) <= {"read", "told"}
    assert outcomes["told"] > 30


def try_damage(folder: Path) -> dict[str, int]:
    """How often a damaged file was read, or refused in one line."""
    table = {"image": cells(*range(6)), "label": [0, 1, 2, 1, 2, 0]}
    path = arrow(folder / "x.arrow", table, names=["a", "b", "c"])
    content, draw, outcomes = path.read_bytes(), random.Random(0), Counter[str]()
    for _ in range(300):
        at = 4 * draw.randrange(len(content) // 4)
        odd = draw.choice((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0", draw.randbytes(4)))
        path.write_bytes(content[:at] + odd + content[at + 4 :])
        try:
            with open_source(str(path)) as source:
                contents(source)
            outcomes["read"] += 1
        except (UserError, ImageError) as error:
            outcomes["lines" if "\n" in str(error) else "told"] += 1
    return outcomes


if __name__ == "__main__":
    print(json.dumps(try_damage(Path(sys.argv[1]))))
