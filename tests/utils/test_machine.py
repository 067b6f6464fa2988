"""How many threads compute where other programs take cores (faked clocks, cores and environment); a step's memory."""

import ctypes
import functools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from duetgan.utils import machine
from duetgan.utils.machine import tune_malloc
from tests.conftest import REPOSITORY

STAT = "cpu  {user} 0 {system} 5000 20 0 0 {stolen} 0 0\ncpu0 1 0 1 1 1 0 0 0 0 0\n"


@pytest.fixture
def clocks(tmp_path, monkeypatch):
    """`clocks(at=s, own=s, user=s, ...)`: the time, this process's time, and that of all cores."""
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr("os.sysconf", lambda _: 100)

    def set_to(at: float, own: float = 0.0, user: float = 0.0, system: float = 0.0, stolen: float = 0.0) -> None:
        ticks = {name: round(100 * s) for name, s in (("user", user), ("system", system), ("stolen", stolen))}
        (tmp_path / "stat").write_text(STAT.format(**ticks))
        monkeypatch.setattr("time.perf_counter", lambda: at)
        monkeypatch.setattr("os.times", lambda: (own, 0.0, 0.0, 0.0, 0.0))

    return set_to


@pytest.fixture
def cores(monkeypatch):
    """`cores(all, usable)`: the machine's, and those of this process, in which torch begins with as many threads."""
    monkeypatch.delenv(machine.THREADS_VARIABLE)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def set_to(total: int, usable: int) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: total)
        monkeypatch.setattr(machine, "max_threads", lambda: usable)

    return set_to


def test_others_are_what_was_busy_but_for_this_process(clocks):
    clocks(10.0, own=3.0, user=100.0)
    load = machine.ProgramLoad()
    clocks(12.0, own=5.0, user=103.0, system=1.0)  # of 4 s on the cores 2 are its own
    assert load.busy_cores() == pytest.approx(1.0)
    clocks(12.05, own=5.0, user=200.0)  # too soon to tell
    assert load.busy_cores() == pytest.approx(1.0)
    clocks(14.0, own=7.5, user=103.0, system=1.0, stolen=0.5)  # its own time is told earlier than all cores'
    assert load.busy_cores() == 0.0
    clocks(16.0, own=7.5, user=103.0, system=1.0, stolen=3.5)  # what the host takes from a virtual machine
    assert load.busy_cores() == pytest.approx(1.5)
    machine.STAT.unlink()  # a system that does not tell
    assert machine.ProgramLoad().busy_cores() == 0.0


