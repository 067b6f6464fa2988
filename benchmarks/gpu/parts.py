"""The parts, and the process that each of them is: one that crashes or hangs takes no other's figures along."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import book as books
from benchmarks.gpu import nvidia, peers, ranks, steps, switches, trainings
from benchmarks.gpu.book import Book, Missed, NotThere, Setting, first_line
from benchmarks.gpu.wheels import ROOT
from duetgan.utils.distributed.process import die_with_parent
from duetgan.utils.errors import Expected

OUTCOME = re.compile(r"^(\S*::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
NOT_THERE = 77  # exit code of a part


def marked() -> list[str]:
    """The files with tests for an accelerator."""
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    return sorted(str(path.relative_to(ROOT)) for path in files)


def tests(setting: Setting, book: Book) -> None:
    """The tests marked `gpu`, each outcome as it comes."""
    options = ["-v", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"]  # another torch warns of other things
    command = [sys.executable, "-u", "-m", "pytest", *options, *marked()]
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found = OUTCOME.match(line)
            if found is None:
                continue
            kind = {"PASSED": "passed", "SKIPPED": "skipped"}.get(found[2], "failed")
            counts[kind] += 1
            book.row("tests", **counts)
            if kind == "failed":
                book.row(found[1], failed=True)
    if counts["failed"] or process.returncode:
        raise Missed(f"{counts['failed']} tests failed, pytest ended with {process.returncode}")
    if not counts["passed"]:
        raise NotThere(f"an accelerator for torch: all {counts['skipped']} tests were skipped")


class Part(NamedTuple):
    """What is run, and the seconds that it may take."""

    work: Callable[[Setting, Book], None]
    seconds: float
    title: str


# In the order in which they tell most: a run that is cut short keeps what is before. The first seven take under ten
# minutes together; the rest run when they are named (--only).
PARTS = {
    "tests": Part(tests, 100, "Tests marked gpu"),
    "graphs": Part(switches.graphs, 60, "32 px: CUDA graphs off and on"),
    "kernels": Part(switches.kernels, 130, "Large images: kernels off and on"),
    "micro": Part(switches.micro, 45, "FIR and activation by themselves"),
    "timm": Part(peers.timm, 40, "Against timm"),
    "stylegan3": Part(nvidia.stylegan3, 170, "Against NVIDIA's StyleGAN3 code"),
    "gan": Part(trainings.gan, 300, "CIFAR-10's GAN in the time left"),
    "waits": Part(steps.budget, 60, "Waits for the device in a step"),
    "ranks": Part(ranks.group, 120, "A process for each device"),
    "presets": Part(steps.presets, 400, "Throughput of the presets, beside the predictions"),
    "samples": Part(trainings.samples, 120, "The quickstart's GAN"),
    "cifar10": Part(trainings.cifar10, 420, "CIFAR-10 to 94 %"),
}
FIRST = ("tests", "graphs", "kernels", "micro", "timm", "stylegan3", "gan")


def run(name: str, setting: Setting, seconds: float, results: dict[str, Any]) -> None:
    """Run a part in a process group of its own, stopped after so many seconds. What became of it goes into `results`,
    on Ctrl-C too.
    """
    path, log = setting.out / "parts" / f"{name}.json", setting.out / "parts" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    arguments = (name, replace(setting, seconds=seconds), path, log, os.getpid())
    context: Any = multiprocessing.get_context(books.START)
    process = context.Process(target=_work, args=arguments)
    begun, state, code = time.monotonic(), "interrupted", None
    process.start()
    try:
        process.join(seconds)
        code = process.exitcode
        state = {0: "passed", NOT_THERE: "not there", None: "stopped"}.get(code, "failed")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
        process.kill()
        process.join()
        found = Book.read(path)
        told = {"stopped": f"took longer than its {seconds:.0f} s", "failed": f"ended with {code}; parts/{log.name}"}
        reason = found["reason"] or told.get(state, "")
        took = round(time.monotonic() - begun, 1)
        results[name] = {"state": state, "seconds": took, "reason": reason, "rows": found["rows"]}


def _work(name: str, setting: Setting, path: Path, log: Path, parent: int) -> None:
    """A part's process."""
    os.setsid()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stream = log.open("w", buffering=1)
    for number in (1, 2):  # of processes below, too
        os.dup2(stream.fileno(), number)
    sys.stdout = sys.stderr = stream
    book = Book(path)
    code, reason = 1, ""
    try:
        with setting.device_made():
            torch.backends.cudnn.benchmark = setting.torch_device.type != "cpu"  # as training sets it
            PARTS[name].work(setting, book)
        code = 0
    except NotThere as error:
        code, reason = NOT_THERE, f"not there: {error}"
    except (Missed, Expected) as error:
        reason = str(error)
    except BaseException as error:
        traceback.print_exc()
        reason = first_line(error)
    book.end(reason)
    stream.flush()
    os._exit(code)
