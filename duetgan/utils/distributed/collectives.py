"""Process groups, ranks and collective operations, which do nothing if there is one process."""

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
LOOK_SECONDS = 10.0  # a waiting rank checks so often that the other ranks are alive

# Process groups, whose type in torch includes a number; None: the default group.
_control: Any = None
_patient: Any = None
_look: Callable[[], object] | None = None
_alone = False
_interceptor: Callable[[Callable[[], object]], object] | None = None


class PeerLost(RuntimeError):
    """The error for another rank that no longer takes part in collective operations."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


@contextmanager
def alone() -> Iterator[None]:
    """Make `rank` return 0 and `world_size` return 1 in the block.

    For work in which the other processes do not take part.
    """
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
    """Call `operation`, a collective operation of a training step on existing tensors.

    Inside a block of `intercepted`, the interceptor is called with `operation` instead.
    """
    if _interceptor is None:
        operation()
    else:
        _interceptor(operation)


@contextmanager
def intercepted(interceptor: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Pass the operations that `perform` gets in the block to `interceptor`.

    The interceptor decides when to run each of them.
    """
    global _interceptor
    _interceptor = interceptor
    try:
        yield
    finally:
        _interceptor = None


def choose_device(requested: str | None, *, several: bool = False) -> torch.device:
    """Return the device of this process, by default the accelerator if there is one.

    An accelerator becomes torch's current device. If `requested` has no index, as in "cuda", each
    process of this machine gets a different accelerator. For the CPU, the number of torch's threads
    is set (`machine.settle`). Raises UserError for a device that does not exist.

    Args:
        requested: "cpu", "cuda", "cuda:1" or None.
        several: True if each process has several devices (see `own_devices`); the first is
            returned.
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
    """Return all devices of this process, beginning with `device`.

    The devices of a machine are divided equally among its processes.
    """
    if device.type == "cpu":
        return [device]
    end = min(device.index + _devices_each(), torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(device.index, end)]


@functools.cache
def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that has no float64 (MPS and some XPUs)."""
    try:
        return (torch.ones(1, dtype=torch.float64, device=device) * 2).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def _devices_each() -> int:
    processes = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    return max(1, torch.accelerator.device_count() // int(processes))


def start(device: torch.device, timeout_seconds: float = 600, *, several: bool = False) -> None:
    """Join the process group that environment variables describe; do nothing for one process.

    The variables are those of torchrun or of Duet's launcher. Tensors travel over the device's own
    backend (NCCL for CUDA, gloo for the CPU), control messages over gloo. An operation that takes
    longer than `timeout_seconds` fails. `several` is True if each process has several devices.
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
    """Set the timeout of collective operations in seconds.

    NCCL gets twice the time, because its timeout ends the process without a message. Each step also
    has a control message over gloo, which then fails first.
    """
    if world_size() == 1:
        return
    # Older torch versions have no dist.set_timeout.
    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    if _control is not None:
        setter(timedelta(seconds=seconds), _control)
    setter(timedelta(seconds=seconds if _control is None else 2 * seconds), None)


def watch_while_waiting(look: Callable[[], object] | None) -> None:
    """Make `barrier` call `look` every LOOK_SECONDS while it waits.

    `look` must raise PeerLost if a rank is gone. None stops the calls.
    """
    global _look
    _look = look


def is_peer_error(error: BaseException) -> bool:
    """Return True if `error` means that another rank is gone or does not answer."""
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
    """Destroy the process group.

    If `lost` is True, because another rank is gone, the group is not destroyed, and this process
    will end without clean-up (`leave_threads`).
    """
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
    """Join the process group for the block (`start`), and leave it at the end (`stop`).

    For work that all ranks do together and that cannot be resumed. Raises TrainingHalted, with exit
    code 4, if a rank is lost.
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
    """Wait until every rank has called this function, for PATIENCE at most.

    Raises PeerLost if a rank is gone (see `watch_while_waiting`).
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
                # A complete barrier means that all ranks were here; some may have ended since.
                if not work.is_completed():
                    raise
            last_look = time.monotonic()
    work.wait()


def all_reduce_max(flag: int) -> int:
    """Return the largest `flag` of all ranks, on every rank.

    The ranks exchange their flags over gloo, without an accelerator.
    """
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
    """Call `action()` on rank 0, and return its result (plain data) on every rank.

    A UserError of rank 0 is raised on all ranks.
    """
    value: T | None = None
    with raising_together():
        if is_main():
            value = action()
    return broadcast_object(value)  # type: ignore[return-value]


def gather_objects(value: T, *, patient: bool = True) -> list[T]:
    """Return a list of all ranks' `value` (plain data), in order of rank, on every rank.

    If `patient` is True, first wait for slow ranks, longer than the timeout (see `barrier`).
    """
    if world_size() == 1:
        return [value]
    if patient:
        barrier()
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control)
    return values


def gather_to_main(action: Callable[[], T]) -> list[T]:
    """Call `action()` on every rank. Return the list of results on rank 0, and [] elsewhere.

    The list is in order of rank. Results are plain data, with tensors on the CPU. If ranks raise
    UserError, every rank raises that of the lowest one. A rank that exceeds the timeout counts as
    lost.
    """
    with raising_together(patient=False):
        result = action()
    if world_size() == 1:
        return [result]
    results: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(result, results, group=_control)
    return results or []


def main_first(action: Callable[[], T]) -> T:
    """Call `action()`, such as a download, on rank 0 and then on the others.

    Returns the result of this rank's call. If ranks raise UserError, every rank raises that of the
    lowest one.
    """
    result: T | None = None
    for turn in (True, False):
        with raising_together():
            if is_main() == turn:
                result = action()
    return result  # type: ignore[return-value]


@contextmanager
def raising_together(*, patient: bool = True) -> Iterator[None]:
    """Raise on every rank the UserError that the block raises on one of them.

    If several ranks raise one, that of the lowest rank is raised. The block must not have
    collective operations. `patient` is passed to `gather_objects`.
    """
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
    """Replace `tensor` by its sum over the ranks, in place, and return it. No gradient flows."""
    if world_size() > 1:
        perform(partial(dist.all_reduce, tensor))
    return tensor


@torch.no_grad()
def average_(tensors: Iterable[Tensor]) -> None:
    """Replace floating-point tensors by their means over the ranks, in place."""
    if world_size() == 1:
        return
    for (parts,) in by_kind(tensors).values():
        flat = all_reduce_sum_(torch.cat([tensor.reshape(-1) for tensor in parts]))
        unflatten_into(flat / world_size(), parts)


def by_kind(*lists: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[list[Tensor]]]:
    """Group the tensors of equally long lists by device and dtype.

    Tensors at the same position of the lists are in the same group; the device and the dtype are
    those of the tensor in the first list. Returns a dict from (device, dtype) to a group, which has
    one list of tensors for each of `lists`. Each group allows one operation on many tensors.
    """
    columns: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    for row in zip(*lists, strict=True):
        kind = columns.setdefault((row[0].device, row[0].dtype), [[] for _ in row])
        for column, tensor in zip(kind, row, strict=True):
            column.append(tensor)
    return columns


def unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the values of a flat tensor into `tensors`, in order; this reverses a concatenation."""
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
        """Write the values back into the tensors, unless the 0-d bool tensor `unless` is True.

        The host does not wait for the device that holds `unless`.
        """
        for tensors, values in zip(self.groups, self.values, strict=True):
            if unless is not None:
                values = torch.where(unless.to(values.device), _flat(tensors), values)
            unflatten_into(values, tensors)


@torch.no_grad()
def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def fingerprints(parts: Mapping[str, Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return a checksum for each part, int64 [number of parts] on `device`.

    `parts` is a dict from the name of a part, such as a network, to its tensors. A checksum is the
    sum of the elements' bits, read as integers, modulo 2^64; the sum of each tensor is multiplied
    by an odd weight. The host does not wait for the device.
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
    """Find the parts (see `fingerprints`) whose bits differ between ranks.

    The result is a dict from a part's name to the ranks that differ from the majority. With two
    ranks, rank 1 counts as the different one. All ranks must call this.
    """
    # [ranks, parts]
    table = torch.stack(gather_objects(fingerprints(parts, device).cpu(), patient=False))
    expected = table.mode(0).values if world_size() > 2 else table[0]
    result = {}
    for name, is_different in zip(parts, (table != expected).T, strict=True):
        if ranks := is_different.nonzero().flatten().tolist():
            result[name] = ranks
    return result