@pytest.mark.parametrize(
    ("total", "usable", "others", "fits"),
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
def test_as_many_threads_as_others_leave_cores(cores, total, usable, others, fits):
    cores(total, usable)
    assert machine.fitting(others) == fits


def test_given_numbers_and_shares_of_a_machine_stay(cores, monkeypatch):
    cores(8, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the other rank is no other program
    assert (machine.is_adjustable(), machine.fitting(7.0)) == (False, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (machine.is_adjustable(), machine.fitting(7.0)) == (True, 1)
    monkeypatch.setenv(machine.THREADS_VARIABLE, "4")
    assert (machine.is_adjustable(), machine.fitting(7.0)) == (False, 4)


def test_a_script_settles_and_a_librarys_caller_keeps_its_own(cores, monkeypatch):
    cores(8, 8)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(machine, "_since_start", None)
    machine.settle()
    assert asked == []
    machine.start_measuring()
    monkeypatch.setattr(machine, "busy_since_start", lambda: 5.0)
    machine.settle()
    assert asked == [3]


MOST = """
from pathlib import Path
from duetgan.utils import machine
machine.CGROUP = Path({!r})
print(machine.max_threads())
"""
IGNORED = "import tests.conftest, signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGHUP)))"


def test_a_containers_quota_counts_and_not_the_hosts_cores(tmp_path, monkeypatch):
    """Torch alone would take as many threads as the host has cores."""
    file = tmp_path / "cpu.max"
    file.write_text("190000 100000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv(machine.THREADS_VARIABLE)
    assert machine.cores() == 1
    code = MOST.format(str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"
    file.write_text("max 100000\n")
    assert machine.cores() == 8


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


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another C library")

# a step that takes blocks as activations do, gives all back, and comes again
PROGRAM = """
import ctypes, json, resource, sys
from duetgan.utils.machine import tune_malloc
kept = tune_malloc(256 * 2**20) if sys.argv[1] == "keep" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(5 * 2**20) for _ in range(30)]
    for block in blocks:
        ctypes.memset(block, 1, 5 * 2**20)
    for block in blocks:
        libc.free(block)
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10
heap = open("/proc/self/smaps").read().split("[heap]")[1:]
advised = any("hg" in part.split("VmFlags:")[1].splitlines()[0].split() for part in heap)
print(json.dumps({"kept": kept, "faults": faults, "advised": advised}))
"""


@functools.cache
def run(mode):
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@glibc
def test_a_steps_memory_is_kept_for_the_next_one():
    plain, kept = run("plain"), run("keep")
    assert kept["kept"] is True
    assert plain["faults"] > 10000  # 150 MiB in pages of 4 KiB
    assert kept["faults"] < 50
    assert not plain["advised"]


@glibc
@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="a kernel without huge pages")
def test_the_heap_is_asked_for_in_huge_pages():
    assert run("keep")["advised"]


def test_another_c_library_is_left_alone(monkeypatch):
    class Musl:
        malloc = None

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Musl())
    assert tune_malloc() is False


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Set files of /proc and /sys by name; nothing of this machine's own is left."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".", 1)).write_text(text)

    return write


def test_available_memory_and_cores(system, monkeypatch):
    assert machine.available_bytes() > 1 << 20  # all of the machine's where the system does not say
    system(meminfo="MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   5000 kB\n")
    assert machine.available_bytes() == 5000 * 1024
    system(memory_max="max\n")
    assert machine.available_bytes() == 5000 * 1024
    stat = "anon 300000\ninactive_file 150000\nactive_file 50000\n"
    system(memory_max="2000000\n", memory_current="500000\n", memory_stat=stat)
    assert machine.available_bytes() == 2000000 - 300000  # the file cache is given back when memory runs short
    system(memory_max="100000\n")
    assert machine.available_bytes() == 0
    system(memory_max="99999999999\n")
    assert machine.available_bytes() == 5000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert machine.local_processes() == 3
    system(cpu_max="250000 100000\n")
    assert machine.cores() == 1
    system(cpu_max="max 100000\n")
    assert machine.cores() == 2


def test_memory_of_accelerators_is_in_bytes_of_one_or_of_all(monkeypatch, system):
    """Total: of the device of a network, or of all if it is split. Peak: of tensors, on all of them."""
    device = torch.device("cuda", 1)
    memory = {0: (10, 1000), 1: (20, 3000), 2: (30, 7000)}  # free, total
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda each: memory[getattr(each, "index", each)])
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda each: 5 * 10**each)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda each: 1)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda each: 2)
    assert [machine.total_bytes(device, several=several) for several in (False, True)] == [3000, 11000]
    assert machine.peak_bytes(device) == 555
    cpu = torch.device("cpu")
    every = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert usage <= machine.peak_bytes(cpu) / (1 if sys.platform == "darwin" else 1024) < 2 * usage
    for limit, expected in ((None, every), ("max", every), (f"{2**70}", every), ("12345", 12345)):
        if limit:
            system(memory_max=f"{limit}\n")
        assert machine.total_bytes(cpu, several=False) == expected


def test_the_load_is_told_in_cores_of_the_machine(cores):
    cores(9, 4)
    assert machine.load_text(2.25) == "other programs take 2.2 of 9 cores"
