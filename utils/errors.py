"""Errors a user can act on, and the exit codes of the command line."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

EXIT_OK = 0  # 1: a fault of ours
EXIT_USER = 2  # the user's input or environment
EXIT_SIGNAL = 3  # stopped by a signal, after saving
EXIT_HALTED = 4  # training stopped itself


class Expected(Exception):
    """What `run_cli` prints as one line: no fault of ours."""

    exit_code: int
    of_rank: int | None = None  # raised on all ranks because of this one: rank 0 prints it

    def __init__(self, message: str, *, rank_specific: bool = False, quiet: bool = False) -> None:
        super().__init__(message)
        self.rank_specific = rank_specific  # other ranks do not raise the same: print it whatever the rank
        self.quiet = quiet  # another process tells the user


class UserError(Expected, ValueError):
    """Bad input or environment. The message is one line: the file, key or rank at fault, then the remedy."""

    exit_code = EXIT_USER


class StoppedBySignal(Expected):
    """Training was asked to stop and has saved its state."""

    exit_code = EXIT_SIGNAL


class TrainingHalted(Expected, RuntimeError):
    """Training cannot go on (non-finite cap, lost rank, memory, disk); the last checkpoint is intact."""

    exit_code = EXIT_HALTED


@contextlib.contextmanager
def explained(
    faults: type[Exception] | tuple[type[Exception], ...],
    words: str | Callable[[Any], str | Exception],
) -> Iterator[None]:
    """One of `faults` that is raised inside becomes a UserError of these words, or what `words` makes of it."""
    try:
        yield
    except faults as error:
        made = words if isinstance(words, str) else words(error)
        raise (UserError(made) if isinstance(made, str) else made) from error
