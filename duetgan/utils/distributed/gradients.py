"""Gradients added up over the ranks without DDP: for a GAN's step, whose phases have several
backward passes.

DDP's hooks send in every backward pass under its forward pass, and demand a gradient of every
parameter in each of them (docs/distributed.md). Here a phase ends with `finish`, whatever its
backward passes were.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from duetgan.utils.distributed import collectives

Compression = Literal["off", "bf16"]
# one collective per this many gradient elements, as DDP's 25 MB buckets
BUCKET_ELEMENTS = 25_000_000 // 4


class GradientExchange:
    """Adds up the `.grad` of `parameters` over the ranks, in place and in flat buckets.

    Each rank's loss must already carry its share of the global mean (sum over the local samples /
    global batch). A parameter without a gradient on this rank contributes zeros, so that ranks
    cannot fall out of step; with `skip` it is left out, which needs to be so on all ranks.
    `compress` bf16: half the bytes, gradients are rounded to bfloat16 before and after they are
    added up. With one process nothing is done.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        missing: Literal["zeros", "skip"] = "zeros",
        compress: Compression = "off",
    ) -> None:
        self.missing, self.compress = missing, compress
        self.buckets = buckets_of(parameters) if collectives.world_size() > 1 else []
        # gradients that each bucket still waits for; None: nothing goes early
        self._waiting: list[int] | None = None
        self._next = 0  # bucket
        self._sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []  # of the buckets before it
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self._arrived(number)
                )

    def overlap(self) -> None:
        """The next backward pass is the last before `finish`: a bucket is sent as soon as it is
        complete.
        """
        self._waiting = [len(bucket) for bucket in self.buckets]

    def _arrived(self, number: int) -> None:
        if self._waiting is None:
            return
        self._waiting[number] -= 1
        # in order, so that all ranks send the same
        while self._next < len(self.buckets) and not self._waiting[self._next]:
            self._send()

    def _send(self) -> None:
        gradients = []
        for parameter in self.buckets[self._next]:
            if parameter.grad is None and self.missing == "zeros":
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        self._next += 1
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat = flat.bfloat16() if self.compress == "bf16" else flat
            self._sent.append((dist.all_reduce(flat, async_op=True), flat, gradients))

    def finish(self) -> None:
        """Send what has not been sent, and wait until every gradient is the sum over the ranks."""
        self._waiting = None
        while self._next < len(self.buckets):
            self._send()
        for work, flat, gradients in self._sent:
            work.wait()
            collectives.unflatten_into(flat, gradients)
        self._next, self._sent = 0, []


def buckets_of(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that train, the last first, as backward passes come to them; each bucket of one device
    (model.split).
    """
    found: list[list[Tensor]] = []
    open_buckets: dict[torch.device, tuple[list[Tensor], int]] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        bucket, size = open_buckets.pop(parameter.device, ([], 0))
        if not bucket:
            found.append(bucket)
        bucket.append(parameter)
        if (size := size + parameter.numel()) < BUCKET_ELEMENTS:
            open_buckets[parameter.device] = bucket, size
    return found
