"""Two processes that train together (gloo), against one process with the same cores and against gradients by hand.

`python benchmarks/distributed.py [--json] [--repeats N] [--steps N] [--classifier FILE] [--gan FILE]`. Both tasks, on
random images. The contenders of a task live in processes of their own, with as many threads together as the one
process has (the cores), and wait while the others train; figures are medians of alternating repeats.

- `ranks`: two processes as training runs them: the classifier in DDP, a GAN with utils/distributed/gradients.py.
- `by_hand`: two processes that add up gradients as training did before: nothing is sent before the last backward pass
  is over, then flat buckets in the order of the parameters.
- `process`: one process.

`ddp_vs_by_hand_ratio` is the classifier's, `exchange_vs_by_hand_ratio` the GAN's.
"""

import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.optim import updater
from duetgan.utils.config.cli import Parser, positive
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import cores, tune_malloc

Result = dict[str, float | int | str]

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RANKS = 2
WARM_UP = 3  # steps before the first repeat; DDP arranges its buckets in the second
CONTENDERS = ("ranks", "by_hand", "process")
BUCKET_ELEMENTS = 25_000_000 // 4


class ByHand:
    """GradientExchange as it was: everything is sent after the last backward pass, bucket by bucket."""

    def __init__(self, parameters: Iterable[Tensor], *, missing: str = "zeros", compress: str = "off") -> None:
        self.parameters, self.missing = list(parameters), missing

    def overlap(self) -> None:
        """Nothing is sent early."""

    def finish(self) -> None:
        """Add up all gradients over the ranks."""
        pending, bucket = [], []
        for parameter in self.parameters:
            if parameter.grad is None and self.missing == "skip":
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(g.numel() for g in bucket) >= BUCKET_ELEMENTS:
                pending.append(self._reduce(bucket))
                bucket = []
        pending += [self._reduce(bucket)] if bucket else []
        for work, flat, gradients in pending:
            work.wait()
            collectives.unflatten_into(flat, gradients)

    @staticmethod
    def _reduce(tensors: list[Tensor]) -> tuple[Any, Tensor, list[Tensor]]:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return dist.all_reduce(flat, async_op=True), flat, tensors


class ByHandClassifier(ClassifierTask):
    """The classifier without DDP: its loss is the share of the global mean, the exchange adds up."""

    def set_up(self, step: int) -> None:
        with mock.patch.object(collectives, "world_size", return_value=1):
            super().set_up(step)
        self.updater.exchange = ByHand(self.updater.parameters)  # type: ignore[assignment]


class Trainer:
    """One process's task and loader."""

    def __init__(self, recipe: str, packed: Path, device: torch.device, *, by_hand: bool) -> None:
        if device.type == "cpu":
            tune_malloc()  # as training does
        config = build_run_config(read_yaml(recipe), [], recipe)
        task = TASKS[config.task].task
        if by_hand:
            updater.GradientExchange = ByHand  # type: ignore[assignment, misc]
            task = ByHandClassifier if config.task == "classifier" else task
        self.reader = Dataset(packed)
        self.device, self.task = device, task(config, self.reader, None, device)
        self.loader, self.at = make_loader(config, self.reader, device), 0

    def measure(self, count: int) -> float:
        """Seconds of `count` steps, from when all processes begin until all have ended."""
        collectives.barrier()
        started = time.perf_counter()
        for _ in range(count):
            self.task.step(self.loader, self.at)
            self.at += 1
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        collectives.barrier()
        return time.perf_counter() - started


