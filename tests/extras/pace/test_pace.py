"""The threads of a run's steps, by what other programs take (faked), and the word where it falls to half its speed."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duetgan.extras.pace import pace
from duetgan.extras.pace.pace import Adapt, Slowdown
from duetgan.training.engine import speed
from duetgan.training.engine.speed import ThreadCount
from duetgan.utils import machine
from duetgan.utils.config.yaml_files import read_yaml
from tests.end_to_end.helpers import differing, rows, state_of, status, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")


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


class Others:
    """What other programs take, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.take, self.now = 0.0, 1000.0
        monkeypatch.setattr(machine.ProgramLoad, "busy_cores", lambda _: self.take)
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)


@pytest.fixture
def others(monkeypatch):
    return Others(monkeypatch)


def begin(step: int, count: ThreadCount, adapt: list[Adapt]) -> None:
    loop: Any = SimpleNamespace(step=step)
    for callback in (*adapt, count):
        callback.before_step(loop)


def counts(setting: Any, device: torch.device = CPU) -> tuple[ThreadCount, list[Adapt]]:
    """The callbacks of a run with this setting of `threads`."""
    count = ThreadCount(setting, device)
    config: Any = SimpleNamespace(threads=setting)
    return count, [callback for callback in pace.callbacks(config, device, count) if isinstance(callback, Adapt)]


def test_adapt_leaves_cores_at_once_and_takes_them_back_with_patience(others, capsys):
    here, adapt = counts("adapt")
    seen = []
    for step in range(60):  # a second each: others come at 3 and go at 6, and come again at 20 and go at 23
        others.now += 1.0
        others.take = 1.0 if 3 <= step < 6 or 20 <= step < 23 else 0.0
        begin(step, here, adapt)
        seen.append(torch.get_num_threads())
    assert here.by_step == {0: 2, 3: 1, 11: 2, 20: 1, 33: 2}  # back after 5 s, then after 10
    assert seen == [here.by_step[max(first for first in here.by_step if first <= step)] for step in range(60)]
    told = capsys.readouterr().err
    assert "step 3: 2 -> 1 thread: other programs take 1.0 of 2 cores (threads: adapt)" in told
    assert "step 11: 1 -> 2 threads: other programs take 0.0 of 2 cores" in told


def test_nothing_is_looked_at_between_two_looks(others):
    here, adapt = counts("adapt")
    others.take = 1.0
    for step in range(9):
        others.now += 0.1
        begin(step, here, adapt)
    assert here.by_step == {0: 2}
    others.now += 0.1
    begin(9, here, adapt)
    assert here.by_step == {0: 2, 9: 1}


@pytest.mark.parametrize(
    ("setting", "device"), [("auto", CPU), (2, CPU), ({0: 2}, CPU), ("adapt", torch.device("cuda"))]
)
def test_only_adapt_on_a_cpu_follows(others, setting, device):
    here, adapt = counts(setting, device)
    others.take, others.now = 2.0, others.now + 100
    begin(5, here, adapt)
    assert (here.by_step, torch.get_num_threads()) == ({0: 2}, 2)


@pytest.mark.parametrize(
    ("setting", "first", "kept", "expected"),
    [
        (2, 2, {0: 2}, {0: 2}),
        (1, 1, {0: 2}, {0: 2, 10: 1}),  # from here on, by hand
        ("adapt", 1, {0: 2, 4: 1, 7: 2}, {0: 2, 4: 1, 7: 2}),  # where it stood
        ({0: 2, 4: 1, 12: 2}, 2, {0: 2, 4: 1}, {0: 2, 4: 1}),
        (2, 2, {0: 2, 4: 1, 30: 2}, {0: 2, 4: 1, 10: 2}),  # a later checkpoint's was undone
        (2, 2, {}, {0: 2}),  # of an earlier version
    ],
)
def test_a_resume_goes_on_with_the_runs_record(others, setting, first, kept, expected):
    torch.set_num_threads(first)
    here, adapt = counts(setting)
    here.load_state_dict({"step": 10} | ({"threads": kept} if kept else {}))
    begin(10, here, adapt)
    assert here.by_step == expected
    assert torch.get_num_threads() == expected[max(expected)]


# --- the run


@pytest.fixture
def recipe(packed, tmp_path) -> Callable[[str], Path]:
    return lambda task: write_config(tmp_path / f"{task}.yaml", task, packed)


