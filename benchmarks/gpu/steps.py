"""Parts that look at single steps: whether they wait for the device, and how fast the presets are."""

import contextlib
import gc
import importlib
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import scaling
from benchmarks.gan_step import random_images
from benchmarks.gpu.book import Book, Missed, NotThere, Setting, Value, first_line
from benchmarks.gpu.wheels import ROOT
from duetgan.extras.paper import predictions as on_paper
from duetgan.training.base.config import RunConfig
from duetgan.training.base.data import make_loader
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine.speed import Trial
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.machine import native_precision

# the recipes whose steps may not wait: both tasks, path lengths and lazy R1, ADA, both penalties in every step
WATCHED = ("bench_classifier", "bench_gan_step", "ada_500", "r3gan_small")
SMALL = ("quickstart_classifier", "quickstart_gan")
PRESETS = (
    "stylegan2_256",
    "stylegan2_512",
    "stylegan2_1024",
    "r3gan_256",
    "cifar10_gan",
    "cifar10_classifier_gpu",
    "fashion_mnist_classifier_gpu",
    "finetune_resnet50",
)
SYNCHRONISING = "called a synchronizing"  # in what torch warns of
TICK = 1  # waits of a log tick
BLOCK = 0.5  # seconds of steps between two looks at the clock
REPEATS = 3
COMPILING = 0.6  # of the presets' time: what is compiled later would not be ready
GIB = 2**30


# --- waits


def our_line() -> str:
    """The innermost line of this project's own that is being executed."""
    for frame in reversed(traceback.extract_stack()[:-1]):
        path = Path(frame.filename)
        inside = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if inside and path.relative_to(ROOT).parts[0] != "benchmarks":
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "outside of this project"


