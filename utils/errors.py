"""Errors a user can act on, the exit codes of the command line, and the one place that prints them."""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from utils import streams
from utils.door import printable
from utils.processes import leave, threads_left
from utils.text import shorten

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


def _code_of(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    try:
        return main(argv) or EXIT_OK
    except SystemExit as end:  # of --help
        if isinstance(end.code, str):
            raise
        return int(end.code or EXIT_OK)


def exit_cli(main: Callable[[list[str]], int | None]) -> NoReturn:
    """`run_cli`, and the end of this process."""
    try:
        code = run_cli(main)
    except Exception:  # a fault of ours
        if not threads_left():
            raise
        traceback.print_exc()
        code = 1
    leave(code)


def run_cli(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Call `main(argv)`; what it raises becomes a line on stderr (`--debug`: a traceback too) and an exit code."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    streams.guard()
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks must not end the work
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _code_of(main, argv)
        sys.stdout.flush()  # here, where a closed pipe can be told from a fault
        if why := streams.lost():
            print(f"error: standard output: {why}; what was to be printed is lost", file=sys.stderr, flush=True)
            return code or EXIT_USER
        return code
    except BrokenPipeError:  # the reader of our output has seen enough: `| head`
        streams.silence_stdout()
        return 128 + signal.SIGPIPE
    except Expected as error:
        if debug:
            traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        told = rank == "0" or (error.of_rank is None and error.rank_specific)
        rank = rank if error.of_rank is None else str(error.of_rank)
        if told and not error.quiet:
            label = "stopped" if isinstance(error, StoppedBySignal) else "error"
            where = f" on rank {rank}" if rank != "0" else ""
            print(f"{label}{where}: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:  # a path that no file can have may fail wherever it is first looked at
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP) or debug:
            raise
        name = shorten(printable(str(error.filename)), 80)
        print(f"error: {name}: {error.strerror}; give another path", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(streams.INTERRUPTED, file=sys.stderr, flush=True)
        return 130
