"""`train.py --profile N`: what it prints and writes, and that it leaves the training as it was."""

import gzip
import json

import pytest

from duetgan.training.engine.profile import WARM_UP
from tests.end_to_end.helpers import check_same, status, train_in_process, write_config
from tests.training.engine.test_profile import phases_of

pytestmark = pytest.mark.usefixtures("slim_module")


@pytest.mark.parametrize("task", [pytest.param("gan", marks=pytest.mark.slow), "classifier"])
def test_profiled_and_resumed_equals_straight(tmp_path, packed, task, capsys):
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    straight, profiled = tmp_path / "straight", tmp_path / "profiled"
    often = ["--log.every", "2"]  # so that figures wait for their row when the measuring begins
    assert train_in_process(config, straight, *often) == 0
    capsys.readouterr()
    assert train_in_process(config, profiled, *often, "--profile", "2") == 0
    summary = (profiled / "profile" / "summary.txt").read_text()
    out = capsys.readouterr()
    assert out.out == summary

    assert status(profiled, "state", "step", "reason") == ("stopped", WARM_UP + 2, "profile")
    shares = {name: share for name, (_, share) in phases_of(summary).items()}
    assert shares.pop("step") == 100
    assert sum(shares.values()) == pytest.approx(100, abs=0.1 * len(shares))
    parts = {"gan": {"generator/forward", "discriminator/backward", "generator/optimizer"}, "classifier": {"optimizer"}}
    assert {"data", "ema", "other/host"} | parts[task] <= shares.keys()
    assert shares["other/host"] < 60
    assert f"{task}: steps {WARM_UP} to {WARM_UP + 1}" in summary
    assert "aten::convolution_backward" in summary
    with gzip.open(profiled / "profile" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "user_annotation"].count("step") == 2

    assert train_in_process(config, profiled, *often) == 0
    check_same(straight, profiled, 8)


def test_too_little_of_a_resumed_run_is_left(tmp_path, packed, capsys):
    config, run = write_config(tmp_path / "recipe.yaml", "gan", packed), tmp_path / "run"
    assert train_in_process(config, run, "--max-steps", "4") == 0
    before = (run / "status.json").read_bytes()
    assert train_in_process(config, run, "--profile", "2") == 2
    assert "but 4 of 8 are left" in capsys.readouterr().err
    assert (run / "status.json").read_bytes() == before
