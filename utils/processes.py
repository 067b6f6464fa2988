"""Processes: whether one lives, and how this one and those that are started here end."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

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


def leave_imports(frame: FrameType | None, line: str, code: int) -> None:
    """For signal handlers: end this process with a line on stderr and an exit code if `frame` is inside an import. An
    exception that is raised there may have to pass C++, as in torch's import, which aborts the process. Elsewhere
    nothing is done.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    if frame is not None:
        with contextlib.suppress(OSError):  # a terminal that is gone, or a full disk
            os.write(2, f"{line}\n".encode() if line else b"")
        os._exit(code)


_threads_left = False


def leave_threads() -> None:
    """Have `leave` end this process at once: threads of a library are left that nobody waits for, such as those of a
    process group that is not destroyed. One that asks for Python's lock while the interpreter ends is unwound inside
    C++, which aborts the process ("terminate called without an active exception").
    """
    global _threads_left
    _threads_left = True


def leave(code: int) -> NoReturn:
    if _threads_left:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
