"""Run a command in a fork with limits, and say whether it kept the promise that every command gives for any input.

The promise: exit code 0, 2 or 4; at most three lines on stderr; no traceback; no file left behind by a failure; memory
and time under their limits.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from duetgan.utils.distributed.process import run_cli
from tests.end_to_end import ranks

CODES = (0, 2, 4)
LINES = 3  # on stderr
LOGGING = ("train.py",)  # its log goes there: of a success any number of lines
SECONDS = 20  # of processor time
WALL = 60  # seconds: a machine may have others to serve, and a command that waits for ever uses no processor
MEMORY = 1 << 30  # bytes that the command may add to what the imports take
ADDRESSES = 4 << 30  # bytes of address space it may add; more than MEMORY, as threads and mapped files reserve some
FILE = 256 << 20  # bytes of the largest file that it may write

ROOT = Path(__file__).parents[2]
FRAME = re.compile(rf'File "{ROOT}/((?!\.venv|tests/)[^"]+)", line ([0-9]+)')  # of a traceback, in the program
MODULES = ranks.MODULES
LAZY: tuple[str, ...] = ("lmdb", "pyarrow.parquet", "jinja2", "matplotlib.figure")  # of MODULES
LAZY += ("duetgan.training.engine.run", "duetgan.inference.predictions", "duetgan.metrics.evaluate_gan")
LAZY += ("matplotlib.backends.backend_svg",)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    script: str
    code: int  # negative: the signal that ended it
    out: str
    err: str
    seconds: float  # wall
    added: int  # bytes of memory beyond its parent's, at its peak
    left: list[str]  # files that were not there before

    def faults(self) -> list[str]:
        """How it broke the promise; empty: it did not."""
        last = (self.err.strip().splitlines() or [""])[-1].strip()[:300]
        found = []
        if "Traceback (most recent call last)" in self.err + self.out:
            frames = FRAME.findall(self.err)
            found.append(f"traceback: {last} ({':'.join(frames[-1]) if frames else 'nowhere'})")
        elif self.code not in CODES:
            found.append(f"exit code {self.code}: {last}")
        elif (self.code or self.script not in LOGGING) and len(self.err.splitlines()) > LINES:
            found.append(f"{len(self.err.splitlines())} lines on stderr: {last}")
        if self.code and self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if self.added > MEMORY:
            found.append(f"{self.added >> 20} MiB of memory")
        if self.seconds > WALL:
            found.append(f"{self.seconds:.0f} s")
        return found


def warm_up() -> None:
    """Import everything, once for all forks."""
    import torch
    from PIL import Image

    torch.set_num_threads(1)
    for name in (*MODULES, *LAZY):
        importlib.import_module(name)
    Image.init()
    gc.collect()
    gc.freeze()  # or every fork would copy the memory of all that was imported when it collects garbage


def _leave(code: int) -> NoReturn:
    """End a fork without what the parent has registered for its own end."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def ended_by(work: Callable[[], object], log: Path) -> NoReturn:
    """End this process, a fork, by `work`, whose streams go to a file: exit code 1 if it raises."""
    code = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def run(prepare: Callable[[], Sequence[str]], folder: Path) -> tuple[list[str], Outcome]:
    """The command that `prepare()` returns after it has written its files into `folder`, and how it ended. Both happen
    in one fork, whose current folder that is; the streams go to files beside it.

    Raises RuntimeError if `prepare` fails.
    """
    out, err, plan = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err", "plan"))
    plan.unlink(missing_ok=True)
    resident = _status("VmRSS")
    limit = _status("VmSize") + ADDRESSES
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _in_fork(prepare, folder, (out, err, plan), limit)
    code, peak = _wait(pid, started + WALL)
    seconds = time.monotonic() - started
    told, errors = (path.read_text(errors="replace") for path in (out, err))
    if not plan.is_file():
        raise RuntimeError(errors[-2000:] or f"the case could not be prepared: {code}")
    planned = json.loads(plan.read_text())
    left = sorted(_files(folder) - set(planned["files"]))
    argv, added = planned["argv"], max(0, peak - resident)
    return argv, Outcome(argv[0], code, told, errors, seconds, added, left)


def _wait(pid: int, deadline: float) -> tuple[int, int]:
    """The exit code of a child and its peak of memory in bytes; it is killed at the deadline."""
    pause = 0.001
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            break
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has started and not ended
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def _in_fork(
    prepare: Callable[[], Sequence[str]], folder: Path, streams: tuple[Path, Path, Path], addresses: int
) -> NoReturn:
    """`prepare`, the limits, the command."""
    code = 1
    out, err, plan = streams
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        for number, path in enumerate((Path(os.devnull), out, err)):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags, 0o644), number)
        argv = list(prepare())
        plan.write_text(json.dumps({"argv": argv, "files": sorted(_files(folder))}))
        os.ftruncate(2, 0)  # warnings of who prepared
        os.lseek(2, 0, os.SEEK_SET)
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = run_cli(_main(argv[0]), argv[1:])
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code  # of the options
        else:
            traceback.print_exc()
    finally:
        _leave(code)


def _main(name: str) -> Callable[[list[str]], int | None]:
    return importlib.import_module(ranks.command_of([name])[0]).main


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _status(key: str) -> int:
    """Bytes of this process by /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
