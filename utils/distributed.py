"""Process groups, ranks and the few collectives the program uses. With one process everything here is a no-op.

Gradients are added up by `all_reduce_gradients` after the backward passes, outside DDP's hooks: that is right for any
number of losses, graphs and micro-batches (docs/distributed.md says what goes wrong otherwise).
"""

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError

T = TypeVar("T")
BUCKET_ELEMENTS = 25_000_000 // 4  # one collective per this many gradient elements, as DDP's 25 MB buckets

_control: dist.ProcessGroup | None = None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def choose_device(requested: str | None) -> torch.device:
    """The device of this process: `requested` ("cpu", "cuda", "cuda:1"), else the accelerator where there is one.

    Under several processes an accelerator without an index becomes this process's own. Raises UserError when the
    device does not exist.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(requested) if requested else (accelerator or torch.device("cpu"))
    except RuntimeError as error:
        raise UserError(f"--device {requested}: not a device; use cpu, cuda or cuda:0") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        raise UserError(f"--device {requested}: this machine has no usable {device.type} device; use --device cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise UserError(
            f"{device.type}:{index} does not exist: {torch.accelerator.device_count()} visible; give fewer --gpus",
            rank_specific=True,
        )
    device = torch.device(device.type, index)
    torch.accelerator.set_device_index(index)
    return device


def start(device: torch.device, timeout_seconds: float = 600) -> None:
    """Join the process group that the environment describes (torchrun's variables, or `utils.launch`); alone:
    nothing.

    Tensors travel over the device's own backend (NCCL for CUDA, gloo for the CPU); a gloo group carries control
    messages.
    """
    global _control
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    backend = dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, timeout=timeout, device_id=None if device.type == "cpu" else device)
    if backend != "gloo":
        group = dist.new_group(backend="gloo", timeout=timeout)
        _control = group if isinstance(group, dist.ProcessGroup) else None


def stop() -> None:
    """Leave the process group."""
    global _control
    if dist.is_initialized():
        dist.destroy_process_group()
    _control = None


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        dist.barrier(group=_control)


def agree(flag: int) -> int:
    """The largest of the ranks' integers, over the control group: e.g. "has anybody been told to stop"."""
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


def on_main(action: Callable[[], T]) -> T:
    """Rank 0's result of `action()` (plain data) on every rank; its UserError is raised on all of them."""
    if world_size() == 1:
        return action()
    outcome: tuple[T | None, str | None] = (None, None)
    if is_main():
        try:
            outcome = (action(), None)
        except UserError as error:
            outcome = (None, str(error))
    value, problem = broadcast_object(outcome)
    if problem is not None:
        raise UserError(problem)
    return value  # type: ignore[return-value]


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """Add up `tensor` over the ranks, in place; no gradient flows."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_gradients(parameters: Iterable[Tensor], *, missing: Literal["zeros", "skip"] = "zeros") -> None:
    """Add up the `.grad` of `parameters` over the ranks, in place, in flat buckets.

    Each rank's loss must already carry its share of the global mean (sum over the local samples / global batch). A
    parameter without a gradient on this rank contributes zeros, so that ranks cannot fall out of step; with `skip` it
    is left out, which needs to be so on all ranks.
    """
    if world_size() == 1:
        return
    bucket: list[Tensor] = []
    pending = []
    for parameter in (p for p in parameters if p.requires_grad):
        if parameter.grad is None and missing == "skip":
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        if sum(g.numel() for g in bucket) >= BUCKET_ELEMENTS:
            pending.append(_reduce_bucket(bucket))
            bucket = []
    if bucket:
        pending.append(_reduce_bucket(bucket))
    for work, flat, grads in pending:
        work.wait()
        pieces = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)])


def _reduce_bucket(grads: list[Tensor]) -> tuple[dist.Work, Tensor, list[Tensor]]:
    flat = torch.cat([g.reshape(-1) for g in grads])
    return dist.all_reduce(flat, async_op=True), flat, grads
