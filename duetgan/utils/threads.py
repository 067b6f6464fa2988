"""How many threads compute: as many as other programs leave cores for.

The threads of an operation wait for each other, and spin while they wait: where the system has put
one of them aside for another program, the rest burn the core that it needs. Beside one busy process
on two cores two threads train at a tenth of their speed, one thread at two thirds of it
(benchmarks/busy.py).
"""

import os
import time
from functools import cache
from pathlib import Path

from duetgan.utils.memory import cores, local_processes

STAT = Path("/proc/stat")
GIVEN = "OMP_NUM_THREADS"  # environment variable, by the user or a launcher
ROOM = 0.3  # of a core: what others may take of it before it is left to them
SHORTEST = 0.1  # seconds; the system counts in hundredths


class Load:
    """What other programs take of this machine's cores, from one look to the next."""

    def __init__(self) -> None:
        self._before, self._others = _clocks(), 0.0

    def others(self) -> float:
        """Cores that were busy since the last look, but for this process's time; 0 where the system
        does not tell.
        """
        now = _clocks()
        seconds, busy, own = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        if seconds >= SHORTEST:
            self._before, self._others = now, max(0.0, (busy - own) / seconds)
        return self._others


def _clocks() -> tuple[float, float, float]:
    """Seconds: by the clock, of all cores busy (or taken away from a virtual machine), of this
    process on them.
    """
    busy = 0.0
    if STAT.exists():
        user, nice, system, _, _, interrupts, soft, stolen = map(
            int, STAT.read_text().split(maxsplit=9)[1:9]
        )
        busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, sum(os.times()[:4])


@cache
def most() -> int:
    """The threads that torch begins with, but no more than this process may use cores; or as many
    as GIVEN says.
    """
    import torch

    return torch.get_num_threads() if GIVEN in os.environ else min(torch.get_num_threads(), cores())


def free() -> bool:
    """Whether their number is open: given ones stay, and the processes of one run would be each
    other's others.
    """
    return GIVEN not in os.environ and local_processes() == 1


def fitting(others: float) -> int:
    """The threads that have cores of their own where other programs take so many."""
    return max(1, min(most(), int((os.cpu_count() or 1) - others + ROOM))) if free() else most()


def counted(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def others_text(others: float) -> str:
    return f"other programs take {others:.1f} of {os.cpu_count()} cores"


_since_start: Load | None = None


def begin() -> None:
    global _since_start
    _since_start = Load()


def seen() -> float:
    """Cores that other programs take, as far as this process has seen it."""
    return 0.0 if _since_start is None else _since_start.others()


def settle() -> None:
    """In a script: let torch compute in as many threads as have had cores. A library's caller has a
    say in that.
    """
    import torch

    if _since_start is not None:
        torch.set_num_threads(fitting(seen()))
