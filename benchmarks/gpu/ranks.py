"""As many processes as there are devices, over the device's own backend (NCCL on NVIDIA's): sums, and both tasks."""

import multiprocessing
import os
import queue
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import distributed
from benchmarks.gpu import book as books
from benchmarks.gpu.book import Book, Missed, NotThere, Setting
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.machine import cores

MEGABYTES = (1, 25, 250)  # of a sum: small, a bucket of gradients, a large network
RECIPES = {"classifier": "bench_classifier", "gan": "bench_gan_step"}
REPEATS, STEPS = 5, 16


def devices(setting: Setting) -> int:
    """How many processes take part: one for each device; of the CPU two, to have some."""
    return 2 if setting.torch_device.type == "cpu" else torch.accelerator.device_count()


def add_up(setting: Setting, rank: int, count: int, port: int, answers: Any) -> None:
    """A process of the group: what sums of several sizes take, put into `answers` by rank 0."""
    with setting.device_made():
        _add_up(setting, rank, count, port, answers)


def _add_up(setting: Setting, rank: int, count: int, port: int, answers: Any) -> None:
    kind = setting.torch_device.type
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, rank=rank, world_size=count)
    for size in MEGABYTES[:1] if setting.small else MEGABYTES:
        values = torch.full((size * 250_000,), float(rank + 1), device=device)
        dist.all_reduce(values)
        exact = bool((values == count * (count + 1) // 2).all())
        took = []
        for _ in range(REPEATS):
            setting.synchronize()
            begun = time.perf_counter()
            dist.all_reduce(values.zero_())
            setting.synchronize()
            took.append(time.perf_counter() - begun)
        if rank == 0:
            answers.put((size, backend, exact, statistics.median(took)))
    dist.barrier()
    if rank == 0:
        answers.put(None)
    dist.destroy_process_group()


def sums(setting: Setting, book: Book, count: int) -> list[str]:
    """All-reduces of several sizes; the names of those that were wrong."""
    context: Any = multiprocessing.get_context(books.START)
    answers, port = context.Queue(), distributed.free_port()
    processes = [
        context.Process(target=add_up, args=(setting, rank, count, port, answers), daemon=True) for rank in range(count)
    ]
    for process in processes:
        process.start()
    wrong = []
    while True:
        try:
            answer = answers.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise Missed("a process of the group died; the log says why") from None
            continue
        if answer is None:
            break
        size, backend, exact, seconds = answer
        figures: dict[str, Any] = {"processes": count, "backend": backend, "exact": exact, "ms": 1000 * seconds}
        if count > 1:
            figures["bus_gb_per_second"] = 2 * (count - 1) / count * size / 1000 / seconds
        book.row(f"all-reduce of {size} MB", **figures)
        wrong += [] if exact else [f"{size} MB"]
    for process in processes:
        process.join()
    return wrong


def group(setting: Setting, book: Book) -> None:
    """Sums over all devices, then both tasks on them against one, and against gradients added up by hand."""
    count = devices(setting)
    try:
        dist.get_default_backend_for_device(setting.torch_device)
    except ValueError:
        raise NotThere(f"a backend of torch.distributed for {setting.device}") from None
    if wrong := sums(setting, book, count):
        raise Missed(f"sums that are wrong: {', '.join(wrong)}")
    if count == 1 or setting.small:
        book.row("both tasks", processes=count, why="one device: nothing to share" if count == 1 else "not when small")
        return
    kind = setting.torch_device.type
    for task, name in RECIPES.items():
        recipe = str(distributed.CONFIGS / f"{name}.yaml")
        batch = build_run_config(read_yaml(recipe), [], recipe).batch_size
        with distributed.contenders(recipe, cores(), count, kind) as everyone:
            seconds = distributed.alternate(everyone, 3, STEPS)
        book.row(task, processes=count, **distributed.summary(task, seconds, STEPS * batch))
