"""Commands of the fault suite, each in a fork that has imported torch, which costs a process of its own four seconds;
their ranks are forks as well. A command sees what it would see in a process of its own.
"""

import gc
import importlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from duetgan.utils.distributed import launch
from duetgan.utils.distributed.process import STOP_SIGNALS, exit_cli
from tests.conftest import REPOSITORY
from tests.end_to_end.ranks import CONTEXT, command_of
from tests.faults import inject
from tests.slim import slim_down


def become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """`python ARGV...` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    module, arguments = command_of(argv)
    exit_cli(importlib.import_module(module).main, arguments)


class Rank:
    """What `launch` takes for a `subprocess.Popen`: a fork of the launcher."""

    def __init__(
        self, command: list[str], *, env: Mapping[str, str], start_new_session: bool, preexec_fn: Callable[[], None]
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            assert start_new_session
            os.setsid()
            preexec_fn()
            for signum in STOP_SIGNALS:
                signal.signal(signum, signal.SIG_DFL if signum != signal.SIGINT else signal.default_int_handler)
            become(command[1:], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin(argv: Sequence[str], files: Sequence[str], environment: Mapping[str, str], folder: Path) -> NoReturn:
    """In the fork: classifiers are slim, reports have no curves, and faults are put in if some are asked for."""
    gc.freeze()  # or the collector would copy the memory of all that was imported
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.chdir(folder)
    slim_down()
    if environment.get(inject.VARIABLE):
        inject.install(setattr)
    launch.subprocess = SimpleNamespace(Popen=Rank)  # type: ignore[assignment]
    become(argv, environment)


class Fork:
    """A started command, with what the tests use of a `subprocess.Popen`."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], folder: Path = REPOSITORY) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.files = [str(Path(self.folder.name) / name) for name in ("out", "err")]
        self.told: tuple[str, str] | None = None
        process: Any = CONTEXT.Process(target=begin, args=(argv, self.files, environment, folder))
        process.start()
        self.process, self.pid = process, int(process.pid)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        if self.told is None:
            out, err = (Path(path).read_text() for path in self.files)
            self.told = out, err
            self.folder.cleanup()
        return self.told
