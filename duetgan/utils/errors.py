"""Errors a user can act on, and the exit codes of the command line; whether two lists of class
names are the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from duetgan.utils.text import listed

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
        # other ranks do not raise the same: print it whatever the rank
        self.rank_specific = rank_specific
        self.quiet = quiet  # another process tells the user


class UserError(Expected, ValueError):
    """Bad input or environment. The message is one line: the file, key or rank at fault, then the
    remedy.
    """

    exit_code = EXIT_USER


class StoppedBySignal(Expected):
    """Training was asked to stop and has saved its state."""

    exit_code = EXIT_SIGNAL


class TrainingHalted(Expected, RuntimeError):
    """Training cannot go on (non-finite cap, lost rank, memory, disk); the last checkpoint is
    intact.
    """

    exit_code = EXIT_HALTED


@contextlib.contextmanager
def explained(
    faults: type[Exception] | tuple[type[Exception], ...],
    words: str | Callable[[Any], str | Exception],
) -> Iterator[None]:
    """One of `faults` that is raised inside becomes a UserError of these words, or what `words`
    makes of it.
    """
    try:
        yield
    except faults as error:
        made = words if isinstance(words, str) else words(error)
        raise (UserError(made) if isinstance(made, str) else made) from error


def refuse(*problems: tuple[object, str]) -> None:
    """Raise UserError with the first message whose condition holds."""
    for holds, message in problems:
        if holds:
            raise UserError(message)


def require_same_classes(
    who: str,
    names: Sequence[str],
    other: str,
    others: Sequence[str],
    remedy: str = "give those of the same classes",
) -> None:
    """Raise UserError unless two lists of classes are the same, order included; it says what
    differs.
    """
    names, others = list(names), list(others)
    if names == others:
        return
    sides = ((others, names, "missing here"), (names, others, "only here"))
    odd = [(sorted(set(some) - set(rest)), where) for some, rest, where in sides]
    differences = [f"{listed(those)} {where}" for those, where in odd if those]
    if not differences:
        place = next(
            i for i, (name, theirs) in enumerate(zip(names, others, strict=False)) if name != theirs
        )
        differences = [f"class {place} is {names[place]!r} here and {others[place]!r} there"]
    raise UserError(
        f"{who}: its classes are not those of {other}: {'; '.join(differences)}; {remedy}"
    )
