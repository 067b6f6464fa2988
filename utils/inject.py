"""Faults on demand, for the fault suite and for trying out what a run survives: DUET_FAIL_AT="rank:step:kind,...".

Off unless the variable is set. `rank` is a number or `*`, `step` an update's number (from 0), `kind` one of KINDS. A
fault fires once a process, and not again after torchrun has restarted the processes.
"""

import os
import signal
import time
from functools import cache
from typing import NamedTuple

from utils.errors import UserError

VARIABLE = "DUET_FAIL_AT"
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "usr1": signal.SIGUSR1,
}
# what the process does to itself at the step's beginning; what its code then sees; where in a save, or before which
# chunk of an evaluation's pass over images, it is killed
WHERE = ("kill-before-write", "kill-before-rename", "kill-in-pass")
KINDS = (*SIGNALS, "raise", "sleep", "nan", "spike", "oom", "unequal", *WHERE)


class Fault(NamedTuple):
    rank: int | None  # None: every rank
    step: int
    kind: str


@cache
def _faults(text: str) -> list[Fault]:
    """Raises UserError for anything but rank:step:kind,..."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        rank, step, kind = (*part.split(":", 2), "", "")[:3]
        if not ((rank == "*" or rank.isdecimal()) and step.isdecimal() and kind in KINDS):
            known = ", ".join(KINDS)
            raise UserError(f"{VARIABLE}={text}: {part!r} is not rank:step:kind, e.g. 1:20:kill; kinds: {known}")
        found.append(Fault(None if rank == "*" else int(rank), int(step), kind))
    return found


_fired: set[Fault] = set()


def due(kind: str, step: int, *, rank: int) -> bool:
    """Whether a fault of this kind is asked for here and now; true once."""
    text = os.environ.get(VARIABLE, "")
    if not text or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    for fault in _faults(text):
        if fault.kind == kind and fault.step == step and fault.rank in (None, rank) and fault not in _fired:
            _fired.add(fault)
            return True
    return False


def asked() -> bool:
    """Whether any fault is asked for."""
    return bool(os.environ.get(VARIABLE))


def check() -> None:
    """Raise UserError for a variable that cannot be read: before the first step, not when it would fire."""
    _faults(os.environ.get(VARIABLE, ""))


def fire(step: int, *, rank: int) -> None:
    """Do what is asked for at the beginning of `step`. Raises RuntimeError for `raise`, MemoryError for `oom`."""
    if not asked():
        return
    for kind, signum in SIGNALS.items():
        if due(kind, step, rank=rank):
            os.kill(os.getpid(), signum)
    if due("sleep", step, rank=rank):
        time.sleep(3600)
    for kind, error in (("raise", RuntimeError), ("oom", MemoryError)):
        if due(kind, step, rank=rank):
            raise error(f"asked for by {VARIABLE}")


def kill_at(kind: str, step: int, *, rank: int) -> None:
    """End this process like `kill -9` if `kind` is asked for at `step`."""
    if due(kind, step, rank=rank):
        os.kill(os.getpid(), signal.SIGKILL)
