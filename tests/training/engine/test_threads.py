"""The threads of a run's steps: the record of a run, and what other programs take (faked)."""

import os
from types import SimpleNamespace

import pytest
import torch

from duetgan.training.engine import speed
from duetgan.training.engine.speed import ThreadCount
from duetgan.utils import machine
from duetgan.utils.config.yaml_files import read_yaml
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """As on two cores, whatever this machine has; what is set here is taken back."""
    before = torch.get_num_threads()
    monkeypatch.delenv(machine.THREADS_VARIABLE)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "max_threads", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("setting", "first", "kept", "expected"),
    [
        (2, 2, {0: 2}, {0: 2}),
        (1, 1, {0: 2}, {0: 2, 10: 1}),  # from here on, by hand
        ({0: 2, 4: 1, 12: 2}, 2, {0: 2, 4: 1}, {0: 2, 4: 1}),
        (2, 2, {0: 2, 4: 1, 30: 2}, {0: 2, 4: 1, 10: 2}),  # a later checkpoint's was undone
        (2, 2, {}, {0: 2}),  # of an earlier version
    ],
)
def test_a_resume_goes_on_with_the_runs_record(setting, first, kept, expected):
    torch.set_num_threads(first)
    here, loop = ThreadCount(setting, torch.device("cpu")), SimpleNamespace(step=10)
    here.load_state_dict({"step": 10} | ({"threads": kept} if kept else {}))
    here.before_step(loop)
    assert here.by_step == expected
    assert torch.get_num_threads() == expected[max(expected)]


@pytest.fixture
def recipe(packed, tmp_path):
    return lambda task: write_config(tmp_path / f"{task}.yaml", task, packed)


def test_the_number_is_recorded_and_kept_and_another_one_is_told(recipe, tmp_path, monkeypatch, capsys):
    """M3: a resume on a machine that would choose otherwise goes on in the run's number, to the bit."""
    config, run, straight = recipe("classifier"), tmp_path / "run", tmp_path / "straight"
    short = ["--steps", "4", "--evaluation.every", "0", "--log.samples-every", "0"]
    assert train_in_process(config, straight, *short) == 0
    assert train_in_process(config, run, *short, "--max-steps", "2") == 0
    assert read_yaml(run / "config.yaml")["threads"] == 2
    monkeypatch.setattr(machine.ProgramLoad, "busy_cores", lambda _: 1.0)
    monkeypatch.setenv(machine.THREADS_VARIABLE, "1")
    torch.set_num_threads(1)
    capsys.readouterr()
    assert train_in_process(config, run, *short) == 0
    assert "config changed" not in capsys.readouterr().err
    assert torch.get_num_threads() == 2
    assert differing(state_of(straight, 4), state_of(run, 4)) == []
    assert train_in_process(config, run, *short, "--threads", "1", "--steps", "6") == 0
    told = "config changed since the last start: threads was 2, is 1; not the same to the bit from here on"
    assert told in capsys.readouterr().err
    assert state_of(run, 6)["loop"]["threads"] == {0: 2, 4: 1}


def test_a_busy_start_is_told_and_takes_fewer(recipe, tmp_path, monkeypatch, capsys):
    """M2: the load stands beside what was chosen."""
    del os.environ[speed.FORCED]  # the fixture below puts it back
    monkeypatch.setattr(machine.ProgramLoad, "busy_cores", lambda _: 1.0)
    machine.start_measuring()
    assert train_in_process(recipe("gan"), tmp_path / "run", "--dry-run") == 0
    assert "1 process, 1 thread; busy: other programs take 1.0 of 2 cores" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(speed.FORCED, "fp32")


def test_a_run_of_an_older_version_that_adapted_goes_on_with_auto(recipe, tmp_path):
    assert train_in_process(recipe("gan"), tmp_path / "run", "--threads", "adapt", "--dry-run") == 0
