"""What runs on `sim`, in a process of its own: `python -m tests.accelerator.cases FOLDER` prints a JSON object.

FOLDER holds train.lmdb and test.lmdb. Every training runs on the CPU and on `sim`, and is compared to the bit.
"""

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from duetgan.training.base.task import Task
from duetgan.training.engine.tasks import TASKS
from duetgan.training.gan import context
from duetgan.training.optim.updater import Updater
from duetgan.utils.checkpoint import writer
from tests.accelerator import device
from tests.end_to_end.helpers import differing, last, state_of, train_in_process, write_config

# name -> task and options
TRAININGS: dict[str, tuple[str, list[str]]] = {
    "gan": ("gan", ["--augment.flip", "true"]),
    "gan-path-length": ("gan", ["--loss.path-length-weight", "2"]),
    "gan-ada": ("gan", ["--ada.mode", "fixed", "--ada.p", "0.5"]),
    "gan-bf16": ("gan", ["--precision", "bf16"]),
    "classifier": ("classifier", ["--augment.mixup", "0.5", "--loss.label-smoothing", "0.1"]),
    "classifier-bf16": ("classifier", ["--precision", "bf16"]),
}
QUIET = ["--log.samples-every", "0", "--evaluation.every", "0"]
OTHERWISE = ("gan-path-length",)  # its gradients are added up in another order: the same numbers but for rounding
# kept for good where a tensor is of torch's own type, which no pretend one is
ARTEFACT = "line = torch.tensor(taps"
in_steps: dict[str, int] = {}  # waits by source line, within steps after the first


def count_steps(task: Any) -> None:
    """Let every step add its waits to `in_steps`."""
    step = task.step

    def counted(self: Task, batches: Any, number: int) -> Any:
        before = device.waits.copy()
        found = step(self, batches, number)
        for line, count in (device.waits - before).items():
            if number and ARTEFACT not in line:
                in_steps[line] = in_steps.get(line, 0) + count
        return found

    task.step = counted


def trained(folder: Path, name: str, where: str, *more: str) -> Path:
    """The run of a training on the CPU or on `sim`. Raises RuntimeError where it fails."""
    task, options = TRAININGS[name]
    run = folder / f"{name}-{where}"
    config = write_config(folder / f"{name}.yaml", task, folder)
    if code := train_in_process(config, run, "--device", where, *options, *QUIET, *more):
        raise RuntimeError(f"{name} on {where}: exit code {code}")
    return run


def compared(folder: Path, name: str) -> dict[str, Any]:
    """A training on both."""
    in_steps.clear()
    runs = [trained(folder, name, where, "--max-steps", "6") for where in ("cpu", "sim")]
    step = last(runs[0])
    here, there = (state_of(run, step) for run in runs)
    name = next(name for name in ("generator", "model") if name in here)
    largest = max((here[name][key].double() - value).abs().max().item() for key, value in there[name].items())
    return {"differing": differing(here, there), "largest": largest, "waits": dict(in_steps)}


def resumed(folder: Path) -> list[str]:
    """What differs where the runs of "gan" go on on each other's device."""
    here, there = (folder / f"gan-{where}" for where in ("cpu", "sim"))
    config = folder / "gan.yaml"
    for run, where in ((here, "sim"), (there, "cpu")):
        if code := train_in_process(config, run, "--device", where, *TRAININGS["gan"][1], *QUIET):
            raise RuntimeError(f"resumed on {where}: exit code {code}")
    return differing(state_of(here, 8), state_of(there, 8))


def snapshots_take_the_cpus_tensors() -> None:
    """Of what is on `sim`, whose tensors have no storage of their own to be copied."""
    copied = writer.Snapshot._copied

    def without(self: writer.Snapshot, value: Any, where: str) -> Any:
        return copied(self, value.inner if isinstance(value, device.Sim) else value, where)

    writer.Snapshot._copied = without  # type: ignore[method-assign]


@contextmanager
def planted(owner: Any, name: str, fault: Callable[[Any], Any]) -> Any:
    """`owner.name` as `fault(original)` makes it."""
    original = getattr(owner, name)
    setattr(owner, name, fault(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def reading_norms(step: Any) -> Any:
    def faulty(self: Any, number: int) -> Any:
        update = step(self, number)
        update.norm.item()
        return update

    return faulty


def with_a_cpu_tensor(softplus: Any) -> Any:
    return lambda logits, *more: softplus(logits, *more) * torch.ones(logits.shape, device="cpu")


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "an .item() in the step": (Updater, "step", reading_norms),
    "a CPU tensor in a loss": (torch.nn.functional, "softplus", with_a_cpu_tensor),
    "a generator on the wrong device": (context, "keyed_generator", lambda make: lambda *key, device: make(*key)),
    "memory that is not pinned": (torch.Tensor, "pin_memory", lambda _: lambda tensor, *__: tensor),
}


def noticed(folder: Path, fault: str) -> str:
    """What is seen of a planted fault; empty: nothing."""
    owner, name, make = FAULTS[fault]
    in_steps.clear()
    try:
        with planted(owner, name, make):
            place = folder / fault.replace(" ", "-")
            place.mkdir()
            for file in ("train.lmdb", "test.lmdb"):
                (place / file).symlink_to(folder / file)
            trained(place, "gan-bf16", "sim", "--max-steps", "3")
    except RuntimeError as error:
        return str(error)
    return "; ".join(in_steps)


def main(folder: Path) -> None:
    device.install()
    snapshots_take_the_cpus_tensors()
    for task in TASKS.values():
        count_steps(task.task)
    result: dict[str, Any] = {}
    with device.Mode():
        for name in TRAININGS:
            result[name] = compared(folder, name)
        result["resumed"] = resumed(folder)
        result["faults"] = {fault: noticed(folder, fault) for fault in FAULTS}
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
