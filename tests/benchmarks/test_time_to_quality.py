"""Time to quality on untrained runs: distances are evaluate.py's, rows that are there count, nothing is made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_to_quality as benchmark
from duetgan.commands import evaluate
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.metrics.conftest import gan_run, pack, read_json

STEPS = (10, 20, 30)
N = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of different networks, and rows of 160 images every 5 steps, at 16 and then 32 a second."""
    folder = tmp_path_factory.mktemp("quality")
    data = {"path": str(pack(folder / "train.lmdb", seed=1)), "val_path": str(pack(folder / "test.lmdb", seed=2))}
    for step in STEPS:
        gan_run(folder / "run", step=step, seed=step, data=data)
    rates = {5: 16, 15: 16, 40: 32}
    rows: list[dict[str, Any]] = [
        {"step": step, "images": 32 * step, "images_per_second": rate} for step, rate in rates.items()
    ]
    rows.insert(1, {"step": 10, "val/n": N, "val/frechet/pixels": 0.5})
    rows.append({"step": 20, "val/n": N + 1, "val/frechet/pixels": 0.4})  # before it was resumed, say
    (folder / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "run"


def printed(capsys, *argv) -> tuple[dict[str, Any], str]:
    benchmark.main([*map(str, argv), "--extractor", "pixels", "--n", str(N), "--json"])
    *text, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(text)


def test_the_first_step_within_a_multiple_by_the_figures_of_evaluate(run, tmp_path, capsys):
    for step in STEPS[:2]:
        options = ["--checkpoint", run / "checkpoints" / f"step-{step:08d}.pt", "--extractor", "pixels", "--n", N]
        options += ["--searched", 0, "--out", tmp_path / str(step)]
        assert run_cli(evaluate.main, [str(option) for option in options]) == 0
    rows = [read_json(tmp_path / str(step) / "metrics.json")["distances"][0] for step in STEPS[:2]]
    distances, floor = [row["frechet"] for row in rows], rows[0]["floor"]
    assert distances[1] < distances[0]
    multiples = [distances[0] / floor * 1.0001, distances[1] / floor * 1.0001, 1e-6]
    capsys.readouterr()
    found, text = printed(capsys, run, "--multiples", *multiples)
    assert found["extractor"] == "pixels"
    assert {"load_1min_before", "cores", "seed"} < found.keys()
    assert found[f"{run}/floor"] == pytest.approx(floor)
    assert (found[f"{run}/steps_known"], found[f"{run}/n"]) == (3, N)
    first = f"{run}/{multiples[0]:g}x"
    assert (found[f"{first}_images"], found[f"{first}_seconds"]) == (320, 20)
    assert found[f"{first}_not_yet_images"] == 0
    never = f"{run}/{multiples[2]:g}x"
    assert (found[f"{never}_images"], found[f"{never}_seconds"]) == (None, None)
    assert found[f"{never}_not_yet_images"] == 960
    assert f"not reached; best {found[f'{run}/best_multiple_ratio']:.2f} after" in text
    assert found[f"{run}/{multiples[1]:g}x_images"] == 640
    assert found[f"{run}/{multiples[1]:g}x_not_yet_images"] == 320


def test_seconds_are_those_of_the_rows():
    rows: list[dict[str, Any]] = [{"step": 5, "images": 160, "images_per_second": 16}]
    rows += [{"step": 6}, {"step": 10, "images": 320}]
    rows += [{"step": 20, "images": 640, "images_per_second": 32}, {"step": 20, "val/frechet/pixels": 1.0}]
    course = benchmark.Course({5: 9.0, 20: 3.0, 30: 4.0}, 1.0, 40, 0, benchmark.clock_of(rows))
    assert [course.when(step) for step in (0, 5, 20)] == [(0, 0.0), (160, 10.0), (640, 25.0)]
    assert [course.reached(multiple) for multiple in (9, 4, 3, 2)] == [(5, None), (20, 5), (20, 5), (None, 30)]
    with pytest.raises(UserError, match="images_per_second"):
        benchmark.clock_of([{"step": 3, "val/frechet/pixels": 1.0}])
