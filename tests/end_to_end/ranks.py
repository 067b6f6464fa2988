"""Training processes for the tests of exactness: forks of a server that has imported torch, which note what they read.

A process of `run` is what `train.py` makes of itself: the same `main`, the ranks' environment, killed or ended alone.
"""

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from duetgan.commands import COMMANDS

CONTEXT = multiprocessing.get_context("forkserver")
NAMES = ("train", "evaluate", "predict", "generate", "export", "pack", "inspect")  # of the commands
MODULES = [COMMANDS[name][0] for name in NAMES]
LATE = [  # what the scripts import when they need it
    *("scipy.stats", "lmdb", "jinja2", "matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin"),
    *(f"duetgan.{name}" for name in ("training.engine.run", "reporting.report", "inference.predictions")),
    *(f"duetgan.{name}" for name in ("inference.samples", "metrics.evaluate_gan", "extras.audit.evaluate")),
]
CONTEXT.set_forkserver_preload([*MODULES, *LATE, "torch._dynamo", "tests.slim", "tests.faults.forks"])
SECONDS = 900.0  # that anything may take before the test fails


def command_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the module and the arguments of a command: `train.py ...`, `data.pack ...` or `-P -m duetgan pack ...`."""
    if argv[0] == "-P":
        argv = argv[3:]
    name = Path(argv[0]).name.removesuffix(".py").removeprefix("data.")
    return COMMANDS[name][0], list(argv[1:])


Notes = list[tuple[int, list[str]]]  # of one rank: where a global batch begins, and its samples' digests


@dataclass(frozen=True)
class Rank:
    """One process of a group."""

    index: int
    world: int
    port: int
    output: str  # file that takes its stdout and stderr
    context: str  # of the coverage that tests/mutation records, or ""

    def enter(self) -> None:
        """Become it: environment, threads, output."""
        import torch

        if self.context:
            import coverage

            measured = coverage.Coverage.current()
            if measured is not None:
                measured.switch_context(self.context)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        for name in names:
            os.environ.pop(name, None)
        if self.world > 1:
            values = (self.index, self.index, self.world, self.world, "127.0.0.1", self.port)
            os.environ.update(dict(zip(names, map(str, values), strict=True)))
        torch.set_num_threads(1)
        file = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)


def _be(rank: Rank, function: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # or the collector would copy the memory of all that was imported
    rank.enter()
    sys.exit(function(*arguments) or 0)


def start(function: Callable[..., int | None], *arguments: Any, world: int, output: Path) -> list[BaseProcess]:
    """`function(*arguments)` in every process of a group; `output.N` takes what rank N prints. Functions and arguments
    are pickled: the function must be one of a module's own.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = os.environ.get("DUET_MUTATION_CONTEXT", "")
    ranks = [Rank(index, world, port, f"{output}.{index}", context) for index in range(world)]
    processes: list[BaseProcess] = [CONTEXT.Process(target=_be, args=(rank, function, arguments)) for rank in ranks]
    for process in processes:
        process.start()
    return processes


def wait(processes: list[BaseProcess]) -> list[int | None]:
    """Their exit codes, negative for a signal; what does not end is killed and has None."""
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def together(function: Callable[..., int | None], *arguments: Any, world: int, output: Path) -> None:
    """`start`, to the end of all."""
    codes = wait(start(function, *arguments, world=world, output=output))
    assert set(codes) == {0}, (codes, *(printed(output, rank) for rank in range(world)))


def train(notes: str, argv: list[str], kill_at: int | None, float64: bool, saved: int = 1) -> int:
    """`train.py ARGV` in this process with slim classifiers; every batch is noted in `NOTES.batches.RANK`.

    `kill_at`: kill -9 of this process when the batch is asked for that begins after so many samples, once there is the
    checkpoint of step `saved` (it is written beside the training).
    """
    import torch

    from duetgan.commands import train as script
    from duetgan.data.reading.loader import Batch, InfiniteLoader
    from duetgan.utils.distributed.process import run_cli
    from tests.slim import slim_down

    slim_down()
    if float64:
        torch.set_default_dtype(torch.float64)
    folder = Path(argv[argv.index("--run-dir") + 1]) / "checkpoints"
    original = InfiniteLoader.__next__
    file = open(f"{notes}.batches.{os.environ.get('RANK', '0')}", "a")  # noqa: SIM115 - it ends with the process

    def noted(self: InfiniteLoader) -> Batch:
        begins = self.position.consumed
        if kill_at is not None and begins >= kill_at:
            until(lambda: last_step(folder) >= saved, "no checkpoint before the kill")
            if os.environ.get("RANK", "0") != "0":
                time.sleep(0.5)  # after rank 0, which would end by itself when it misses another one
            os.kill(os.getpid(), signal.SIGKILL)
        batch = original(self)
        pairs = zip(batch.images, batch.labels.tolist(), strict=True)
        rows = [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16] + f":{y}" for image, y in pairs]
        file.write(json.dumps([begins, rows]) + "\n")
        file.flush()
        return batch

    InfiniteLoader.__next__ = noted  # type: ignore[method-assign]
    return run_cli(script.main, argv)


def last_step(checkpoints: Path) -> int:
    """Of the checkpoint that a run would resume from; 0 without one."""
    last = checkpoints / "last.json"
    return int(json.loads(last.read_text())["step"]) if last.is_file() else 0


def until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for it. Raises TimeoutError."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.005)


def run(
    argv: list[str], notes: Path, *, world: int = 1, kill_at: int | None = None, saved: int = 1, float64: bool = False
) -> Notes:
    """Train to the end, or to the kill; the global batches that were read. `notes`: a name for files of its own."""
    more = ["--device", "cpu", "--procs", str(world)]
    processes = start(train, str(notes), [*argv, *more], kill_at, float64, saved, world=world, output=notes)
    codes = wait(processes)
    expected = 0 if kill_at is None else -signal.SIGKILL
    assert codes[0] == expected, (codes, printed(notes))
    assert kill_at is not None or set(codes) == {0}, codes
    return global_batches(notes, world)


def printed(notes: Path, rank: int = 0) -> str:
    """What a rank has printed."""
    return Path(f"{notes}.{rank}").read_text()


def global_batches(notes: Path, world: int) -> Notes:
    """The batches of all ranks put together; a killed rank's last ones may lack."""
    files = [Path(f"{notes}.batches.{rank}") for rank in range(world)]
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    batches = []
    for parts in zip(*ranks, strict=False):
        assert len({begins for begins, _ in parts}) == 1  # the ranks take the same steps
        batches.append((int(parts[0][0]), [row for _, rows in parts for row in rows]))
    return batches
