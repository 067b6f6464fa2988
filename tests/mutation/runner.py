"""Run the tests of each mutant in a fork of a process that has imported the slow libraries already."""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.recording import Recording

# Imported once, before the forks; none of them starts a thread on import.
SLOW_IMPORTS = (
    "av", "cv2", "lmdb", "matplotlib.pyplot", "numpy", "PIL.Image", "pydantic", "safetensors.torch", "scipy.stats",
    "simplejpeg", "tensorboard", "torch", "torch.distributed", "torch.utils.tensorboard", "torchvision", "yaml",
)  # fmt: skip
TOKEN = "DUET_MUTANT"  # an environment variable that marks the processes of a mutant
MEMORY = 10 << 30  # bytes of private memory of a process; a changed number may ask for any amount
NOTICED, SURVIVED, UNTESTED, TIMEOUT = "noticed", "survived", "untested", "timeout"


@dataclass
class Result:
    """The outcome of one mutant; `test`: the first test that failed."""

    mutant: Mutant
    status: str
    test: str
    seconds: float
    tests: int

    def as_dict(self) -> dict[str, object]:
        mutant = self.mutant
        return {
            "key": mutant.key,
            "status": self.status,
            "kind": mutant.kind,
            "place": f"{mutant.path}:{mutant.first_line}",
            "function": mutant.function,
            "before": mutant.before,
            "after": mutant.text,
            "test": self.test,
            "seconds": round(self.seconds, 1),
            "tests": self.tests,
        }


class Clone:
    """A copy of the checkout in which one file is changed at a time."""

    _second = int(time.time())  # Python compares whole seconds to tell whether its bytecode is stale

    def __init__(self, repository: Path, folder: Path) -> None:
        self.root = folder
        if not folder.is_dir():
            subprocess.run(["git", "clone", "-q", "--shared", str(repository), str(folder)], check=True)
        for command in (["fetch", "-q", "origin", "HEAD"], ["reset", "-q", "--hard", "FETCH_HEAD"], ["clean", "-fdq"]):
            subprocess.run(["git", *command], cwd=folder, check=True)

    def write(self, path: str, content: bytes) -> None:
        Clone._second += 1
        target = self.root / path
        target.write_bytes(content)
        os.utime(target, (Clone._second, Clone._second))


def order(tests: Sequence[str], path: str, recording: Recording, limit: float) -> list[str]:
    """Return the tests to run, file by file: the nearest files first, then the fastest; at most `limit` seconds.

    A file is near if it mirrors the path of the changed file or bears its name, or if it is an oracle of whole steps;
    then come the files of the same top folder. A file takes at most a quarter of the limit; what time is left goes to
    the fastest of the other tests. The first test is always among them.
    """
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.split("::")[0]].append(test)
    folders = Path(path.removeprefix("duetgan/")).parent.parts
    stem = Path(path).stem

    def rank(file: str) -> tuple[int, float]:
        mirrored = Path(file).parts[1:-1]
        is_near = stem in Path(file).stem or mirrored in (folders, ("oracle",))
        distance = 0 if is_near else 1 if mirrored[:1] == folders[:1] else 2
        return distance, sum(min(recording.seconds[t], 5.0) for t in by_file[file])

    chosen: list[str] = []
    total = 0.0
    for file in sorted(by_file, key=rank):
        of_file = 0.0
        for test in sorted(by_file[file], key=recording.seconds.__getitem__):
            of_file += recording.seconds[test]
            if chosen and (of_file > limit / 4 or total + recording.seconds[test] > limit):
                break
            total += recording.seconds[test]
            chosen.append(test)
    for test in sorted(set(tests) - set(chosen), key=recording.seconds.__getitem__):
        total += recording.seconds[test]
        if total > limit:
            break
        chosen.append(test)
    return chosen


