"""Training that breaks: it stops itself, and goes on from its last sound checkpoint."""

import json

import pytest

from tests.end_to_end.helpers import log_of, status, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")


def test_training_that_breaks_stops_itself(tmp_path, packed, capsys):
    """Non-finite gradients are masked, counted and, past the cap, end the run with exit code 4."""
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    broken = ["--steps", "40", "--optimizer.lr", "1e18", "--nonfinite-cap", "5", "--checkpoint.every", "10"]
    assert train_in_process(config, run, *broken, "--evaluation.every", "4") == 4
    assert "evaluation at step 4 failed" in capsys.readouterr().err
    assert train_in_process(config, run, *broken, "--evaluation.every", "0") == 4
    assert "non-finite gradients" in capsys.readouterr().err
    assert status(run, "state", "exit_code") == ("failed", 4)
    row = log_of(run)[-1]
    assert row["nonfinite_updates"] > 5
    assert row["loss/classifier"] is None


def test_a_run_that_broke_goes_on_from_its_last_sound_checkpoint(tmp_path, packed, capsys):
    """G2: rotation deleted it while every update was skipped, and the advice led to a dead run."""
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    plain = ["--checkpoint.every", "3", "--checkpoint.keep", "1", "--evaluation.every", "0", "--precision", "fp32"]
    assert train_in_process(config, run, *plain, "--steps", "12") == 0
    broken = [*plain, "--steps", "40", "--optimizer.lr", "1e6", "--nonfinite-cap", "8"]
    assert train_in_process(config, run, *broken) == 4
    told = capsys.readouterr().err
    advice = "lower the learning rate (optimizer.lr); the same command then goes on from step 12, the last checkpoint"
    assert "more than nonfinite_cap 8; " + advice in told
    files = sorted(path.name for path in (run / "checkpoints").glob("*.pt"))
    assert files == ["step-00000012.pt", "step-00000021.pt"]
    assert json.loads((run / "checkpoints" / "last.json").read_text())["step"] == 12
    assert train_in_process(config, run, *plain, "--steps", "15") == 0
    assert "going back to the checkpoint of step 12: training broke after it and stopped at" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").glob("*.pt")] == ["step-00000015.pt"]
    row = [row for row in log_of(run) if "images" in row][-1]
    assert (row["step"], row["nonfinite_updates"]) == (15, 0)
    assert row["loss/classifier"] < 10
