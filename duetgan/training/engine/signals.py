"""Signals that stop a run after a step: SIGTERM, SIGINT, SIGHUP, and SIGUSR1.

A scheduler or torchrun may send SIGTERM to one process only. (Duet's launcher,
utils/distributed/launch.py, forwards it to all processes. SLURM sends SIGUSR1 before it ends a
job.) If rank 0 receives the signal, rank 1 stops in the same step:

1. Rank 0 only remembers the signal (`_receive`) and finishes its step, with the evaluation and the
   checkpoint that are due. Rank 1 knows nothing yet.
2. After each step `Loop` calls `after_iteration`, in which all ranks exchange the signals that they
   have received (`agreed`). Here rank 1 learns of the signal. (After a roll-back this happens one
   step later.)
3. All ranks call `Loop.save`. Rank 0 writes the checkpoint and status.json. Rank 1 waits for rank 0
   at a barrier, however long the writing takes.
4. All ranks raise StoppedBySignal. Rank 0 writes the report, for which rank 1 waits
   (engine/run.py), and prints the message of the exception. `run_cli`
   (utils/distributed/process.py) returns exit code 3 on each rank.

Before and after training, a signal ends the process at once (`leaving_on_signals` in process.py;
under a launcher, the default action of the signal).
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.outputs import StatusFile
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.process import handling, obeyed_signals
from duetgan.utils.errors import StoppedBySignal


class StopSignals(Callback):
    """A callback that saves and stops the run if any rank has received a signal."""

    def __init__(self, status: StatusFile) -> None:
        self.status = status
        self._received = 0  # first signal that this process has received

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Remember signals that arrive inside the block, instead of ending the process."""
        with handling(self._receive, obeyed_signals()):
            yield

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        """Remember the first signal until the end of the step; exit at once at a second one.

        A second signal that is SIGUSR1 is ignored.
        """
        is_first = not self._received
        # SLURM may deliver SIGUSR1 twice: to all processes, and through their launcher.
        exits = not is_first and signum != signal.SIGUSR1
        message = "saving after this step, and what is under way; a second signal leaves at once"
        if exits:
            message = "left without saving; the same command resumes from the last checkpoint"
        if (exits or is_first) and collectives.is_main():
            with suppress(OSError):  # The terminal may be closed, or the disk full.
                os.write(2, f"{signal.Signals(signum).name}: {message}\n".encode())
        if exits:
            os._exit(128 + signum)
        self._received = self._received or signum

    def agreed(self) -> int:
        """Return the number of a signal that some rank has received; 0 if no rank has one.

        All ranks must call this, and get the same number.
        """
        return collectives.all_reduce_max(self._received)

    def after_iteration(self, loop: Loop) -> None:
        signum = self.agreed()
        if not signum:
            return
        loop.save()
        loop.off_the_clock(loop.manager.wait)  # The other ranks wait at its barrier.
        saved = collectives.broadcast_object(loop.manager.saved_step)
        name = signal.Signals(signum).name
        self.status.write(loop, "stopped", name, StoppedBySignal.exit_code)
        raise StoppedBySignal(
            f"{name} at step {loop.step}; saved at step {saved}. The same command resumes from there."
        )
