import ctypes
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from duetgan.utils import memory
from duetgan.utils.memory import tune_malloc

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another C library")

# a step that takes blocks as activations do, gives all back, and comes again
PROGRAM = """
import ctypes, json, resource, sys
from duetgan.utils.memory import tune_malloc
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

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Musl())
    assert tune_malloc() is False
