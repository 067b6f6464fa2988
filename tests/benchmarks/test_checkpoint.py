"""The benchmark of saving at a tiny size: every figure it promises is there, and they fit together."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import checkpoint as benchmark
from duetgan.utils.errors import UserError
from tests.end_to_end.helpers import write_config


@pytest.fixture
def options(tmp_path: Path, packed: Path) -> list[str]:
    config = write_config(tmp_path / "gan.yaml", "gan", packed)
    counts = ["--every", "10", "--repeats", "2", "--steps", "2"]
    return ["--config", str(config), "--folder", str(tmp_path / "runs"), *counts, "--json"]


def test_every_figure_is_there_and_nothing_is_left(options, tmp_path, last_line):
    result = last_line(benchmark, options)
    assert (result["every"], result["repeats"], result["steps"]) == (10, 2, 2)
    for mode in ("asynchronous", "synchronous"):
        assert result[f"{mode}_blocked_ms"] > 0
        assert result[f"{mode}_extra_min_ms"] <= result[f"{mode}_extra_ms"] <= result[f"{mode}_extra_max_ms"]
        cost = result[f"{mode}_extra_ms"] / (10 * result["step_ms"])
        assert result[f"{mode}_cost_ratio"] == pytest.approx(cost)
    assert result["checkpoint_cost_ratio"] == result["asynchronous_cost_ratio"]  # what the recipe does
    assert 0.05 < result["checkpoint_mib"] < 10
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_cost_is_the_median_of_what_neighbours_differ_by():
    timed = benchmark.Timed(SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    timed.seconds = {"plain": [10.0, 30.0, 20.0], "asynchronous": [11.0, 30.5, 29.0], "synchronous": [12.0, 32.0, 22.0]}
    timed.blocked = {"plain": [0.0] * 3, "asynchronous": [0.1, 0.3, 0.2], "synchronous": [1.0, 2.0, 3.0]}
    found = timed.result(steps=10, every=500)
    assert found["step_ms"] == 2000
    assert (found["asynchronous_extra_ms"], found["synchronous_extra_ms"]) == (1000, 2000)
    assert (found["asynchronous_blocked_ms"], found["synchronous_blocked_ms"]) == (200, 2000)
    assert found["asynchronous_cost_ratio"] == pytest.approx(1 / 1000)


def test_a_disk_that_refuses_is_no_cheap_checkpoint_and_counts_are_positive(options, monkeypatch):
    with pytest.raises(UserError, match="must be 1 or more"):
        benchmark.main([*options, "--steps", "0"])
    monkeypatch.setattr("duetgan.training.engine.preflight.check_disk", lambda *_: None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="could not be written; give another --folder"):
        benchmark.main(options)
