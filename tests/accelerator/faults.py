"""Faults that streams, an index or autocast bring about: `python -m tests.accelerator.faults FOLDER` prints
what is seen of each. FOLDER holds train.lmdb and test.lmdb. More of them: `cases.FAULTS`.
"""

import functools
import gc
import json
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from duetgan.inference.samples import Sampler
from duetgan.models import layers
from duetgan.training.gan.discriminator_step import PENALTIES
from tests.accelerator import device, streams
from tests.accelerator.cases import snapshots_take_the_cpus_tensors, whole
from tests.accelerator.commands import PLACE, ran

in_penalty: set[torch.dtype] = set()  # what R1 is computed in once it has its gradient


class Watch(TorchDispatchMode):
    """Of this thread: the gradient itself is computed in the device's own."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        here = threading.get_ident() == self.thread
        if here and isinstance(found, torch.Tensor) and found.is_floating_point():
            in_penalty.add(found.dtype)
        return found


def watched(penalty: Callable[..., torch.Tensor]) -> Any:
    def run(*args: Any) -> torch.Tensor:
        with Watch():
            return penalty(*args)

    return patch.dict(PENALTIES, real=("r1", run))


def by_matrices(logits: torch.Tensor, images: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
    """R1's penalty as autocast would have it."""
    with torch.autocast("sim", torch.float16):
        (gradient,) = torch.autograd.grad((logits * scale).sum(), images, create_graph=True)
        rows = gradient.flatten(1)
        return torch.bmm(rows[:, None], rows[:, :, None]).flatten()


def one_buffer() -> Any:
    kept: dict[Any, torch.Tensor] = {}

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        key = (tensor.shape, tensor.dtype)
        if key not in kept:
            kept[key] = streams.pinned.add(torch.empty_like(tensor))
        return kept[key].copy_(tensor)

    return patch.object(torch.Tensor, "pin_memory", pin)


def where_it_was_saved() -> Any:
    """torch.load of a file whose tensors were saved from `sim:0`, without map_location."""
    load = torch.load

    def loaded(*args: Any, **kwargs: Any) -> Any:
        return tree_map(
            lambda each: each.to("sim:0") if isinstance(each, torch.Tensor) else each, load(*args, **kwargs)
        )

    return patch.object(torch, "load", loaded)


IN_TRAINING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "a buffer filled again before its copy ended": one_buffer,
    "a batch that is not waited for": lambda: patch.object(streams.Stream, "wait_event", lambda *_: None),
    "memory freed while another stream uses it": lambda: patch.object(device.Sim, "record_stream", lambda *_: None),
    "a penalty that autocast casts": lambda: watched(by_matrices),
}
IN_COMMANDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "a missing map_location": where_it_was_saved,
    "a device index ignored": lambda: patch.object(Sampler, "device", property(lambda _: torch.device("sim"))),
}


def in_training(folder: Path, fault: str) -> str:
    """What is seen of a fault in a training; empty: nothing."""
    gc.collect()
    for noted in (in_penalty, streams.faults):
        noted.clear()
    place = folder / fault.replace(" ", "-")
    place.mkdir()
    for file in ("train.lmdb", "test.lmdb"):
        (place / file).symlink_to(folder / file)
    try:
        with watched(PENALTIES["real"][1]), IN_TRAINING[fault]():
            whole(place, "sim", "--precision", "bf16")
    except RuntimeError as error:
        return str(error)
    return ", ".join(f"R1 in {dtype}" for dtype in in_penalty - {torch.float32})


def in_commands(folder: Path, fault: str, given: dict[str, str]) -> str:
    """The same of samples on `sim:1`, whose neighbour must stay empty."""
    first = device.memory[0]
    first.peak = before = first.allocated
    try:
        with IN_COMMANDS[fault]():
            ran(folder, "truncation", given, PLACE)
    except RuntimeError as error:
        return str(error)
    return f"{first.peak - before} bytes on sim:0" if first.peak > before else ""


def main(folder: Path) -> None:
    device.install()
    snapshots_take_the_cpus_tensors()
    layers.constant_kernel = functools.cache(layers.constant_kernel)  # as on a real device
    with device.Mode():
        result = {fault: in_training(folder, fault) for fault in IN_TRAINING}
        given = {"gan": str(whole(folder, "cpu", "--max-steps", "1"))}
        seen = {fault: in_commands(folder, fault, given) for fault in IN_COMMANDS}
    result["nothing"] += seen["nothing"]
    print(json.dumps(seen | result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
