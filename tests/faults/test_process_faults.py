"""Processes that are killed, stopped or told to leave, by number in the project's table of faults (4 to 9, 32)."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duetgan.training.engine import signals
from duetgan.training.engine.outputs import StatusFile
from duetgan.utils.runlog.run_folder import RunFolder
from tests.end_to_end.helpers import last, status
from tests.faults import conftest, inject
from tests.faults.conftest import ended, start_python

WAIT = 120  # seconds: these tests wait for what must come, on machines that may be busy
LONG = ["--steps", "100000", "--evaluation.every", "0", "--log.samples-every", "0", "--checkpoint.every", "4"]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def start(gan_recipe, monkeypatch):
    """`start("--procs", "2", fail_at="1:3:kill")`: a tiny GAN's training, cleaned up."""
    started = []

    def begin(*more: str, fail_at: str = "", how: Callable[..., Any] = conftest.start) -> Any:
        monkeypatch.setenv(inject.VARIABLE, fail_at)
        started.append(how(*gan_recipe, *LONG, *more))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], Any], process: Any = None) -> Any:
    """What `condition` gives once it is true."""
    end = time.monotonic() + WAIT
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def sign(run: Path, rank: int) -> dict[str, Any]:
    """A rank's heartbeat, {} before there is one."""
    try:
        return json.loads((run / "heartbeat" / f"rank-{rank}.json").read_text())
    except (OSError, ValueError):
        return {}


def saved(run: Path) -> bool:
    return (run / "checkpoints" / "last.json").exists()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def unlocked(run: Path) -> bool:
    return subprocess.run(["flock", "--nonblock", str(run / ".lock"), "true"], check=False).returncode == 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_fault_04_a_killed_rank_ends_the_run(start, run, rank):
    """One line tells which; the others leave by themselves, the file of the run's state tells it too."""
    found = ended(start("--procs", "2", fail_at=f"{rank}:6:kill"))
    assert found.code == 4
    found.error(f"rank {rank} was ended by SIGKILL", "the same command resumes")
    assert found.err.strip().splitlines()[-1].startswith("error: ")
    assert status(run, "state", "exit_code") == ("failed", 4)
    assert f"rank {rank} is gone" in status(run)["reason"]
    assert last(run) == 4
    assert unlocked(run)


def test_fault_05_a_stopped_rank_is_named(start, run):
    process = start("--procs", "2", "--distributed.timeout", "5", fail_at="1:6:stop")
    found = ended(process)
    found.error("rank 1 is stopped", "the same command resumes")
    assert found.code == 4
    assert "rank 1 is stopped" in status(run)["reason"]


@pytest.mark.parametrize(
    ("name", "processes"), [("SIGTERM", 2), ("SIGINT", 1), pytest.param("SIGUSR1", 1, marks=pytest.mark.slow)]
)
def test_fault_06_07_a_signal_saves_and_leaves(start, command, gan_recipe, run, name, processes):
    """All ranks finish the same step and save once; nobody is left; the same command resumes."""
    process = start("--procs", str(processes))
    until(lambda: saved(run), process)
    pids = [sign(run, rank)["pid"] for rank in range(processes)]
    process.send_signal(signal.Signals[name])
    found = ended(process)
    assert found.code == 3, found.err
    (line,) = [line for line in found.err.splitlines() if line.startswith("stopped: ")]
    step = last(run)
    assert line == f"stopped: {name} at step {step}; saved at step {step}. The same command resumes from there."
    assert status(run, "state", "reason", "exit_code", "step") == ("stopped", name, 3, step)
    assert "SIG" in (run / "report.html").read_text()  # a stopped run has a report too (U9)
    assert not any(alive(pid) for pid in pids)
    assert not list((run / "heartbeat").glob("rank-*.json")) or all(sign(run, r)["left"] for r in range(processes))
    command(*gan_recipe, *LONG, "--procs", str(processes), "--max-steps", str(step + 1)).success()
    assert last(run) == step + 1


