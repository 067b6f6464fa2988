"""Errors that a user can act on, the exit codes of the command line, and a check of class names."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

EXIT_OK = 0  # exit code 1 is a bug in Duet
EXIT_USER = 2  # the user's input or environment
EXIT_SIGNAL = 3  # stopped by a signal, after saving
EXIT_HALTED = 4  # training stopped itself


class Expected(Exception):
    """An error that is not a bug in Duet.

    `run_cli` prints its message as one line, without a traceback.
    """

    exit_code: int
    of_rank: int | None = None  # the rank at fault, if all ranks raise the error: rank 0 prints it

    def __init__(self, message: str, *, rank_specific: bool = False, quiet: bool = False) -> None:
        super().__init__(message)
        # True if the other ranks do not raise this error, so that any rank must print it
        self.rank_specific = rank_specific
        self.quiet = quiet  # True if another process tells the user


class UserError(Expected, ValueError):
    """An error in the user's input or environment.

    The message is one line: the file, key or rank at fault, then the remedy.
    """

    exit_code = EXIT_USER


class DamageError(UserError):
    """The error for records of a packed file whose bytes have changed since they were written.

    The message counts records from the start of the file `path`. The attribute `records` counts
    them from the start of the data set, in which the first record of this file has the number
    `first`.
    """

    def __init__(self, path: Path, records: Sequence[int], reason: str, first: int) -> None:
        self.records = [record + first for record in records]
        self.reason = reason
        self._arguments = (path, records, reason, first)
        name = f"record {records[0]}"
        if len(records) > 1:
            is_range = records[-1] - records[0] == len(records) - 1
            name += f" to {records[-1]}" if is_range else f" and {len(records) - 1} more"
        # Other ranks may not read the same record, so every rank prints the message.
        super().__init__(
            f"{path}: {name} is damaged: {reason}; copy or pack the file again", rank_specific=True
        )

    def __reduce__(self) -> tuple[type["DamageError"], tuple[Path, Sequence[int], str, int]]:
        """Pickle the constructor's arguments. By default `Exception` pickles only the message."""
        return type(self), self._arguments


class StoppedBySignal(Expected):
    """The error for a command that a signal has stopped; a training has saved its state before."""

    exit_code = EXIT_SIGNAL


class TrainingHalted(Expected, RuntimeError):
    """The error for a training that cannot continue.

    Reasons are, for example, too many non-finite values, a lost rank, no memory, or a full disk.
    The last checkpoint is intact.
    """

    exit_code = EXIT_HALTED


@contextlib.contextmanager
def explained(
    faults: type[Exception] | tuple[type[Exception], ...],
    words: str | Callable[[Any], str | Exception],
) -> Iterator[None]:
    """Replace exceptions that the block raises.

    Args:
        faults: the types of the exceptions to replace.
        words: the message of the UserError to raise instead, or a function that takes the exception
            and returns this message or another exception to raise.
    """
    try:
        yield
    except faults as error:
        replacement = words if isinstance(words, str) else words(error)
        if isinstance(replacement, str):
            replacement = UserError(replacement)
        raise replacement from error


def refuse(*problems: tuple[object, str]) -> None:
    """Raise UserError if one of the pairs (condition, message) has a true condition.

    The first such pair supplies the message.
    """
    for holds, message in problems:
        if holds:
            raise UserError(message)


def require_same_classes(
    subject: str,
    names: Sequence[str],
    reference: str,
    reference_names: Sequence[str],
    remedy: str = "give those of the same classes",
) -> None:
    """Raise UserError unless two lists have the same class names in the same order.

    The message names the differences.

    Args:
        subject: the owner of `names`, for the message.
        reference: the owner of `reference_names`, for the message.
        remedy: the end of the message.
    """
    if list(names) == list(reference_names):
        return
    missing = sorted(set(reference_names) - set(names))
    extra = sorted(set(names) - set(reference_names))
    differences = []
    if missing:
        differences.append(f"{', '.join(missing[:10])} missing here")
    if extra:
        differences.append(f"{', '.join(extra[:10])} only here")
    if not differences:
        label = [*map(str.__eq__, names, reference_names)].index(False)
        differences = [
            f"class {label} is {names[label]!r} here and {reference_names[label]!r} there"
        ]
    raise UserError(
        f"{subject}: its classes are not those of {reference}: {'; '.join(differences)}; {remedy}"
    )
