"""The benchmark of saving: every figure is there, and they fit together."""

import pytest

from benchmarks import checkpoint
from tests.end_to_end.helpers import write_config


@pytest.fixture
def options(tmp_path, packed):
    config = write_config(tmp_path / "gan.yaml", "gan", packed)
    counts = ["--every", "10", "--repeats", "2", "--steps", "2"]
    return ["--config", str(config), "--folder", str(tmp_path / "runs"), *counts, "--json"]


def test_every_figure_is_there_and_nothing_is_left(options, tmp_path, last_line):
    result = last_line(checkpoint, options)
    assert (result["every"], result["repeats"], result["steps"]) == (10, 2, 2)
    for mode in ("asynchronous", "synchronous"):
        assert result[f"{mode}_blocked_ms"] > 0
        assert result[f"{mode}_extra_min_ms"] <= result[f"{mode}_extra_ms"] <= result[f"{mode}_extra_max_ms"]
        cost = result[f"{mode}_extra_ms"] / (10 * result["step_ms"])
        assert result[f"{mode}_cost_ratio"] == pytest.approx(cost)
    assert result["checkpoint_cost_ratio"] == result["asynchronous_cost_ratio"]  # what the recipe does
    assert 0.05 < result["checkpoint_mib"] < 10
    assert list((tmp_path / "runs").iterdir()) == []
