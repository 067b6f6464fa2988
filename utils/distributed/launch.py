"""Start one process per GPU, or N on the CPU, on this machine: what `train.py --gpus 0,1` and `--procs N` do.

Imports no torch: `--gpus` must be applied before CUDA starts. The exit code is the processes' own, which torchrun's
is not; torchrun itself works as well, for several machines or restarts.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn

from utils.errors import StoppedBySignal, UserError
from utils.processes import die_with_parent, process_state

GRACE_SECONDS = 30.0  # what the others get to leave by themselves once one process has ended with an error
LAUNCHED = "DUET_LAUNCHED"  # set in the processes: this launcher tells the user which of them was killed
REMEDY = "the same command resumes from the last checkpoint"
SAME = "nothing was lost, the same command resumes"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object], signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside the block these signals go to `handler`."""
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)


def leaving_on_signals() -> AbstractContextManager[None]:
    """While training does not listen (at its start and end), SIGTERM, SIGUSR1 and SIGHUP raise StoppedBySignal."""

    def leave(signum: int, _frame: FrameType | None) -> NoReturn:
        raise StoppedBySignal(f"{signal.Signals(signum).name}; {SAME}")

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    return handling(leave, [signum for signum in signals if signal.getsignal(signum) is signal.SIG_DFL])


def parse_gpus(text: str) -> list[str]:
    """`"0,1"` -> `["0", "1"]`; raises UserError for anything but distinct device numbers."""
    gpus = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in gpus) or len(set(map(int, gpus))) != len(gpus):
        raise UserError(f"--gpus {text}: write distinct device numbers separated by commas, e.g. --gpus 0,1")
    return gpus


def under_launcher() -> bool:
    """Whether this process is one of several already (torchrun's or ours)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def obeyed_signals() -> list[signal.Signals]:
    """STOP_SIGNALS, but SIGHUP where it was ignored before this process started, as nohup does. Other ignored ones are
    obeyed: shells ignore SIGINT for background jobs, and cluster/slurm.sh ignores SIGUSR1 for torchrun.
    """
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if not (deaf and signum == signal.SIGHUP)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(command: Sequence[str], processes: int) -> int:
    """Run `python command...` as `processes` ranks, forward signals, return the first failing rank's exit code or 0."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        LAUNCHED: "1",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | common | {"RANK": str(index), "LOCAL_RANK": str(index)},
            start_new_session=True,  # a terminal's Ctrl-C reaches the children once, through us
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        for index in range(processes)
    ]

    told: list[int] = []  # signals that were forwarded

    def forward(signum: int, _frame: FrameType | None) -> None:
        told.append(signum)
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    with handling(forward, obeyed_signals()):
        return _wait(children, told)


def _wait(children: list[subprocess.Popen[bytes]], forwarded: list[int]) -> int:
    """The first failing child's exit code (4 for a killed one, which is reported when all have ended), else 0. A child
    that a `forwarded` signal has ended had not begun to train: 3.
    """
    failed_at: float | None = None
    code, killed = 0, ""
    running = True
    while running:
        running = None in [child.poll() for child in children]
        for index, child in enumerate(children):
            if failed_at is None and child.returncode not in (None, 0):
                failed_at = time.monotonic()
                code = child.returncode if child.returncode > 0 else 4
                if -child.returncode in forwarded:
                    code, killed = 3, f"stopped: {signal.Signals(-child.returncode).name} before the first step"
                elif child.returncode < 0:
                    killed = f"error: rank {index} was ended by {signal.Signals(-child.returncode).name}"
        if failed_at is not None:
            late = time.monotonic() - failed_at > GRACE_SECONDS
            for child in children:
                if late or process_state(child.pid) in ("T", "t"):  # who is stopped cannot leave by itself
                    child.kill()
        time.sleep(0.05)
    if killed:
        print(f"{killed}; {REMEDY if code == 4 else SAME}", file=sys.stderr, flush=True)
    return code
