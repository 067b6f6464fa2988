"""Rows 23 and 30 of the fault list: another number of processes, and data that do not divide."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.distributed import collectives
from tests.end_to_end.helpers import contents, write_config
from tests.end_to_end.ranks import printed, run, train, wait
from tests.end_to_end.ranks import start as start_ranks
from tests.slim import slim_down

CLASSES = ["a", "b", "c", "d"]


# --- 23: 1 -> 3 processes, which do not divide the batch. (1 -> 2 -> 4 -> 1 is tests/end_to_end/test_exact_resume.py)


def test_fault_23_processes_that_do_not_divide_the_batch_are_refused(packed, tmp_path):
    config, folder = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"  # batches of 20
    argv = ["--config", str(config), "--run-dir", str(folder)]
    run([*argv, "--max-steps", "2"], tmp_path / "first")
    before, output = contents(folder), tmp_path / "said"
    more = ["--device", "cpu", "--procs", "3"]
    codes = wait(start_ranks(train, str(tmp_path / "notes"), [*argv, *more], None, False, world=3, output=output))
    lines = [line for rank in range(3) for line in printed(output, rank).splitlines()]
    assert set(codes) == {2}, lines
    told = "error: batch_size 20 cannot be shared by 3 processes; make it a multiple of 3"
    assert [line for line in lines if "error" in line or "Traceback" in line] == [told]  # rank 0's alone
    assert contents(folder) == before != {}
    run(argv, tmp_path / "second", world=2)  # the run is as good as it was


# --- 30: an evaluation over images that neither ranks nor batches divide


def evaluate_here(data: str, batch_size: int, out: str) -> int:
    """A rank of the evaluation in a classifier's training; each writes its figures."""
    slim_down()
    collectives.start(torch.device("cpu"))
    tree = {"task": "classifier", "batch_size": 12, "data": {"path": data, "val_path": data}}
    config: Any = build_run_config(tree | {"evaluation": {"batch_size": batch_size}, "seed": 5}, [], "test")
    with Dataset(data) as reader:
        figures = ClassifierTask(config, reader, reader, torch.device("cpu")).evaluate()
    Path(f"{out}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(figures))
    collectives.stop()
    return 0


def test_fault_30_every_image_is_counted_once_by_all_ranks(tmp_path):
    """One chunk of two images, of which some ranks get none; more images: tests/distributed/test_evaluation.py."""
    count, batch_size = 2, 5
    draws = np.random.default_rng(2)
    labels = np.resize([0, 1, 1, 2, 3], count)
    images = (draws.integers(0, 128, (count, 1, 16, 16)) + 32 * labels[:, None, None, None]).astype(np.uint8)
    pack_arrays(tmp_path / "data.lmdb", images, labels=labels, classes=CLASSES[: labels.max() + 1])
    found = []
    for world in (1, 3):
        out = tmp_path / f"world-{world}"
        ranks = start_ranks(evaluate_here, str(tmp_path / "data.lmdb"), batch_size, str(out), world=world, output=out)
        assert set(wait(ranks)) == {0}, printed(out)
        found += [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(world)]
    assert found[0]["accuracy"] * count == pytest.approx(round(found[0]["accuracy"] * count))
    for of_rank in found[1:]:  # all ranks have them all
        assert of_rank == pytest.approx(found[0], abs=1e-6)
