"""Faults on demand: DUET_FAIL_AT="rank:step:kind,...". `rank` is a number or `*`, `step` an update's number (from 0).

A fault fires once a process, and not again after torchrun has restarted the processes. Of kill-before-write and
kill-before-rename `step` is the checkpoint's, of kill-in-pass the number of a shared pass's round.
"""

import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
VARIABLE = "DUET_FAIL_AT"

fired: set[str] = set()


def due(kind: str, step: int) -> bool:
    """Whether a fault of this kind is asked for here and now; true once."""
    from duetgan.utils.distributed import collectives

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    faults = os.environ.get(VARIABLE, "").split(",")
    asked = [f"{rank}:{step}:{kind}" for rank in ("*", collectives.rank())]
    new = {fault for fault in asked if fault in faults} - fired
    fired.update(new)
    return bool(new)


def fire(step: int) -> None:
    """What happens at the beginning of a step."""
    for kind, signum in SIGNALS.items():
        if due(kind, step):
            os.kill(os.getpid(), signum)
    if due("sleep", step):
        time.sleep(3600)
    if due("oom", step):
        raise MemoryError(f"asked for by {VARIABLE}")


def kill_at(kind: str, step: int) -> None:
    if due(kind, step):
        os.kill(os.getpid(), signal.SIGKILL)


Set = Callable[[Any, str, Any], None]


def patch_loop(module: Any, put: Set) -> None:
    plain = module.Loop.take_step

    def take_step(loop: Any, batches: Any) -> None:
        task = loop.task

        def step(batches: Any, number: int) -> Any:
            fire(number)
            metrics = type(task).step(task, batches, number)
            if due("spike", number):
                metrics[loop.window.watched] = metrics[loop.window.watched] * 1e4 + 1e4
            return metrics

        task.step = step
        try:
            plain(loop, batches)
        finally:
            del task.step

    put(module.Loop, "take_step", take_step)


def patch_health(module: Any, put: Set) -> None:
    plain = module.check_equal

    def check_equal(registry: Any, step: int, device: Any) -> None:
        if due("unequal", step):
            next(iter(module.shared_tensors(registry).values()))[0].data.add_(1)
        plain(registry, step, device)

    put(module, "check_equal", check_equal)


def patch_updater(module: Any, put: Set) -> None:
    """Gradients become NaN before they are added up over the ranks, and so must still be here then."""
    plain = module.Updater.step

    def step(updater: Any, number: int) -> Any:
        if due("nan", number):
            next(p.grad for p in updater.parameters if p.grad is not None).fill_(float("nan"))
        return plain(updater, number)

    put(module.Updater, "step", step)
    put(module.Updater, "overlap", lambda _updater, *, last: None)


def patch_classifier(module: Any, put: Set) -> None:
    """DDP adds up in the backward pass: the loss that it begins with becomes NaN."""
    plain = module.ClassifierTask.step

    def step(task: Any, batches: Any, number: int) -> Any:
        precision = task.precision
        if due("nan", number):
            precision.backward = lambda loss: type(precision).backward(precision, loss * float("nan"))
        try:
            return plain(task, batches, number)
        finally:
            precision.__dict__.pop("backward", None)

    put(module.ClassifierTask, "step", step)


def patch_writer(module: Any, put: Set) -> None:
    plain = module.write

    def write(snapshot: Any, path: Any) -> None:
        kill_at("kill-before-write", snapshot.step)
        plain(snapshot, path)
        kill_at("kill-before-rename", snapshot.step)

    put(module, "write", write)


def patch_passes(module: Any, put: Set) -> None:
    plain, rounds = module.collectives.gather_to_main, iter(range(1 << 30))

    def gather_to_main(action: Any) -> Any:
        kill_at("kill-in-pass", next(rounds))
        return plain(action)

    put(module.collectives, "gather_to_main", gather_to_main)


def slim(name: str) -> Any:
    return getattr(importlib.import_module("tests.slim"), name)


CHEAPER: dict[str, Callable[[Any, Set], None]] = {  # in all processes of the suite
    "duetgan.models.backbones.base": lambda module, put: put(module, "make", slim("make")),
    "duetgan.reporting.pictures": lambda module, put: put(module, "_svg", slim("no_curves")),
}
PATCHES: dict[str, Callable[[Any, Set], None]] = {
    "duetgan.training.engine.loop": patch_loop,
    "duetgan.training.engine.health": patch_health,
    "duetgan.training.optim.updater": patch_updater,
    "duetgan.training.classifier.task": patch_classifier,
    "duetgan.utils.checkpoint.writer": patch_writer,
    "duetgan.metrics.features.extractors": patch_passes,
}


def install(put: Set) -> None:
    """Patch this process; `put` is a `monkeypatch.setattr`."""
    fired.clear()
    for name, patch in PATCHES.items():
        patch(importlib.import_module(name), put)
