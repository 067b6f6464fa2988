"""Run a Duet command: one-line errors, exit codes, broken streams, signals, child processes."""

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from duetgan.utils import machine
from duetgan.utils.errors import EXIT_OK, EXIT_USER, Expected, StoppedBySignal
from duetgan.utils.text import printable

SAME = "nothing was lost, the same command resumes"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # constant of <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, even by `kill -9` (Linux only).

    The child calls this with the parent's process id. If the parent has already ended, this process
    ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def process_state(pid: int) -> str | None:
    """Return the state letter in /proc/PID/stat ("T": stopped, "Z": ended).

    Returns None if there is no such process or no /proc.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def leave_imports(frame: types.FrameType | None, line: str, code: int) -> None:
    """Print `line` on stderr and end this process if `frame` is inside an import; else do nothing.

    Signal handlers call this before they raise. An exception that is raised inside an import, such
    as torch's, may have to pass through C++ code, which aborts the process.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    if frame is not None:
        with contextlib.suppress(OSError):  # the terminal may be gone, or the disk full
            os.write(2, f"{line}\n".encode() if line else b"")
        os._exit(code)


_threads_left = False


def leave_threads() -> None:
    """Make `leave` end this process without clean-up, because threads of a library still run.

    Such threads belong, for example, to a process group that is not destroyed. If one of them asks
    for Python's lock while the interpreter ends, it is unwound inside C++, which aborts the process
    ("terminate called without an active exception").
    """
    global _threads_left
    _threads_left = True


def leave(code: int) -> NoReturn:
    """End this process with exit code `code`, without clean-up if `leave_threads` was called."""
    if _threads_left:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


INTERRUPTED = "stopped: interrupted from the keyboard"
GONE = (errno.EIO, errno.ENXIO)  # errors of a closed terminal, which nobody reads


def exit_cli(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """Call `run_cli` and end this process with its exit code.

    After an unexpected exception, a bug in Duet, print the traceback and use exit code 1.
    """
    try:
        code = run_cli(main, argv)
    except Exception:  # a bug in Duet
        traceback.print_exc()
        code = 1
    leave(code)


def run_cli(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Call `main(argv)` and return the exit code.

    An `Expected` error is printed as one line on stderr; `--debug` adds its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    guard()
    machine.start_measuring()
    try:
        try:
            code = main(argv) or EXIT_OK
        except SystemExit as end:  # raised by --help
            code = int(end.code or EXIT_OK)
        sys.stdout.flush()  # flushed here, so that a closed pipe is noticed below
        if reason := stdout_error():
            print(
                f"error: standard output: {reason}; the output is incomplete",
                file=sys.stderr,
                flush=True,
            )
            return code or EXIT_USER
        return code
    except BrokenPipeError:  # the reader of the output has ended, as `| head` does
        # The rest of the buffer goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Expected as error:
        if debug:
            traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        prints = rank == "0" or (error.of_rank is None and error.rank_specific)
        rank = rank if error.of_rank is None else str(error.of_rank)
        if prints and not error.quiet:
            label = "stopped" if isinstance(error, StoppedBySignal) else "error"
            where = f" on rank {rank}" if rank != "0" else ""
            print(
                f"{label}{where}: {printable(' '.join(str(error).split()))}",
                file=sys.stderr,
                flush=True,
            )
        return error.exit_code
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(INTERRUPTED, file=sys.stderr, flush=True)
        return 130


class _Tolerant(io.FileIO):
    """The raw file of stdout or stderr, which ignores failed writes.

    After a failed write, whose error is `refused`, all output is dropped. Only BrokenPipeError on
    stdout is raised.
    """

    refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.refused is None:
            try:
                return super().write(data)
            except OSError as error:
                if self.fileno() == 1 and isinstance(error, BrokenPipeError):
                    raise
                self.refused = error
        return len(data)


def guard() -> None:
    """Replace stdout and stderr by streams that raise no error if they cannot be written.

    The disk may be full, or the terminal gone. Only BrokenPipeError on stdout is raised. Characters
    that the encoding lacks are written as escapes. Streams that tests have replaced are left alone.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            guarded = io.TextIOWrapper(
                io.BufferedWriter(_Tolerant(number, "w", closefd=False)),
                encoding=stream.encoding,
                errors="backslashreplace",
                # `python -u` has no buffer to flush, but the stream here has one
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, guarded)


def stdout_error() -> str:
    """Return the reason why output was lost on stdout, or "" if none was.

    A terminal that is gone counts as no loss, because nobody reads it.
    """
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(file, _Tolerant) or file.refused is None or file.refused.errno in GONE:
        return ""
    return str(file.refused.strerror)


def _interrupt(_signum: int, frame: types.FrameType | None) -> NoReturn:
    leave_imports(
        frame, INTERRUPTED if os.environ.get("RANK", "0") == "0" else "", 128 + signal.SIGINT
    )
    raise KeyboardInterrupt


def handle_interrupts() -> None:
    """Install a handler for Ctrl-C, which ends this process with one line during an import.

    At other times the handler raises KeyboardInterrupt. If SIGINT is ignored or already has a
    handler other than Python's default, nothing is installed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def obeyed_signals() -> list[signal.Signals]:
    """Return the signals that a command handles: STOP_SIGNALS, without SIGHUP if it is ignored.

    nohup makes a process ignore SIGHUP. Other ignored signals are handled nevertheless: shells
    ignore SIGINT for background jobs, and cluster/slurm.sh ignores SIGUSR1 for torchrun.
    """
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if not (ignores_hangup and signum == signal.SIGHUP)]


@contextlib.contextmanager
def handling(
    handler: Callable[[int, types.FrameType | None], object], signals: Iterable[signal.Signals]
) -> Iterator[None]:
    """Install `handler` for these signals inside the block."""
    previous = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            # None: it was not installed by Python
            signal.signal(signum, previous_handler or signal.SIG_DFL)


def leaving_on_signals() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in whose block SIGTERM, SIGUSR1 and SIGHUP raise StoppedBySignal.

    It is used at the start and the end of a training, when the training does not handle signals. A
    signal that is ignored or has another handler is left alone.
    """

    def leave(signum: int, frame: types.FrameType | None) -> NoReturn:
        message = f"{signal.Signals(signum).name}; {SAME}"
        leave_imports(frame, f"stopped: {message}", StoppedBySignal.exit_code)
        raise StoppedBySignal(message)

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    return handling(
        leave, [signum for signum in signals if signal.getsignal(signum) is signal.SIG_DFL]
    )


def python_arguments(command: str, *arguments: str) -> list[str]:
    """Return the arguments with which Python runs the Duet command `command` in a new process.

    The environment of the process must be that of `child_environment`.
    """
    return ["-P", "-m", "duetgan", command, *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment with the folder of this package first in PYTHONPATH."""
    paths = [
        str(Path(__file__).resolve().parents[3]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
