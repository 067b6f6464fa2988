"""What runs on `sim`, in a process of its own: `python -m tests.accelerator.cases PART FOLDER` prints a JSON object.

PART is fast or slow; FOLDER holds train.lmdb and test.lmdb. Every training runs on the CPU and on `sim`.
"""

import gc
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from duetgan.inference.projection import resize
from duetgan.training.gan import draws
from duetgan.training.optim.updater import Updater
from duetgan.utils.checkpoint import writer
from tests.accelerator import device, trainings
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config
from tests.slim import slim_down

OPTIONS = ["--augment.flip", "true", "--log.samples-every", "0", "--evaluation.every", "0", "--steps", "4"]


def whole(folder: Path, where: str, *more: str) -> Path:
    """A run of train.py on the CPU or on `sim`, begun or gone on with. Raises RuntimeError where it fails."""
    run = folder / f"gan-{where}"
    config = write_config(folder / "gan.yaml", "gan", folder)
    if code := train_in_process(config, run, "--device", where, *OPTIONS, *more):
        raise RuntimeError(f"on {where}: exit code {code}")
    return run


def resumed(folder: Path) -> dict[str, list[str]]:
    """What differs between runs on both devices, and where each goes on on the other's."""
    here, there = (whole(folder, where, "--max-steps", "2") for where in ("cpu", "sim"))
    found = {"differing": differing(state_of(here, 2), state_of(there, 2))}
    here.rename(folder / "first")
    there.rename(here)
    (folder / "first").rename(there)
    for where in ("cpu", "sim"):
        whole(folder, where)
    return found | {"resumed": differing(state_of(here, 4), state_of(there, 4))}


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
    "a generator on the wrong device": (draws, "keyed_generator", lambda make: lambda *key, device: make(*key)),
    "memory that is not pinned": (torch.Tensor, "pin_memory", lambda _: lambda tensor, *__: tensor),
}


def noticed(folder: Path, fault: str) -> str:
    """What is seen of a planted fault; empty: nothing."""
    owner, name, make = FAULTS[fault]
    try:
        with planted(owner, name, make):
            return "; ".join(*trainings.run(folder, trainings.gan(precision="bf16"), "sim", 2)["waits"])
    except RuntimeError as error:
        return str(error)


def refused(action: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        return f"nothing: {action(*arguments, **options)}"
    except (RuntimeError, TypeError) as error:
        return str(error)


def shown() -> list[Any]:
    """What the device refuses, and what it says of itself."""
    a, b = torch.ones(4, device="sim"), torch.ones(4, device="sim:1")
    found: list[Any] = [refused(torch.add, a, b), refused(torch.add, a, torch.ones(4)), refused(a.numpy)]
    found.append([str(a.device), str(b.device), (a + 1).tolist(), str((a * torch.tensor(2.0)).device)])
    found[-1].append(str(resize(torch.ones(1, 1, 8, 12, device="sim"), 4).device))
    gc.collect()
    memory = device.memory[0]
    before, view = memory.allocated, a.view(2, 2)
    more = memory.allocated - before
    del a, view
    gc.collect()
    found.append([more, before - memory.allocated, memory.peak >= before])
    loss = (torch.ones(1000, device="sim", requires_grad=True) ** 2).sum()
    with planted(device, "limit", lambda _: memory.allocated + 100):
        found += [refused(torch.ones, 1000, device="sim"), refused(loss.backward)]
    return [*found, [str(torch.accelerator.current_accelerator()), torch.accelerator.device_count()]]


def main(part: str, folder: Path) -> None:
    slim_down()
    device.install()
    snapshots_take_the_cpus_tensors()
    trainings.prepare(folder)
    rows = {"fast": trainings.FAST, "slow": trainings.SLOW}[part]
    result: dict[str, Any]
    with device.Mode():
        result = {name: trainings.compared(folder, tree) for name, tree in rows.items()}
        if part == "fast":
            result["train.py"] = resumed(folder)
            result["device"] = shown()
            result["faults"] = {fault: noticed(folder, fault) for fault in FAULTS}
        else:
            result["memory"] = {name: trainings.memory_of(folder, name) for name in trainings.MEMORY}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