@contextlib.contextmanager
def waits(setting: Setting) -> Iterator[Counter[str]]:
    """Source line -> how often the block waits there for the device. Raises NotThere where the device does not tell."""
    module: Any
    found: Counter[str] = Counter()
    if setting.maker is not None:
        module = importlib.import_module(setting.maker)
        module.waits.clear()
        yield found
        found.update(module.waits)
        return
    module = torch.get_device_module(setting.torch_device)
    if not hasattr(module, "set_sync_debug_mode"):
        raise NotThere(f"{setting.device} has no set_sync_debug_mode: nothing tells who waits")

    def tell(message: Warning | str, *_args: Any, **_options: Any) -> None:
        if SYNCHRONISING in str(message):
            found[our_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = tell
        module.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            module.set_sync_debug_mode("default")


def budget(setting: Setting, book: Book) -> None:
    """The steps of both tasks never wait, a log tick does once."""
    rounds, missed = (2 if setting.small else 17), []
    for name in WATCHED[:2] if setting.small else WATCHED:
        config, images = scaling.recipe(name), scaling.PRESETS[name]
        config = config.changed(compile="off", batch_size=8) if setting.small else config.changed(compile="off")
        with random_images(images.resolution if not setting.small else 16, images.channels, images.classes) as reader:
            task = TASKS[config.task].task(config, reader, None, setting.torch_device)
            loader, window = make_loader(config, reader, setting.torch_device), MetricWindow(watched=None)
            for step in range(rounds):
                window.add(task.step(loader, step))
            window.take()
            setting.synchronize()
            with waits(setting) as steps:
                for step in range(rounds, 2 * rounds):
                    window.add(task.step(loader, step))
            with waits(setting) as tick:
                window.take()
            loader.close()
        found = {"steps": rounds, "waits_in_steps": steps.total(), "waits_in_a_tick": tick.total()}
        book.row(name, **found, where=", ".join(f"{line} x {count}" for line, count in steps.most_common(8)))
        if steps.total() or tick.total() > TICK:
            missed.append(f"{name}: {steps.total()} in {rounds} steps, {tick.total()} in a tick")
    if missed:
        raise Missed(f"waits: {'; '.join(missed)}")


# --- presets


def mean_seconds(seconds_of: Callable[[int, int], float], shares: dict[int, float], block: float = BLOCK) -> float:
    """Of a step: kinds of steps by their share, in blocks of so many seconds. `seconds_of`: what so many steps of a
    kind take.
    """
    total = 0.0
    for step, share in shares.items():
        seconds_of(step, 2)  # kernels are chosen, buffers made
        count = min(200, max(1, round(block / max(seconds_of(step, 1), 1e-9))))
        total += share * statistics.median(seconds_of(step, count) / count for _ in range(REPEATS))
    return total


def trial_seconds(setting: Setting, trial: Trial) -> Callable[[int, int], float]:
    """A trial's steps, of which only the last is waited for."""

    def seconds(step: int, count: int) -> float:
        setting.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            trial.task.step(iter([trial.batch] * 2), step)
        setting.synchronize()
        return time.perf_counter() - begun

    return seconds


def precision_of(config: RunConfig, device: torch.device) -> Any:
    """What training would take there."""
    if config.precision != "auto":
        return config.precision
    return "fp32" if device.type == "cpu" else native_precision(device)


def measured(
    config: RunConfig, reader: Any, samples: int, setting: Setting, compiled: bool = False
) -> dict[str, Value]:
    """Images per second and the peak of the memory, of steps of so many samples, without reading; where they are
    compiled, the seconds that this takes, too.
    """
    device = setting.torch_device
    if device.type != "cpu":
        gc.collect()  # what the preset before has left
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    trial = Trial(config, samples, reader, device, compiled)
    precision = precision_of(config, device)
    trial.precision.switch(precision)
    seconds_of = trial_seconds(setting, trial)
    compiling = sum(seconds_of(step, 1) for step in trial.step_fractions) if compiled else 0.0
    seconds = mean_seconds(seconds_of, trial.step_fractions, 0.0 if setting.small else BLOCK)
    found: dict[str, Value] = {"samples": samples, "precision": precision, "images_per_second": samples / seconds}
    if compiled:
        found["compiling_seconds"] = compiling
    elif device.type != "cpu":
        found["peak_gib"] = torch.accelerator.max_memory_allocated(device) / GIB
    return found


def predicted(config: RunConfig, reader: Any, samples: int, gpu: str) -> dict[str, float]:
    """What was said of it before any GPU had run it; nothing for a GPU that is in no table."""
    count = on_paper.count(config, reader, samples)
    found = {"predicted_peak_gib": count.peak / GIB}
    for known in on_paper.GPUS:
        if known.name in gpu:
            found["predicted_images_per_second"] = samples / count.seconds(known)
    return found


def presets(setting: Setting, book: Book) -> None:
    """Throughput and memory of the recipes for GPUs, uncompiled; then what was predicted; then compiled, until the time
    is over.
    """
    gpu, missed, begun = device_name(setting.torch_device), [], time.monotonic()
    recipes = {name: scaling.recipe(name) for name in (SMALL if setting.small else PRESETS)}
    readers: Any = {name: scaling.Reader(scaling.PRESETS[name]) for name in recipes}
    samples = {name: 8 if setting.small else config.micro(1) for name, config in recipes.items()}
    for compiled in (False,) if setting.small else (False, True):
        for name, config in recipes.items():
            if compiled and time.monotonic() - begun > COMPILING * setting.seconds:
                break
            try:
                found = measured(config, readers[name], samples[name], setting, compiled)
            except Exception as error:  # one preset's fault leaves the others their figures
                traceback.print_exc()
                missed.append(name)
                book.row(name, failed=first_line(error))
                continue
            book.row(name, **({f"compiled_{key}": cell for key, cell in found.items()} if compiled else found))
        for name, cells in () if compiled else list(book.rows.items()):
            said = predicted(recipes[name], readers[name], samples[name], gpu)
            for key in ("images_per_second", "peak_gib"):
                if key in cells and f"predicted_{key}" in said:
                    said[f"{key}_vs_predicted_ratio"] = float(cells[key]) / said[f"predicted_{key}"]
            book.row(name, **said)
    if missed:
        raise Missed(f"did not run: {', '.join(missed)}")


def device_name(device: torch.device) -> str:
    """The device's own name, where it has one."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name else device.type
