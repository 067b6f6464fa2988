"""Process groups, ranks and collective operations. With one process all of them are no-ops."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from duetgan.utils import machine
from duetgan.utils.distributed.launch import AGAIN, LAUNCHED
from duetgan.utils.distributed.process import leave_threads
from duetgan.utils.distributed.rendezvous import fresh_store
from duetgan.utils.errors import TrainingHalted, UserError, explained
from duetgan.utils.machine import ran_out

T = TypeVar("T")
# bytes per element -> integer type
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PATIENCE = timedelta(hours=6)  # longest time that ranks wait for one that works alone
LOOK_SECONDS = 10.0  # between a waiting rank's checks that the others are alive

# Process groups, whose type in torch includes a number; None: the default group.
_control: Any = None
_patient: Any = None
_look: Callable[[], object] | None = None
_alone = False
_interceptor: Callable[[Callable[[], object]], object] | None = None


class PeerLost(RuntimeError):
    """Another rank no longer takes part in collective operations."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


@contextmanager
def alone() -> Iterator[None]:
    """Make this process count as the only one in the block, because the others do not take part."""
    global _alone
    previous = _alone
    _alone = True
    try:
        yield
    finally:
        _alone = previous


def is_main() -> bool:
    return rank() == 0


def perform(operation: Callable[[], object]) -> None:
    """Run a collective operation of a training step, on tensors that exist already.

    Inside `intercepted` the interceptor is called with the operation instead.
    """
    if _interceptor is None:
        operation()
    else:
        _interceptor(operation)


@contextmanager
def intercepted(interceptor: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Let `interceptor` decide when the operations that `perform` gets in the block are run."""
    global _interceptor
    _interceptor = interceptor
    try:
        yield
    finally:
        _interceptor = None


def choose_device(requested: str | None, *, several: bool = False) -> torch.device:
    """Return the device of this process, by default the accelerator if there is one.

    With several processes an accelerator without an index becomes this process's own. Raises
    UserError for a device that does not exist.

    Args:
        requested: "cpu", "cuda", "cuda:1" or None.
        several: each process has several devices (`own_devices`); return the first of them.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    with explained(RuntimeError, f"--device {requested}: not a device; use cpu, cuda or cuda:0"):
        device = torch.device(requested) if requested else (accelerator or torch.device("cpu"))
    if device.type == "cpu":
        machine.settle()
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        raise UserError(
            f"--device {requested}: this machine has no usable {device.type} device; use --device cpu"
        )
    index: int | None = device.index
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0")) * (_devices_each() if several else 1)
    if index >= torch.accelerator.device_count():
        raise UserError(
            f"{device.type}:{index} does not exist: {torch.accelerator.device_count()} visible; give fewer --gpus",
            rank_specific=True,
        )
    device = torch.device(device.type, index)
    torch.accelerator.set_device_index(index)
    return device


def own_devices(device: torch.device) -> list[torch.device]:
    """Return the devices of this process, `device` first. All processes of a machine have equally
    many.
    """
    if device.type == "cpu":
        return [device]
    end = min(device.index + _devices_each(), torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(device.index, end)]


@functools.cache
def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without it (MPS; some XPUs)."""
    try:
        return (torch.ones(1, dtype=torch.float64, device=device) * 2).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def _devices_each() -> int:
    processes = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    return max(1, torch.accelerator.device_count() // int(processes))


def start(device: torch.device, timeout_seconds: float = 600, *, several: bool = False) -> None:
    """Join the process group that the environment describes, if there is one.

    The environment has the variables of torchrun or of Duet's launcher. Tensors travel over the
    device's own backend (NCCL for CUDA, gloo for the CPU); gloo groups carry control messages. An
    operation that takes longer than `timeout_seconds` fails.
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
        # With a device id NCCL refuses tensors of other devices, so a process with several devices
        # must not pass one. With the id of an XPU the gloo groups below would need a backend for
        # XPUs (torch 2.15).
        device_id=device if backend == "nccl" and not several else None,
    )
    _patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    if backend != "gloo":
        _control = dist.new_group(backend="gloo", timeout=timeout)


def set_timeout(seconds: float) -> None:
    """Set the timeout of collective operations.

    NCCL gets twice the time, because its timeout ends the process without a message; the control
    message over gloo, which every step has, then fails first.
    """
    if world_size() == 1:
        return
    # Older torch versions have no dist.set_timeout.
    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    if _control is not None:
        setter(timedelta(seconds=seconds), _control)
    setter(timedelta(seconds=seconds if _control is None else 2 * seconds), None)


def watch_while_waiting(look: Callable[[], object] | None) -> None:
    """Have `barrier` call `look` every LOOK_SECONDS; None ends that.

    `look` raises PeerLost if a rank is gone.
    """
    global _look
    _look = look


def is_peer_error(error: BaseException) -> bool:
    """Return True for a failed collective operation: another rank is gone or does not answer."""
    if isinstance(error, (PeerLost, dist.DistError)):
        return not ran_out(error)
    if world_size() == 1 or not isinstance(error, RuntimeError):
        return False
    signs = (
        "gloo",
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
    )
    return any(sign in str(error) for sign in signs)