class _FirstFailure:
    def __init__(self) -> None:
        self.test = ""
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def _child(root: Path, tests: Sequence[str], token: str, output: Path, stop: bool, base: Path) -> None:
    """Run the tests in this process, a fork, with temporary folders in `base`; write the first failure to `output`."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[TOKEN] = token
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(root / "build" / "pycache")
    os.environ["PYTHONPATH"] = str(root)  # child processes, too, import the mutant
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    sys.dont_write_bytecode = False
    os.chdir(root)
    for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
        del sys.modules[name]  # the clone has its own
    sys.path[:] = [str(root), *(p for p in sys.path if p not in ("", str(root)))]
    first = _FirstFailure()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={base}", "-m", "not slow"]
    code = pytest.main([*(["-x"] if stop else []), *options, *tests], plugins=[first])
    output.write_text(json.dumps({"code": int(code), "test": first.test, "failures": first.failures}))


class Runner:
    """Runs jobs, one in each clone at a time."""

    def __init__(self, clones: Sequence[Clone], recording: Recording, limit: float) -> None:
        self.clones = list(clones)
        self.recording = recording
        self.limit = limit
        self.scratch = tempfile.TemporaryDirectory()
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path.cwd()]
        for name in SLOW_IMPORTS:
            importlib.import_module(name)
        loaded = [name for name in sys.modules if name == "duetgan" or name.startswith("duetgan.")]
        assert not loaded, "the product must be imported from the clones"

    def run(self, mutants: Sequence[Mutant], report: Callable[[Result], None], excluded: set[str]) -> None:
        """Run the tests of each mutant, but those that are excluded; report the results as they come."""
        waiting = list(reversed(mutants))
        free = list(self.clones)
        running: dict[int, tuple[Clone, Mutant, Path, float, float, int]] = {}
        while waiting or running:
            while waiting and free:
                mutant = waiting.pop()
                tests = self.recording.tests_of(mutant.path, mutant.first_line, mutant.last_line)
                tests = order([t for t in tests if t not in excluded], mutant.path, self.recording, self.limit)
                if not tests:
                    report(Result(mutant, UNTESTED, "", 0.0, 0))
                    continue
                clone = free.pop()
                clone.write(mutant.path, mutant.apply((clone.root / mutant.path).read_bytes()))
                output = clone.root.parent / f"{clone.root.name}.json"
                output.unlink(missing_ok=True)
                seconds = sum(self.recording.seconds[t] for t in tests)
                pid = self._fork(clone.root, tests, mutant.key, output, stop=True)
                running[pid] = (clone, mutant, output, time.monotonic(), 120 + 4 * seconds, len(tests))
            time.sleep(0.05)
            for pid, (clone, mutant, output, start, allowed, count) in list(running.items()):
                seconds = time.monotonic() - start
                is_late = seconds > allowed
                if not is_late and os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
                _kill(pid, mutant.key, reap=is_late)
                del running[pid]
                status, test = (TIMEOUT, "") if is_late else _outcome(output)
                report(Result(mutant, status, test, seconds, count))
                subprocess.run(["git", "checkout", "-q", "--", mutant.path], cwd=clone.root, check=True)
                clone.write(mutant.path, (clone.root / mutant.path).read_bytes())
                free.append(clone)

    def failures_unchanged(self, tests: Sequence[str]) -> list[str]:
        """Return those of the tests that fail in an unchanged clone: what they noticed counts for nothing."""
        if not tests:
            return []
        clone = self.clones[0]
        output = clone.root.parent / "unchanged.json"
        pid = self._fork(clone.root, sorted(tests), "unchanged", output, stop=False)
        os.waitpid(pid, 0)
        _kill(pid, "unchanged", reap=False)
        failures: list[str] = json.loads(output.read_text())["failures"]
        return sorted(set(failures))

    def _fork(self, root: Path, tests: Sequence[str], token: str, output: Path, *, stop: bool) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                _child(root, tests, token, output, stop, Path(self.scratch.name, root.name))
            finally:
                os._exit(0)
        return pid


def _outcome(output: Path) -> tuple[str, str]:
    if not output.is_file():
        return NOTICED, "the test process died"
    result = json.loads(output.read_text())
    if result["code"] == pytest.ExitCode.OK:
        return SURVIVED, ""
    if result["code"] == pytest.ExitCode.NO_TESTS_COLLECTED:
        return UNTESTED, ""
    return NOTICED, result["test"] or f"exit code {result['code']}"


def _kill(pid: int, token: str, *, reap: bool) -> None:
    """End the process group and every process that inherited the mutant's token."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in _marked(token):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    if reap:
        os.waitpid(pid, 0)


def _marked(token: str) -> Iterator[int]:
    mark = f"{TOKEN}={token}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