class Contender:
    """The processes that train together; they compute only while they are asked to."""

    def __init__(self, recipe: str, packed: Path, name: str, threads: int, ranks: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")  # not forked: torch's threads are here
        count, port = 1 if name == "process" else ranks, free_port()
        self._ranks = []
        for rank in range(count):
            connection, other = context.Pipe()
            environment = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            environment |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            arguments = (other, recipe, packed, name == "by_hand", max(1, threads // count), environment, device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            self._ranks.append((process, connection))
        self.measure(WARM_UP)

    def measure(self, steps: int) -> float:
        """Seconds that so many steps take there. Raises RuntimeError if a process has died."""
        for _, connection in self._ranks:
            connection.send(steps)
        try:
            return max(connection.recv() for _, connection in self._ranks)
        except EOFError:
            raise RuntimeError("a contender's process died; what it printed says why") from None

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.join()


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(
    connection: Connection,
    recipe: str,
    packed: Path,
    by_hand: bool,
    threads: int,
    environment: dict[str, str],
    device: str,
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(threads)
    own = collectives.choose_device(device)
    collectives.start(own)
    trainer = Trainer(recipe, packed, own, by_hand=by_hand)
    with contextlib.suppress(EOFError):  # the other end was closed
        while True:
            connection.send(trainer.measure(connection.recv()))
    collectives.stop()


@contextlib.contextmanager
def contenders(recipe: str, threads: int, ranks: int = RANKS, device: str = "cpu") -> Iterator[dict[str, Contender]]:
    """All of a task, on 1,024 random RGB images of 32 px in 10 classes."""
    found: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
        packed = Path(folder) / "random.lmdb"
        images = np.random.default_rng(0).integers(0, 256, (1024, 3, 32, 32), dtype=np.uint8)
        pack_arrays(packed, images, labels=np.arange(1024) % 10, classes=[str(c) for c in range(10)])
        try:
            for name in CONTENDERS:
                found[name] = Contender(recipe, packed, name, threads, ranks, device)
            yield found
        finally:
            for contender in found.values():
                contender.close()


def alternate(everyone: dict[str, Contender], repeats: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every contender's turns; each repeat begins with another one."""
    names = list(everyone)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for place in range(len(names)):
            name = names[(repeat + place) % len(names)]
            seconds[name].append(everyone[name].measure(steps))
    return seconds


def summary(task: str, seconds: dict[str, list[float]], images: int) -> Result:
    """Images per second, and ratios: medians over the repeats."""

    def ratio(other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds["ranks"], seconds[other], strict=True))

    way = "ddp" if task == "classifier" else "exchange"
    found: Result = {f"{way}_vs_by_hand_ratio": ratio("by_hand"), f"{task}_ranks_vs_process_ratio": ratio("process")}
    rates = {name: images / statistics.median(turns) for name, turns in seconds.items()}
    return found | {f"{task}_{name}_images_per_second": rate for name, rate in rates.items()}


def main(argv: list[str]) -> None:
    """The command line."""
    parser = Parser(prog="benchmarks/distributed.py", description=__doc__)
    parser.add_argument("--classifier", default=str(CONFIGS / "bench_classifier.yaml"), metavar="FILE")
    parser.add_argument("--gan", default=str(CONFIGS / "bench_gan_step.yaml"), metavar="FILE")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--steps", type=positive, default=16, help="in a repeat; 16: a GAN's lazy penalties once")
    parser.add_argument("--threads", type=positive, default=cores(), help="of one process, or both together")
    parser.add_argument("--json", action="store_true", help="the last line is one flat JSON object")
    options = parser.parse_args(argv)
    files = {"classifier": options.classifier, "gan": options.gan}
    configs = {task: build_run_config(read_yaml(file), [], file) for task, file in files.items()}
    for task, config in configs.items():
        if config.task != task:
            raise UserError(f"--{task} {files[task]}: not a recipe of task {task}")
    result: Result = {"load_1min_before": os.getloadavg()[0]}
    for task, config in configs.items():
        with contenders(files[task], options.threads) as everyone:
            seconds = alternate(everyone, options.repeats, options.steps)
        result |= summary(task, seconds, options.steps * config.batch_size)
    result |= {"repeats": options.repeats, "steps": options.steps, "threads": options.threads, "cores": cores()}
    result["load_1min_after"] = os.getloadavg()[0]
    for name, value in result.items():
        print(f"{name:40} {value:,.4g}" if isinstance(value, float) else f"{name:40} {value}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_cli(main))
