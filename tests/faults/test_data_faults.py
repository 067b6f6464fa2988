"""Packed files that are not whole or do not fit, by number in the project's table of faults (14 to 16, 19, 20): the
commands name what is wrong in one line before anything is lost.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import GlobalSampler
from tests.data.conftest import change, flip, sample_images, save, stored
from tests.end_to_end.helpers import last, log_of, status
from tests.faults.conftest import own_process

DRAWN = int(GlobalSampler(200, batch_size=20, seed=0).order(0)[25])  # a record of the second step's batch


def repacked(source: Path, path: Path, encoding: str, damaged: int | None = None) -> Path:
    """The same images in another encoding, with a flipped bit in one."""
    with Dataset(source) as reader:
        images, labels = reader.read(range(len(reader)))
        pack_arrays(path, images, labels, reader.classes, encoding=encoding)
    if damaged is not None:
        flip(path, stored(path, damaged), offset=60)
    return path


def everything_that_reads(recipe: list[str], trained: Path, path: Path) -> list[list[str | Path]]:
    """Commands that are given `path`."""
    return [
        [*recipe, "--data.path", path],
        [*recipe, "--data.val-path", path],
        ["evaluate.py", "--checkpoint", trained, "--data", path],
        ["data.inspect", path],
        ["data.inspect", path, "--verify"],
        ["data.pack", path, path.with_name("again.lmdb")],
    ]


def test_fault_14_truncated_file(command, recipe, trained, packed, tmp_path):
    """A read beyond the end of a mapped file would kill the process."""
    path = tmp_path / "short.lmdb"
    content = (packed / "train.lmdb").read_bytes()
    path.write_bytes(content[: int(0.999 * len(content))])
    for arguments in everything_that_reads(recipe, trained, path):
        command(*arguments).refusal("short.lmdb", "truncated")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["recipe.yaml", "short.lmdb"]
    assert not (trained / "eval").exists()


def test_fault_15_flipped_byte_stops_and_names_the_record(command, recipe, trained, packed, tmp_path):
    path = repacked(packed / "train.lmdb", tmp_path / "x.lmdb", "raw", DRAWN)
    told = f"x.lmdb: record {DRAWN} is damaged"
    command(*recipe, "--data.path", path, "--data.workers", "0").refusal(told, "copy or pack the file again")
    assert status(tmp_path / "run", "state", "exit_code") == ("failed", 2)
    command("evaluate.py", "--checkpoint", trained, "--data", path).refusal(told)
    assert not (trained / "eval").exists()
    outcome = command("data.inspect", path, "--verify", "--json")
    outcome.refusal("1 of 200 records are damaged", f"record {DRAWN} ")
    assert json.loads(outcome.out)["damaged"] == [DRAWN]
    # the same command resumes once the file is whole
    command(*recipe, "--data.path", repacked(packed / "train.lmdb", tmp_path / "whole.lmdb", "raw")).success()
    assert status(tmp_path / "run", "state", "exit_code") == ("finished", 0)


def test_fault_15_flipped_byte_in_one_ranks_held_out_images(recipe, packed, tmp_path):
    """Found by review: one rank saved while the other one added up counts."""
    path = repacked(packed / "test.lmdb", tmp_path / "held-out.lmdb", "png", 70)
    options = ["--evaluation.every", "4", "--log.every", "3", "--procs", "2"]
    outcome = own_process(*recipe, "--data.val-path", path, *options)
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error")]
    assert "held-out.lmdb: record 70 is damaged" in line
    assert line.startswith("error on rank 1: ")
    assert status(tmp_path / "run", "state", "exit_code") == ("failed", 2)
    assert last(tmp_path / "run") == 4


def test_fault_16_file_without_completion_record(command, recipe, trained, packed, tmp_path):
    path = repacked(packed / "train.lmdb", tmp_path / "x.lmdb", "raw")
    change(path, b"complete", None)
    for arguments in everything_that_reads(recipe, trained, path):
        command(*arguments).refusal("x.lmdb was not finished: run duet pack again")
    path.rename(tmp_path / ".x.lmdb.partial")  # as a killed run leaves it
    for arguments in everything_that_reads(recipe, trained, path)[:-1]:
        command(*arguments).refusal("x.lmdb was not finished: run duet pack again")
    assert not (tmp_path / "run").exists()


def test_fault_19_head_of_other_classes(command, recipe, tmp_path):
    told = ("train.lmdb: has 10 classes, labels 0 to 9", "model.classes 5", "make it 10")
    command(*recipe, "--model.classes", "5").refusal(*told)
    assert not (tmp_path / "run").exists()


def test_fault_20_empty_class(command, recipe, tmp_path):
    for name in ("cat/a", "dog/a", "dog/b"):
        save(tmp_path / "photos" / f"{name}.png")
    (tmp_path / "photos" / "emu").mkdir()
    command("data.pack", tmp_path / "photos", tmp_path / "x.lmdb").refusal("emu", "--on-error skip")
    assert not (tmp_path / "x.lmdb").exists()
    outcome = command("data.pack", tmp_path / "photos", tmp_path / "x.lmdb", "--on-error", "skip").success()
    assert "emu" in outcome.out  # named as skipped
    assert LMDBReader(tmp_path / "x.lmdb").classes == ["cat", "dog"]
    pack_arrays(tmp_path / "gap.lmdb", sample_images(20, 1, 16), np.arange(20) % 2 * 2, ["cat", "dog", "emu"])
    command(*recipe, "--data.path", tmp_path / "gap.lmdb").refusal("gap.lmdb: class 'dog' has no image")
    assert not (tmp_path / "run").exists()


def test_evaluation_reads_the_size_that_was_trained_on(command, recipe, tmp_path):
    """A smaller `data.resolution` than the file's 16 px: other figures than the training's own mislead in silence."""
    options = ["--data.resolution", "8", "--steps", "8", "--evaluation.every", "0", "--log.samples-every", "0"]
    command(*recipe, *options).success()
    expected = dict(item for row in log_of(tmp_path / "run") for item in row.items())
    figures = json.loads(command("evaluate.py", "--checkpoint", tmp_path / "run", "--json").success().out)
    assert figures["accuracy"] == pytest.approx(expected["val/accuracy"])
    assert figures["ece"] == pytest.approx(expected["val/ece"], rel=1e-5)  # six digits are logged
