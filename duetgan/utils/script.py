"""How a script runs: its errors as one line and an exit code, its streams that may be closed, full
or gone, Ctrl-C; how its process and those that it starts end, and whether one lives.
"""

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from duetgan.utils import threads
from duetgan.utils.errors import EXIT_OK, EXIT_USER, Expected, StoppedBySignal
from duetgan.utils.text import printable, shorten

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it, `parent`, is gone, however
    that ends: `kill -9` leaves no orphan. To be called in the child, which ends here if its parent
    has ended already. Linux only.
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


def leave_imports(frame: types.FrameType | None, line: str, code: int) -> None:
    """For signal handlers: end this process with a line on stderr and an exit code if `frame` is
    inside an import. An exception that is raised there may have to pass C++, as in torch's import,
    which aborts the process.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    if frame is not None:
        with contextlib.suppress(OSError):  # a terminal that is gone, or a full disk
            os.write(2, f"{line}\n".encode() if line else b"")
        os._exit(code)


_threads_left = False


def leave_threads() -> None:
    """Have `leave` end this process at once: threads of a library are left that nobody waits for,
    such as those of a process group that is not destroyed. One that asks for Python's lock while
    the interpreter ends is unwound inside C++, which aborts the process ("terminate called without
    an active exception").
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


INTERRUPTED = "stopped: interrupted from the keyboard"
GONE = (errno.EIO, errno.ENXIO)  # of a terminal that was closed: nobody is left to be told


def _code_of(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    try:
        return main(argv) or EXIT_OK
    except SystemExit as end:  # of --help
        if isinstance(end.code, str):
            raise
        return int(end.code or EXIT_OK)


def exit_cli(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """`run_cli`, and the end of this process."""
    try:
        code = run_cli(main, argv)
    except Exception:  # a fault of ours
        traceback.print_exc()
        code = 1
    leave(code)


def run_cli(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Call `main(argv)`; what it raises becomes a line on stderr (`--debug`: a traceback too) and
    an exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    guard()
    threads.begin()
    # a name that the terminal's encoding lacks must not end the work
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _code_of(main, argv)
        sys.stdout.flush()  # here, where a closed pipe can be told from a fault
        if why := lost():
            print(
                f"error: standard output: {why}; what was to be printed is lost",
                file=sys.stderr,
                flush=True,
            )
            return code or EXIT_USER
        return code
    except BrokenPipeError:  # the reader of our output has seen enough: `| head`
        # where what is still buffered goes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Expected as error:
        if debug:
            traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        telling = rank == "0" or (error.of_rank is None and error.rank_specific)
        rank = rank if error.of_rank is None else str(error.of_rank)
        if telling and not error.quiet:
            label = "stopped" if isinstance(error, StoppedBySignal) else "error"
            where = f" on rank {rank}" if rank != "0" else ""
            print(
                f"{label}{where}: {printable(' '.join(str(error).split()))}",
                file=sys.stderr,
                flush=True,
            )
        return error.exit_code
    except OSError as error:  # a path that no file can have may fail wherever it is first looked at
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP) or debug:
            raise
        name = shorten(printable(str(error.filename)), 80)
        print(f"error: {name}: {error.strerror}; give another path", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(INTERRUPTED, file=sys.stderr, flush=True)
        return 130


class _Tolerant(io.FileIO):
    """A stream's file: what it refuses is dropped from then on, and `refused` says why. Stdout's
    reader may leave.
    """

    refused: OSError | None = None
    was_closed = False  # before the start

    def write(self, data: Any, /) -> int:
        if self.refused is None:
            try:
                if self.was_closed:
                    raise OSError(errno.EBADF, "it is closed")
                return super().write(data)
            except OSError as error:
                if self.fileno() == 1 and isinstance(error, BrokenPipeError):
                    raise
                self.refused = error
        return len(data)


def guard() -> None:
    """Make both streams such that writing to them raises nothing but stdout's BrokenPipeError; once
    per process.

    Where one was closed before the start, files would get its number, and what libraries print
    would end in them. Streams that were replaced already (by tests) are left alone.
    """
    closed = [number for number in (0, 1, 2) if not _is_open(number)]
    for _ in closed:
        where = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        os.set_inheritable(where, True)  # the others go to the processes below as well
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream, first = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is first and (stream is None or isinstance(stream, io.TextIOWrapper)):
            setattr(sys, name, _guarded(number, stream, closed=stream is None or number in closed))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _guarded(number: int, stream: TextIO | None, *, closed: bool) -> TextIO:
    file = _Tolerant(number, "w", closefd=False)
    file.was_closed = closed
    options: dict[str, Any] = {"line_buffering": number == 2, "encoding": "utf-8"}
    if isinstance(stream, io.TextIOWrapper):
        options = {
            name: getattr(stream, name) for name in ("line_buffering", "write_through", "encoding")
        }
    return io.TextIOWrapper(io.BufferedWriter(file), errors="backslashreplace", **options)


def lost() -> str:
    """Why results did not reach stdout; empty where they did, where there were none, and where a
    terminal is gone.
    """
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(file, _Tolerant) or file.refused is None or file.refused.errno in GONE:
        return ""
    return str(file.refused.strerror)


def _told_once(
    kind: type[BaseException], error: BaseException, where: types.TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):  # the process then dies of SIGINT, as shells expect it
        if os.environ.get("RANK", "0") == "0":
            print(INTERRUPTED, file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, where)


def _interrupt(_signum: int, frame: types.FrameType | None) -> NoReturn:
    leave_imports(
        frame, INTERRUPTED if os.environ.get("RANK", "0") == "0" else "", 128 + signal.SIGINT
    )
    raise KeyboardInterrupt


def handle_interrupts() -> None:
    """Make Ctrl-C one line on stderr until a command handles it: while it imports what it needs.

    Does nothing where SIGINT is ignored or has a handler already.
    """
    if (
        sys.excepthook is sys.__excepthook__
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        sys.excepthook = _told_once
        signal.signal(signal.SIGINT, _interrupt)


def python_arguments(command: str, *arguments: str) -> list[str]:
    """Return Python's arguments for a command of Duet in a process of its own, which needs
    `child_environment`.
    """
    return ["-P", "-m", "duetgan", command, *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment with a PYTHONPATH in which a child process finds this same
    package.
    """
    paths = [
        str(Path(__file__).resolve().parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
