"""How many threads compute where other programs take cores: faked clocks of the system, cores and environment."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from duetgan.utils import memory, threads
from tests.conftest import REPOSITORY

STAT = "cpu  {user} 0 {system} 5000 20 0 0 {stolen} 0 0\ncpu0 1 0 1 1 1 0 0 0 0 0\n"


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`clocks(at=s, own=s, user=s, ...)`: the time, this process's time, and that of all cores."""
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr("os.sysconf", lambda _: 100)

    def set_to(at: float, own: float = 0.0, user: float = 0.0, system: float = 0.0, stolen: float = 0.0) -> None:
        ticks = {name: round(100 * s) for name, s in (("user", user), ("system", system), ("stolen", stolen))}
        (tmp_path / "stat").write_text(STAT.format(**ticks))
        monkeypatch.setattr("time.perf_counter", lambda: at)
        monkeypatch.setattr("os.times", lambda: (own, 0.0, 0.0, 0.0, 0.0))

    return set_to


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`cores(all, usable)`: the machine's, and those of this process, in which torch begins with as many threads."""
    monkeypatch.delenv(threads.THREADS_VARIABLE)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def set_to(machine: int, usable: int) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: machine)
        monkeypatch.setattr(threads, "max_threads", lambda: usable)

    return set_to


def test_others_are_what_was_busy_but_for_this_process(clocks):
    clocks(10.0, own=3.0, user=100.0)
    load = threads.ProgramLoad()
    clocks(12.0, own=5.0, user=103.0, system=1.0)  # of 4 s on the cores 2 are its own
    assert load.busy_cores() == pytest.approx(1.0)
    clocks(12.05, own=5.0, user=200.0)  # too soon to tell
    assert load.busy_cores() == pytest.approx(1.0)
    clocks(14.0, own=7.5, user=103.0, system=1.0, stolen=0.5)  # its own time is told earlier than all cores'
    assert load.busy_cores() == 0.0
    clocks(16.0, own=7.5, user=103.0, system=1.0, stolen=3.5)  # what the host takes from a virtual machine
    assert load.busy_cores() == pytest.approx(1.5)
    threads.STAT.unlink()  # a system that does not tell
    assert threads.ProgramLoad().busy_cores() == 0.0


@pytest.mark.parametrize(
    ("machine", "usable", "others", "fits"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.29, 2),
        (2, 2, 0.35, 1),
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (64, 64, 3.1, 61),
        (64, 4, 30.0, 4),  # a container's share is free, whatever goes on beside it
        (64, 4, 62.0, 2),
    ],
)
def test_as_many_threads_as_others_leave_cores(cores, machine, usable, others, fits):
    cores(machine, usable)
    assert threads.fitting(others) == fits


def test_given_numbers_and_shares_of_a_machine_stay(cores, monkeypatch):
    cores(8, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the other rank is no other program
    assert (threads.is_adjustable(), threads.fitting(7.0)) == (False, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (threads.is_adjustable(), threads.fitting(7.0)) == (True, 1)
    monkeypatch.setenv(threads.THREADS_VARIABLE, "4")
    assert (threads.is_adjustable(), threads.fitting(7.0)) == (False, 4)


def test_a_script_settles_and_a_librarys_caller_keeps_its_own(cores, monkeypatch):
    cores(8, 8)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(threads, "_since_start", None)
    threads.settle()
    assert asked == []
    threads.start_measuring()
    monkeypatch.setattr(threads, "busy_since_start", lambda: 5.0)
    threads.settle()
    assert asked == [3]


MOST = """
from pathlib import Path
from duetgan.utils import memory, threads
memory.CGROUP = Path({!r})
print(threads.max_threads())
"""
IGNORED = "import tests.conftest, signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGHUP)))"


@pytest.mark.parametrize("version", ["cpu.max", pytest.param("cpu/cpu.cfs_quota_us", marks=pytest.mark.slow)])
def test_a_containers_quota_counts_and_not_the_hosts_cores(tmp_path, monkeypatch, version):
    """Cgroup 2 and 1: torch alone would take as many threads as the host has cores."""
    file = tmp_path / version
    file.parent.mkdir(exist_ok=True)
    file.write_text("190000 100000\n" if version == "cpu.max" else "190000\n")
    if version != "cpu.max":
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv(threads.THREADS_VARIABLE)
    assert memory.cores() == 1
    code = MOST.format(str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"
    file.write_text("max 100000\n" if version == "cpu.max" else "-1\n")
    assert memory.cores() == 8


def test_signals_that_the_starter_of_the_tests_ignores_reach_their_children():
    """M5: nine tests of signals failed under `nohup make test &`."""
    found = subprocess.run(
        [sys.executable, "-c", IGNORED],
        cwd=REPOSITORY,
        preexec_fn=lambda: [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGHUP)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "SIG_IGN" not in found.stdout
    assert "default_int_handler" in found.stdout
