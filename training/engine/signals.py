"""Signals that ask a run to stop: SIGTERM, SIGINT, SIGHUP, and SIGUSR1, with which SLURM warns of the end of a job."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import FrameType

from utils.distributed import collectives
from utils.distributed.launch import handling, obeyed_signals


class StopSignals:
    """`saved_step`: gives the step of the last checkpoint, for the message."""

    def __init__(self, saved_step: Callable[[], int]) -> None:
        self._saved_step = saved_step
        self._received = 0

    def listening(self) -> AbstractContextManager[None]:
        """Inside the block the first signal is kept for `agreed`, and a second one ends the process at once."""
        return handling(self._receive, obeyed_signals())

    def agreed(self) -> int:
        """The signal that a rank has received, the same on all ranks; 0: none has."""
        return collectives.all_reduce_max(self._received)

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        # SIGUSR1 may come twice: SLURM gives it to all processes and to their launcher
        if self._received and signum != signal.SIGUSR1:
            self._tell(signum, f"left without saving; the last checkpoint is of step {self._saved_step()}")
            os._exit(128 + signum)
        if not self._received:
            self._tell(signum, "saving after this step, and what is under way; a second signal leaves at once")
        self._received = self._received or signum

    def _tell(self, signum: int, what: str) -> None:
        """A line on stderr, from within a signal handler (rank 0)."""
        if collectives.is_main():
            with suppress(OSError):  # a terminal that is gone, or a full disk
                os.write(2, f"{signal.Signals(signum).name}: {what}\n".encode())
