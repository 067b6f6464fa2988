"""Sum gradients over the ranks without DDP, for a GAN's step with several backward passes.

DDP sends gradients in each backward pass, and each pass must give every parameter a gradient
(docs/distributed.md). Here any number of backward passes may come before `finish`, which completes
the sums.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from duetgan.utils.distributed import collectives

Compression = Literal["off", "bf16"]
# one collective per this many gradient elements, as DDP's 25 MB buckets
BUCKET_ELEMENTS = 25_000_000 // 4


class GradientExchange:
    """An object that sums the `.grad` of `parameters` over the ranks, in place and in flat buckets.

    Each rank's loss must be a sum over its own samples, divided by the global batch size. With one
    process nothing is done.

    Args:
        missing: the treatment of a parameter without a gradient on this rank. "zeros": it
            contributes zeros; "skip": it is left out, and all ranks must lack its gradient.
        compress: "bf16" halves the bytes; gradients are rounded to bfloat16 before and after the
            sum.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        missing: Literal["zeros", "skip"],
        compress: Compression,
    ) -> None:
        self.missing, self.compress = missing, compress
        self.buckets = buckets_of(parameters) if collectives.world_size() > 1 else []
        # gradients that each bucket still waits for; None: no bucket is sent before `finish`
        self._waiting: list[int] | None = None
        self._next = 0  # index of the next bucket to send
        self._sent: list[SentBucket] = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self._arrived(number)
                )

    def overlap(self) -> None:
        """Make the next backward pass send each bucket as soon as all its gradients are complete.

        Call this before the last backward pass.
        """
        self._waiting = [len(bucket) for bucket in self.buckets]

    def _arrived(self, number: int) -> None:
        if self._waiting is None:
            return
        self._waiting[number] -= 1
        # Buckets go in order, so that all ranks send the same one.
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
            bucket = SentBucket(flat, gradients)
            collectives.perform(bucket.send)
            self._sent.append(bucket)

    def finish(self) -> None:
        """Send the remaining buckets, and wait until every gradient is the sum over the ranks."""
        self._waiting = None
        while self._next < len(self.buckets):
            self._send()
        for bucket in self._sent:
            collectives.perform(bucket.wait)
            collectives.unflatten_into(bucket.flat, bucket.gradients)
        self._next = 0
        self._sent = []


@dataclass
class SentBucket:
    """A bucket of gradients that is being summed over the ranks."""

    flat: Tensor
    gradients: list[Tensor]
    work: dist.Work | None = None

    def send(self) -> None:
        self.work = dist.all_reduce(self.flat, async_op=True)

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None


def buckets_of(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide the trainable parameters into buckets; the parameters of a bucket are on one device.

    A network may be on several devices (config key model.split). The last parameters come first,
    because backward passes reach them first.
    """
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.device, tuple[list[Tensor], int]] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        bucket, size = open_buckets.pop(parameter.device, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        if (size := size + parameter.numel()) < BUCKET_ELEMENTS:
            open_buckets[parameter.device] = bucket, size
    return buckets