def stop(*, lost: bool = False) -> None:
    """Destroy the process group; if ranks are `lost`, call `leave_threads` instead."""
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
    """Run `start` and `stop` around work that all ranks do and that cannot be resumed.

    Raises TrainingHalted, exit code 4, for a lost rank.
    """
    lost = True
    try:
        start(device)
        yield
        lost = False
    except Exception as error:
        if not is_peer_error(error):
            lost = getattr(error, "of_rank", None) is None  # otherwise all ranks leave
            raise
        cause = str(error).strip().splitlines()[0]
        reason = f"another process is gone or does not answer ({cause}); {AGAIN}"
        # Duet's launcher reports the processes that are gone.
        quiet = LAUNCHED in os.environ and "peer" in cause
        raise TrainingHalted(reason, rank_specific=True, quiet=quiet) from error
    finally:
        stop(lost=lost)


def barrier() -> None:
    """Wait until every rank calls this, however long one of them works alone.

    Raises PeerLost if a rank is gone.
    """
    if world_size() == 1:
        return
    work = dist.barrier(group=_patient, async_op=True)
    assert work is not None
    pause = 0.0002
    last_look = time.monotonic()
    while not work.is_completed():
        time.sleep(pause)
        pause = min(0.02, 2 * pause)
        if _look is not None and time.monotonic() - last_look > LOOK_SECONDS:
            try:
                _look()
            except PeerLost:
                # Otherwise all ranks were here, and some have left normally since.
                if not work.is_completed():
                    raise
            last_look = time.monotonic()
    work.wait()


def all_reduce_max(flag: int) -> int:
    """Return the maximum of the ranks' integers, over the control group."""
    if world_size() == 1:
        return flag
    value = torch.tensor([flag])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_control)
    return int(value)


def broadcast_object(value: T) -> T:
    """Return rank 0's `value` (plain data) on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def from_main_process(action: Callable[[], T]) -> T:
    """Return rank 0's result of `action()` (plain data) on every rank.

    A UserError of rank 0 is raised on all ranks.
    """
    value: T | None = None
    with raising_together():
        if is_main():
            value = action()
    return broadcast_object(value)  # type: ignore[return-value]


def gather_objects(value: T, *, patient: bool = True) -> list[T]:
    """Return the values (plain data) of all ranks on every rank.

    If `patient`, a rank may take longer than the timeout.
    """
    if world_size() == 1:
        return [value]
    if patient:
        barrier()
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control)
    return values


def gather_to_main(action: Callable[[], T]) -> list[T]:
    """Return all ranks' results of `action()` on rank 0, in order of rank, and [] on the others.

    Results are plain data, with tensors on the CPU. The lowest rank's UserError is raised on all. A
    rank that exceeds the timeout is lost.
    """
    with raising_together(patient=False):
        result = action()
    if world_size() == 1:
        return [result]
    results: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(result, results, group=_control)
    return results or []


def main_first(action: Callable[[], T]) -> T:
    """Run `action()`, such as a download, on rank 0 and then on the others; return its result.

    The lowest rank's UserError is raised on all.
    """
    result: T | None = None
    for turn in (True, False):
        with raising_together():
            if is_main() == turn:
                result = action()
    return result  # type: ignore[return-value]


@contextmanager
def raising_together(*, patient: bool = True) -> Iterator[None]:
    """Raise the lowest rank's UserError on all ranks after work without collective operations."""
    user_error: UserError | None = None
    try:
        yield
    except UserError as error:
        user_error = error
        if world_size() == 1:
            raise
    for number, problem in enumerate(gather_objects(user_error, patient=patient)):
        if problem is not None:
            problem.of_rank = number
            raise problem


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """Replace `tensor` by its sum over the ranks; no gradient flows."""
    if world_size() > 1:
        perform(partial(dist.all_reduce, tensor))
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
    """Group the tensors of parallel lists by device and dtype, for operations on many tensors.

    Returns (device, dtype) of the first list's tensor -> the tensors of that group, from each list.
    """
    columns: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    for row in zip(*lists, strict=True):
        kind = columns.setdefault((row[0].device, row[0].dtype), [[] for _ in row])
        for column, tensor in zip(kind, row, strict=True):
            column.append(tensor)
    return columns


def unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the pieces of a flat tensor into the tensors that it was made of."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        tensors, [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    )


class Snapshot:
    """A copy of tensors' values in one flat tensor for each device and dtype.

    On accelerators many small copies would take longer than one large copy.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.groups = [group for (group,) in by_kind(tensors).values()]
        self.values = [_flat(group) for group in self.groups]

    def restore(self, unless: Tensor | None = None) -> None:
        """Write the values back, but not if the 0-d bool `unless` is True.

        The host does not wait for the device.
        """
        for tensors, values in zip(self.groups, self.values, strict=True):
            if unless is not None:
                values = torch.where(unless.to(values.device), _flat(tensors), values)
            unflatten_into(values, tensors)


@torch.no_grad()
def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def fingerprints(parts: Mapping[str, Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return a number for the bits of each part's tensors, int64 [parts], without waiting for the
    device.

    The number is the sum of the elements' bit patterns modulo 2^64; each tensor has an odd weight.
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
    """Return the parts whose bits differ between ranks, with the ranks that differ from the
    majority.

    Of two ranks, rank 1 counts as the different one. All ranks must call this.
    """
    # [ranks, parts]
    table = torch.stack(gather_objects(fingerprints(parts, device).cpu(), patient=False))
    expected = table.mode(0).values if world_size() > 2 else table[0]
    result = {}
    for name, is_different in zip(parts, (table != expected).T, strict=True):
        if ranks := is_different.nonzero().flatten().tolist():
            result[name] = ranks
    return result
