"""The end of a process that leaves a library's threads behind."""

import subprocess
import sys

import pytest

from duetgan.utils import processes
from duetgan.utils.distributed import collectives
from tests.conftest import REPOSITORY

# threads that ask for Python's lock in C++, as gloo's do where a process group is not destroyed
SCRIPT = """
import sys, threading
import torch
from duetgan.utils import processes
from duetgan.utils.errors import UserError
from duetgan.utils.script import exit_cli

def work():
    a = torch.ones(64, 64)
    while True:
        a @ a

def main(argv):
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    print("result")
    if "leave" in argv:
        processes.leave_threads()
    if "fault" in argv:
        raise KeyError("ours")
    raise UserError("bad input")

exit_cli(main)
"""


@pytest.mark.parametrize(("kind", "code", "told"), [("user", 2, "error: bad input"), ("fault", 1, "KeyError: 'ours'")])
def test_threads_that_are_left_do_not_abort_the_end(kind, code, told):
    """`--lr-find` on two ranks without a rate: SIGABRT instead of 2, once in five times."""
    command = [sys.executable, "-c", SCRIPT, "leave", kind]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.rstrip().endswith(told)
    assert done.stdout == "result\n"  # what was printed is not lost


def test_a_group_that_is_not_destroyed_leaves_threads(monkeypatch):
    monkeypatch.setattr(processes, "_threads_left", False)
    collectives.stop(lost=True)
    assert not processes._threads_left  # there was no group
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    collectives.stop(lost=True)
    assert processes._threads_left


def test_without_threads_the_end_is_the_usual_one(monkeypatch):
    monkeypatch.setattr(processes, "_threads_left", False)
    with pytest.raises(SystemExit) as end:
        processes.leave(3)
    assert end.value.code == 3
