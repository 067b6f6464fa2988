"""Processes: whether one lives, and how those that are started here end."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it, `parent`, is gone, however that ends: `kill -9`
    leaves no orphan. To be called in the child, which ends here if its parent has ended already. Linux only; elsewhere
    nothing is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def process_state(pid: int) -> str | None:
    """The letter of /proc/PID/stat ("T": stopped, "Z": ended); None: no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
