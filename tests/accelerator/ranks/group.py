"""Collectives between pretend devices, as NCCL has them: `install()` once a process, after the device's own.

The process group `simccl` is gloo's, which gets the CPU's memory that a tensor on the device holds. For the program a
collective is work of a stream of its own, which the host does not wait for: to read the result before `work.wait()` is
an OrderError. The group takes its device's tensors alone, and no two ranks have the same device. torch's own reducer
(DDP) needs nothing else. A gloo group that is given tensors of the device waits for it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import device, streams

NAME = "simccl"


class Group:
    """Of the ranks' devices: what NCCL calls a communicator."""

    def __init__(self, options: Any) -> None:
        self.store, self.rank, self.size = options.store, options.group_rank, options.group_size
        self.line: streams.Line | None = None  # of its collectives

    def begin(self, indices: set[int]) -> streams.Line:
        """The stream of its collectives; the first of them finds out who has which device."""
        several = indices | ({self.line.index} if self.line else set())
        if len(several) > 1:
            raise RuntimeError(f"Tensors of a group on several devices: {sorted(several)}")
        (index,) = indices
        if self.line is None:
            self.store.set(f"device of {self.rank}", str(index))
            for other in range(self.size):
                if other != self.rank and int(self.store.get(f"device of {other}")) == index:
                    first, second = sorted((self.rank, other))
                    raise RuntimeError(f"Duplicate device: ranks {first} and {second} both on sim:{index}")
            self.line = streams.Line(index)
        return self.line


groups: dict[str, Group] = {}  # by name
_pending: list["Work"] = []  # what C++ holds it does not keep alive


def _create(options: Any, _: Any) -> Any:
    groups[options.group_id] = Group(options)
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


class Work(dist.Work):
    """A collective under way on the device."""

    def __init__(self, work: dist.Work, tensors: Any, line: streams.Line) -> None:
        super().__init__()
        self.work, self.tensors, self.line, self.seen, self.done = work, tensors, line, dict(line.clock), False

    def wait(self, timeout: Any = None) -> bool:
        """The current stream's, not the host's."""
        self.work.wait()
        streams.current(self.line.index).wait(self.seen)
        self.done = True
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """For DDP, which waits in C++: the stream that asks waits at once."""
        self.wait()
        found: torch.futures.Future[Any] = torch.futures.Future()
        found.set_result(self.tensors)
        return found


def collective(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """In place of a `c10d` operation's kernel."""
    boxed = next(each for each in args if "ProcessGroup" in str(getattr(each, "_type", str)()))
    process_group = dist.ProcessGroup.unbox(boxed)
    tensors = [each for each in device.leaves((args, kwargs)) if isinstance(each, Tensor)]
    sims = [each for each in tensors if isinstance(each, device.Sim)]
    # names come again; torch calls a backend that it does not know custom
    group = groups.get(process_group.group_name) if process_group._get_backend_name() == "custom" else None
    if group is None:
        if sims:
            device._wait("gloo")
        return func(*device.mapped(device._inner, args), **kwargs)
    if len(sims) < len(tensors):
        raise RuntimeError("No backend type associated with device type cpu")
    line = group.begin({each.index for each in sims})
    line.wait(streams.current(line.index).clock)
    line.tick()
    for argument, value in zip(func._schema.arguments, args, strict=False):
        for each in device.leaves(value):
            if isinstance(each, device.Sim):
                each.use.note(line, write="input" not in argument.name)
                each.use.kept_for.add(line)  # NCCL keeps what it works on
    # flat, for gloo gathers rows alone into one tensor
    flat = device.mapped(lambda each: each.inner.view(-1) if isinstance(each, device.Sim) else each, args)
    found = func(*flat, **kwargs)
    real = found[1] if isinstance(found, tuple) else found
    work = Work(dist.Work.unbox(real), args[0], line)
    _pending[:] = [*(each for each in _pending if not each.done), work]
    return (args[0], work.boxed()) if isinstance(found, tuple) else work.boxed()


def install() -> None:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[device.NAME, "cpu"])
    device.elsewhere["c10d"] = collective
