"""Choose the number of torch's threads: as many as other programs leave cores for.

The threads of an operation spin while they wait for each other. If the system suspends one of them
for another program, the spinning ones occupy the core that it needs. Next to one busy process on
two cores, two threads train at a tenth of their usual speed, and one thread at two thirds of it
(benchmarks/busy.py).
"""

import os
import time
from functools import cache
from pathlib import Path

from duetgan.utils.memory import cores, local_processes

STAT = Path("/proc/stat")
THREADS_VARIABLE = "OMP_NUM_THREADS"  # environment variable, set by the user or a launcher
# fraction of a core that other programs may use before Duet leaves that core to them
TOLERATED_LOAD = 0.3
SHORTEST = 0.1  # seconds of a measurement at least, because the system counts in hundredths


class ProgramLoad:
    """The use of the machine's cores by other programs between two calls of `busy_cores`."""

    def __init__(self) -> None:
        self._previous = _clocks()
        self._busy_cores = 0.0

    def busy_cores(self) -> float:
        """Return the number of cores that other programs used since the last call.

        Returns 0 where the system does not report it. A call within SHORTEST s repeats the last
        result.
        """
        current = _clocks()
        seconds, busy, process = (
            end - start for end, start in zip(current, self._previous, strict=True)
        )
        if seconds >= SHORTEST:
            self._previous = current
            self._busy_cores = max(0.0, (busy - process) / seconds)
        return self._busy_cores


def _clocks() -> tuple[float, float, float]:
    """Return seconds: wall clock, busy time of all cores, and time of this process on them.

    The busy time includes time that the host takes from a virtual machine.
    """
    busy = 0.0
    if STAT.exists():
        user, nice, system, _, _, interrupts, soft, stolen = map(
            int, STAT.read_text().split(maxsplit=9)[1:9]
        )
        busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, sum(os.times()[:4])


@cache
def max_threads() -> int:
    """Return torch's initial number of threads, at most the cores that this process may use.

    A number in THREADS_VARIABLE is returned as it is.
    """
    import torch

    if THREADS_VARIABLE in os.environ:
        return torch.get_num_threads()
    return min(torch.get_num_threads(), cores())


def is_adjustable() -> bool:
    """Return True unless OMP_NUM_THREADS is set or several ranks share this machine.

    The ranks of one run would count as other programs for each other.
    """
    return THREADS_VARIABLE not in os.environ and local_processes() == 1


def fitting(busy_cores: float) -> int:
    """Return how many threads can have a core each while other programs use `busy_cores` cores."""
    if not is_adjustable():
        return max_threads()
    free_cores = int((os.cpu_count() or 1) - busy_cores + TOLERATED_LOAD)
    return max(1, min(max_threads(), free_cores))


def counted(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def load_text(busy_cores: float) -> str:
    return f"other programs take {busy_cores:.1f} of {os.cpu_count()} cores"


_since_start: ProgramLoad | None = None


def start_measuring() -> None:
    global _since_start
    _since_start = ProgramLoad()


def busy_since_start() -> float:
    """Return the number of cores that other programs use, measured since `start_measuring`."""
    return 0.0 if _since_start is None else _since_start.busy_cores()


def settle() -> None:
    """Set torch's threads to the number of free cores, if a script has called `start_measuring`.

    A program that uses Duet as a library keeps its own number of threads.
    """
    import torch

    if _since_start is not None:
        torch.set_num_threads(fitting(busy_since_start()))
