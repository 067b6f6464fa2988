"""The standard streams of a script: closed, full, or a terminal that is gone; and Ctrl-C before a script has begun."""

import errno
import io
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any, NoReturn, TextIO

from utils.processes import leave_imports

INTERRUPTED = "stopped: interrupted from the keyboard"
GONE = (errno.EIO, errno.ENXIO)  # of a terminal that was closed: nobody is left to be told


class _Tolerant(io.FileIO):
    """A stream's file: what it refuses is dropped from then on, and `refused` says why. Stdout's reader may leave."""

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
    """Make both streams such that writing to them raises nothing but stdout's BrokenPipeError; once per process.

    Where one was closed before the start, files would get its number, and what libraries print would end in them.
    Streams that were replaced already (by tests) are left alone.
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
        options = {name: getattr(stream, name) for name in ("line_buffering", "write_through", "encoding")}
    return io.TextIOWrapper(io.BufferedWriter(file), errors="backslashreplace", **options)


def lost() -> str:
    """Why results did not reach stdout; empty where they did, where there were none, and where a terminal is gone."""
    buffer = getattr(sys.stdout, "buffer", None)
    file = getattr(buffer, "raw", None)
    if not isinstance(file, _Tolerant) or file.refused is None or file.refused.errno in GONE:
        return ""
    return str(file.refused.strerror)


def silence_stdout() -> None:
    """Let what is still buffered go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told_once(kind: type[BaseException], error: BaseException, where: types.TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # the process then dies of SIGINT, as shells expect it
        if os.environ.get("RANK", "0") == "0":
            print(INTERRUPTED, file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, where)


def _interrupt(_signum: int, frame: types.FrameType | None) -> NoReturn:
    leave_imports(frame, INTERRUPTED if os.environ.get("RANK", "0") == "0" else "", 128 + signal.SIGINT)
    raise KeyboardInterrupt


def hear_interrupts() -> None:
    """Make a Ctrl-C that nobody handles one line: while a script of ours imports what it needs. Others' processes,
    which import a part of this project, are left as they are.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    beside_us = script is not None and Path(script).absolute().parent == Path(__file__).absolute().parents[1]
    ours = beside_us or sys.argv[:1] == ["-m"]
    if ours and sys.excepthook is sys.__excepthook__ and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        sys.excepthook = _told_once
        signal.signal(signal.SIGINT, _interrupt)