@pytest.fixture
def changing(monkeypatch) -> None:
    """Other programs come and go."""
    monkeypatch.setattr(pace, "CHECK_INTERVAL", 0.0)
    monkeypatch.setattr(pace, "PATIENCE", 0.0)
    fits = itertools.cycle([2, 1, 1, 2])
    monkeypatch.setattr(machine, "fitting", lambda _: next(fits))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classifier", "gan"])
def test_a_run_that_adapted_is_repeated_from_its_record(recipe, tmp_path, changing, task):
    config, adapted, again, other = recipe(task), *(tmp_path / name for name in ("adapted", "again", "other"))
    assert train_in_process(config, adapted, "--threads", "adapt", "--max-steps", "4") == 0
    assert train_in_process(config, adapted, "--threads", "adapt") == 0  # resumed
    record = state_of(adapted, 8)["loop"]["threads"]
    assert len(record) >= 4
    assert set(record.values()) == {1, 2}
    assert status(adapted)["threads"] == {str(first): count for first, count in record.items()}
    assert read_yaml(adapted / "config.yaml")["threads"] == "adapt"
    assert train_in_process(config, again, "--threads", str(record), "--max-steps", "6") == 0
    assert train_in_process(config, again, "--threads", str(record)) == 0
    assert differing(state_of(adapted, 8), state_of(again, 8)) == []
    assert rows(adapted) == rows(again)
    assert train_in_process(config, other, "--threads", "1") == 0
    assert ".threads: other keys" in differing(state_of(adapted, 8)["loop"], state_of(other, 8)["loop"])


def test_the_number_is_recorded_and_kept_and_another_one_is_told(recipe, tmp_path, others, monkeypatch, capsys):
    """M3: a resume on a machine that would choose otherwise goes on in the run's number, to the bit."""
    config, run, straight = recipe("classifier"), tmp_path / "run", tmp_path / "straight"
    short = ["--steps", "4", "--evaluation.every", "0", "--log.samples-every", "0"]
    assert train_in_process(config, straight, *short) == 0
    assert train_in_process(config, run, *short, "--max-steps", "2") == 0
    assert read_yaml(run / "config.yaml")["threads"] == 2
    others.take = 1.0
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


def test_a_busy_start_is_told_and_takes_fewer(recipe, tmp_path, others, capsys):
    """M2: the load stands beside what was chosen."""
    del os.environ[speed.FORCED]  # the fixture of the environment below takes it back
    others.take = 1.0
    machine.start_measuring()
    assert train_in_process(recipe("gan"), tmp_path / "run", "--dry-run") == 0
    assert "1 process, 1 thread; busy: other programs take 1.0 of 2 cores" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(speed.FORCED, "fp32")


# --- the watch


def watched(others: Others, *ticks: tuple[float, float], device: Any = CPU) -> list[str]:
    """What is said at ticks of (images/s, share of waiting), ten seconds each, after four of 100 images/s."""
    here = Slowdown(watches_load=device == CPU)
    told = []
    for rate, waited in [(100.0, 0.0)] * 4 + list(ticks):
        others.now += 10.0
        told.append(here.check(0, rate, waited))
    assert told[:4] == [""] * 4
    return told[4:]


BUSY = "40 images/s instead of 100: other programs take 1.0 of 2 cores (stop them, or start again with --threads adapt)"


def test_half_the_speed_is_told_once_with_its_cause(others):
    others.take = 1.0
    told = watched(others, (60, 0), (40, 0), (40, 0), (90, 0), (40, 0))
    assert told == ["", BUSY, "", "", BUSY]  # it had recovered between them
    others.take = 0.0
    assert watched(others, (40, 0)) == [""]  # nothing that the user could change
    assert watched(others, (40, 0.7)) == [
        "40 images/s instead of 100: waiting for images took 70% of the time (raw ones need no decoding: docs/lmdb.md)"
    ]
    others.take = 1.0
    assert watched(others, (40, 0), device=torch.device("cuda")) == [""]  # it does not wait for cores


def test_another_stage_of_growth_has_another_speed(others):
    here = Slowdown(watches_load=True)
    others.take = 1.0
    said = []
    for span, rate, seconds in [(0, 100, 5), (0, 100, 5), (8, 40, 5), (8, 30, 5), (8, 29, 5), (8, 9, 1), (8, 9, 5)]:
        others.now += seconds
        said.append(here.check(span, rate, 0.0))
    assert [bool(text) for text in said] == [False] * 6 + [True]  # a second is too short to tell