@pytest.mark.parametrize(
    ("names", "lines", "code"),
    [
        (["SIGTERM"], 1, None),
        (["SIGINT", "SIGUSR1"], 1, None),
        (["SIGUSR1", "SIGUSR1"], 1, None),  # SLURM may send it to the launcher, too
        (["SIGUSR1", "SIGTERM"], 2, 143),
        (["SIGHUP", "SIGINT"], 2, 130),
    ],
)
@pytest.mark.parametrize("is_main", [True, False])
def test_what_signals_do_in_a_step(names, lines, code, is_main, monkeypatch):
    written: list[str] = []
    left: list[int] = []
    calls = SimpleNamespace(write=lambda _, text: written.append(text.decode()), _exit=left.append)
    monkeypatch.setattr(signals, "os", calls)
    monkeypatch.setattr(signals.collectives, "is_main", lambda: is_main)
    stop = signals.StopSignals(StatusFile(RunFolder("unused")))
    assert stop.agreed() == 0
    for name in names:
        stop._receive(signal.Signals[name], None)
    assert stop.agreed() == signal.Signals[names[0]]
    assert left == ([] if code is None else [code])
    assert [line.partition(":")[0] for line in written] == names[:lines] * is_main
    if is_main:
        assert ["without saving" in line for line in written] == [False, True][:lines]


def test_fault_08_a_signal_to_one_rank_only(start, run):
    process = start("--procs", "2")
    until(lambda: saved(run), process)
    os.kill(sign(run, 1)["pid"], signal.SIGTERM)
    found = ended(process)
    assert found.code == 3, found.err
    assert status(run, "state", "reason", "step") == ("stopped", "SIGTERM", last(run))


def test_fault_09_a_second_interrupt_leaves_at_once(start, run):
    """It is stopped (asleep) in a step that never ends, so only leaving at once ends it."""
    process = start("--distributed.timeout", "3000", fail_at="0:6:sleep")
    until(lambda: sign(run, 0).get("step") == 6, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process).code == 128 + signal.SIGINT
    assert last(run) == 4
    assert unlocked(run)


def test_fault_32_a_killed_launcher(start, command, run, gan_recipe):
    """It leaves nobody behind, and the lock is free."""
    process = start("--procs", "2")
    until(lambda: saved(run) and sign(run, 1), process)
    pids = [sign(run, rank)["pid"] for rank in range(2)]
    assert process.pid not in pids
    process.kill()
    until(lambda: not any(alive(pid) for pid in pids))
    process.communicate()
    until(lambda: unlocked(run))  # when their last thread has gone
    step = last(run)
    command(*gan_recipe, *LONG, "--max-steps", str(step + 1)).success()
    assert last(run) == step + 1


def catches(pid, signum):
    """Whether a process has a handler for it."""
    status = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1]
    return int(status.split()[0], 16) >> (signum - 1) & 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_before_the_first_step(start, run, processes):
    """Nothing is there to be saved; a scheduler that queues the job again at exit code 3 does so."""
    process = start("--procs", str(processes), how=start_python)
    until(lambda: catches(process.pid, signal.SIGTERM), process)
    time.sleep(0.3)  # while torch is imported
    process.send_signal(signal.SIGTERM)
    done = ended(process)
    assert (done.code, saved(run)) == (3, False)
    (line,) = [line for line in done.err.splitlines() if line.startswith(("stopped", "error"))]
    assert line.startswith("stopped: SIGTERM")
    assert line.endswith("nothing was lost, the same command resumes")


def test_a_killed_run_goes_on_by_its_own_config_before_its_first_checkpoint(start, command, run):
    process = start("--checkpoint.every", "100000")
    until(lambda: (run / "status.json").exists() and sign(run, 0).get("step"), process)
    process.kill()
    process.communicate()
    command("train.py", "--config", run / "config.yaml", "--device", "cpu", "--max-steps", "2").success()
    assert last(run) == 2
