"""Process groups, ranks and the few collectives the program uses. With one process everything here
is a no-op.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from duetgan.utils import threads
from duetgan.utils.distributed.launch import AGAIN, LAUNCHED
from duetgan.utils.distributed.rendezvous import fresh_store
from duetgan.utils.errors import TrainingHalted, UserError, explained
from duetgan.utils.memory import ran_out
from duetgan.utils.script import leave_threads

T = TypeVar("T")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element

PATIENCE = timedelta(hours=6)  # for what rank 0 does alone, as long as it is alive
LOOK_SECONDS = 10.0  # how often a rank that waits so long looks whether the others are alive

_control: Any = None  # a process group; None: the default one
_patient: Any = None
_look: Callable[[], object] | None = None
_alone = False


class PeerLost(RuntimeError):
    """Another rank does not take part in a collective operation any more."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


@contextmanager
def alone() -> Iterator[None]:
    """In the block this process counts as the only one: what it does there the others do not take
    part in.
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def is_main() -> bool:
    return rank() == 0


def choose_device(requested: str | None, *, several: bool = False) -> torch.device:
    """The device of this process: `requested` ("cpu", "cuda", "cuda:1"), else the accelerator where
    there is one.

    Under several processes an accelerator without an index becomes this process's own; `several`:
    the first of them (see `own_devices`). Raises UserError when the device does not exist.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    with explained(RuntimeError, f"--device {requested}: not a device; use cpu, cuda or cuda:0"):
        device = torch.device(requested) if requested else (accelerator or torch.device("cpu"))
    if device.type == "cpu":
        threads.settle()
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        raise UserError(
            f"--device {requested}: this machine has no usable {device.type} device; use --device cpu"
        )
    own = int(os.environ.get("LOCAL_RANK", "0")) * (_devices_each() if several else 1)
    index = own if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise UserError(
            f"{device.type}:{index} does not exist: {torch.accelerator.device_count()} visible; give fewer --gpus",
            rank_specific=True,
        )
    device = torch.device(device.type, index)
    torch.accelerator.set_device_index(index)
    return device


def own_devices(device: torch.device) -> list[torch.device]:
    """The devices of this process, `device` first: each process of this machine has as many. The
    CPU is one.
    """
    if device.type == "cpu":
        return [device]
    end = min(device.index + _devices_each(), torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(device.index, end)]


@functools.cache
def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device cannot compute with it (MPS; some XPUs)."""
    try:
        return (torch.ones(1, dtype=torch.float64, device=device) * 2).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def _devices_each() -> int:
    processes = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    return max(1, torch.accelerator.device_count() // int(processes))


def start(device: torch.device, timeout_seconds: float = 600, *, several: bool = False) -> None:
    """Join the process group that the environment describes (torchrun's variables, or our
    launcher's), if any.

    Tensors travel over the device's own backend (NCCL for CUDA, gloo for the CPU); gloo groups
    carry control messages. An operation that takes longer than `timeout_seconds` fails.
    """
    global _control, _patient
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    backend = dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=fresh_store(timeout),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        # with a device given, NCCL refuses tensors of other devices; a process with several devices
        # must not give one, nor one of XPUs, for which the gloo groups below would then need a
        # backend (torch 2.15)
        device_id=device if backend == "nccl" and not several else None,
    )
    _patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    if backend != "gloo":
        _control = dist.new_group(backend="gloo", timeout=timeout)


def set_timeout(seconds: float) -> None:
    """What a collective operation may take from now on. Over NCCL twice as long: it ends the
    process without a word, and every step has a control message over gloo that fails first.
    """
    if world_size() == 1:
        return
    # younger than torch 2.11
    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    if _control is not None:
        setter(timedelta(seconds=seconds), _control)
    setter(timedelta(seconds=seconds if _control is None else 2 * seconds), None)


def watch_while_waiting(look: Callable[[], object] | None) -> None:
    """Have `barrier` call `look` every LOOK_SECONDS; `look` raises PeerLost when a rank is gone.
    None: stop that.
    """
    global _look
    _look = look


def is_peer_error(error: BaseException) -> bool:
    """Whether `error` is a collective operation's, because another rank is gone or does not answer."""
    if isinstance(error, (PeerLost, dist.DistError)):
        return not ran_out(error)
    signs = (
        "gloo",
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
    )
    return (
        world_size() > 1
        and isinstance(error, RuntimeError)
        and any(sign in str(error) for sign in signs)
    )


def stop(*, lost: bool = False) -> None:
    """Leave the process group; `lost`: others are missing, so nothing is said to them."""
    global _control, _patient
    if dist.is_initialized():
        if lost:
            leave_threads()
        else:
            dist.destroy_process_group()
    _control = _patient = None
    watch_while_waiting(None)


@contextmanager
def group(device: torch.device) -> Iterator[None]:
    """`start` and `stop` around what all ranks do and cannot resume. TrainingHalted, exit code 4,
    for a lost rank.
    """
    lost = True
    try:
        start(device)
        yield
        lost = False
    except Exception as error:
        if not is_peer_error(error):
            lost = getattr(error, "of_rank", None) is None  # else all leave
            raise
        why = str(error).strip().splitlines()[0]
        reason = f"another process is gone or does not answer ({why}); {AGAIN}"
        # our launcher tells of those that are gone
        raise TrainingHalted(
            reason, rank_specific=True, quiet=LAUNCHED in os.environ and "peer" in why
        ) from error
    finally:
        stop(lost=lost)


def barrier() -> None:
    """Wait until every rank is here, however long one of them works on its own, as long as all are
    alive.
    """
    if world_size() == 1:
        return
    work = dist.barrier(group=_patient, async_op=True)
    assert work is not None
    pause, looked = 0.0002, time.monotonic()
    while not work.is_completed():
        time.sleep(pause)
        pause = min(0.02, 2 * pause)
        if _look is not None and time.monotonic() - looked > LOOK_SECONDS:
            try:
                _look()
            except PeerLost:
                # else all were here, and some have left in good order since
                if not work.is_completed():
                    raise
            looked = time.monotonic()
    work.wait()


def all_reduce_max(flag: int) -> int:
    """The largest of the ranks' integers, over the control group: e.g. "has anybody been told to
    stop".
    """
    if world_size() == 1:
        return flag
    value = torch.tensor([flag])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_control)
    return int(value)


