"""What ends an evaluation that several processes share: one line, and the exit code of the same fault in training."""

import signal
import time

import pytest

from duetgan.utils.distributed.launch import AGAIN
from tests.end_to_end.helpers import status
from tests.faults import inject
from tests.faults.conftest import own_process, start
from tests.faults.test_data_faults import repacked


def lines(errors: str) -> list[str]:
    """What is told of faults."""
    assert "Traceback" not in errors, errors
    return [line for line in errors.splitlines() if line.startswith(("error", "stopped"))]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_killed_in_the_evaluation_of_a_training(gan_recipe, tmp_path, rank, monkeypatch):
    monkeypatch.setenv(inject.VARIABLE, f"{rank}:0:kill-in-pass")
    outcome = own_process(*gan_recipe, "--procs", "2")
    assert outcome.code == 4, outcome.err
    (line,) = lines(outcome.err)
    assert f"rank {rank} was ended by SIGKILL; the same command resumes" in line
    assert status(tmp_path / "run", "state", "exit_code", "step") == ("failed", 4, 4)
    monkeypatch.delenv(inject.VARIABLE)
    own_process(*gan_recipe, "--procs", "2", "--max-steps", "4").success()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_evaluate_is_killed(trained, tmp_path, rank, monkeypatch):
    monkeypatch.setenv(inject.VARIABLE, f"{rank}:0:kill-in-pass")
    outcome = own_process("evaluate.py", "--checkpoint", trained, "--out", tmp_path / "eval", "--procs", "2")
    assert outcome.code == 4, outcome.err
    assert lines(outcome.err) == [f"error: rank {rank} was ended by SIGKILL; {AGAIN}"]
    assert not (tmp_path / "eval" / "metrics.json").exists()


def test_a_damaged_record_is_told_once(trained, packed, tmp_path):
    path = repacked(packed / "test.lmdb", tmp_path / "x.lmdb", "png", 70)
    outcome = own_process("evaluate.py", "--checkpoint", trained, "--data", path, "--procs", "2", "--device", "cpu")
    assert outcome.code == 2, outcome.err
    (line,) = lines(outcome.err)
    assert "on rank 1" in line
    assert "x.lmdb: record 70 is damaged" in line


def test_a_wrong_option_is_told_before_processes_start(trained):
    own_process("evaluate.py", "--checkpoint", trained / "nowhere", "--procs", "2").refusal("no such run folder")
    judged = own_process("evaluate.py", "--checkpoint", trained, "--procs", "2", "--classifier", trained)
    judged.refusal("is for a GAN")


def test_a_signal_ends_all_processes_of_evaluate(trained, tmp_path):
    process = start("evaluate.py", "--checkpoint", trained, "--out", tmp_path / "eval", "--procs", "2")
    time.sleep(1)  # while torch is imported
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert lines(errors) == [f"stopped: SIGTERM; {AGAIN}"]