def broadcast_object(value: T) -> T:
    """Rank 0's object (plain data) on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def from_main_process(action: Callable[[], T]) -> T:
    """Rank 0's result of `action()` (plain data) on every rank; its UserError is raised on all of
    them.
    """
    value: T | None = None
    with raising_together():
        if is_main():
            value = action()
    return broadcast_object(value)  # type: ignore[return-value]


def gather_objects(value: T, *, patient: bool = True) -> list[T]:
    """Every rank's object (plain data), on every rank; if `patient` one may take longer than the
    timeout.
    """
    if world_size() == 1:
        return [value]
    if patient:
        barrier()
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value, group=_control)
    return everyone


def gather_to_main(action: Callable[[], T]) -> list[T]:
    """Every rank's result of `action()` (plain data, tensors on the CPU) on rank 0, in the ranks'
    order; nothing on the others. The lowest rank's UserError is raised on all. A rank that does not
    come within the timeout is lost.
    """
    with raising_together(patient=False):
        result = action()
    if world_size() == 1:
        return [result]
    everyone: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(result, everyone, group=_control)
    return everyone or []


def main_first(action: Callable[[], T]) -> T:
    """Every rank's own `action()`, rank 0's first: it may download. The lowest rank's UserError is
    raised on all.
    """
    result: T | None = None
    for turn in (True, False):
        with raising_together():
            if is_main() == turn:
                result = action()
    return result  # type: ignore[return-value]


@contextmanager
def raising_together(*, patient: bool = True) -> Iterator[None]:
    """Around work without collective operations: the lowest rank's UserError is raised on all
    ranks.
    """
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
        if world_size() == 1:
            raise
    for number, problem in enumerate(gather_objects(own, patient=patient)):
        if problem is not None:
            problem.of_rank = number
            raise problem


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """Add up `tensor` over the ranks, in place; no gradient flows."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@torch.no_grad()
def average_(tensors: Iterable[Tensor]) -> None:
    """Replace floating-point tensors by their means over the ranks."""
    if world_size() == 1:
        return
    for (parts,) in by_kind(tensors).values():
        flat = all_reduce_sum_(torch.cat([tensor.reshape(-1) for tensor in parts]))
        unflatten_into(flat / world_size(), parts)


def by_kind(*lists: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[list[Tensor]]]:
    """Device and dtype (of the first list) -> what each of the lists, which go together item by
    item, has of it: for operations on many tensors, which take those of one kind.
    """
    columns: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    for row in zip(*lists, strict=True):
        kind = columns.setdefault((row[0].device, row[0].dtype), [[] for _ in row])
        for column, tensor in zip(kind, row, strict=True):
            column.append(tensor)
    return columns


def unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the pieces of a flat tensor to those that it was made of."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        tensors, [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    )


class Snapshot:
    """The values of tensors, one beside the other: on accelerators many launches cost more than
    what is copied.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = [here for (here,) in by_kind(tensors).values()]
        self.values = [_flat(here) for here in self.tensors]

    def restore(self, flag: Tensor | None = None) -> None:
        """Put them back; where a 0-d flag is given, if it is 1, which nobody waits for."""
        for here, values in zip(self.tensors, self.values, strict=True):
            found = (
                values
                if flag is None
                else torch.where(flag.to(values.device) > 0, values, _flat(here))
            )
            unflatten_into(found, here)


@torch.no_grad()
def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def fingerprints(parts: Mapping[str, Sequence[Tensor]], device: torch.device) -> Tensor:
    """A number for the bits of each part's tensors, int64 [parts] on `device`; nobody waits for it.

    It is a sum of the elements' bit patterns, tensor by tensor weighted by odd numbers, modulo
    2^64.
    """
    sums = []
    for tensors in parts.values():
        total = torch.zeros((), dtype=torch.int64, device=device)
        for number, tensor in enumerate(tensors):
            bits = tensor.detach().view(INTEGERS[tensor.element_size()])
            total += bits.sum(dtype=torch.int64).to(device) * (2 * number + 1)
        sums.append(total)
    return torch.stack(sums)


def unequal_ranks(
    parts: Mapping[str, Sequence[Tensor]], device: torch.device
) -> dict[str, list[int]]:
    """Parts whose bits differ between ranks, and which ranks have others than most (of two: rank
    1). Collective.
    """
    # [ranks, parts]
    table = torch.stack(gather_objects(fingerprints(parts, device).cpu(), patient=False))
    usual = table.mode(0).values if world_size() > 2 else table[0]
    ranks = {
        name: unlike.nonzero().flatten().tolist()
        for name, unlike in zip(parts, (table != usual).T, strict=True)
    }
    return {name: those for name, those in ranks.items() if those}
