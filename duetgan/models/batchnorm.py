"""BatchNorm where a batch is computed twice, and over the batches of all processes.

torch's own SyncBatchNorm does not train on CPUs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Network = TypeVar("Network", bound=nn.Module)


@contextlib.contextmanager
def statistics_kept(*modules: nn.Module) -> Iterator[None]:
    """Inside the block, training BatchNorms normalise by their batch as ever but leave their
    running statistics alone: a batch that is computed twice must not count twice.
    """
    norms = [
        norm
        for module in modules
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.training
    ]
    norms = [norm for norm in norms if norm.num_batches_tracked is not None]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # 1 x running + 0 x batch; without running statistics autograd would keep other tensors than
        # the first time
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()  # type: ignore[union-attr]
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


class _AllReduceSum(torch.autograd.Function):
    """Sum over the ranks, whose gradient is the sum of the ranks' gradients. (torch's own warns:
    deprecated.)
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _AllReduceSum.forward(ctx, gradients[0])


class CPUSyncBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` whose training statistics (sum, sum of squares, count) are those of all ranks'
    samples.

    Same state-dict keys as BatchNorm2d; in evaluation, or with one process, it is exactly that.
    Ranks may hold different numbers of samples.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        # float64 for float64 inputs, else float32: the sums of squares must not be taken in half
        # precision
        x = input if input.dtype == torch.float64 else input.float()
        channels = x.shape[1]
        count = x.new_full([1], x.numel() // channels)
        totals = _AllReduceSum.apply(
            torch.cat([x.sum(dim=(0, 2, 3)), x.square().sum(dim=(0, 2, 3)), count])
        )
        n, mean = totals[-1], totals[:channels] / totals[-1]
        variance = (totals[channels : 2 * channels] / n - mean.square()).clamp_min(0)
        self._update_running(mean, variance, n)
        weight = self.weight if self.weight is not None else torch.ones_like(mean)
        bias = self.bias if self.bias is not None else torch.zeros_like(mean)
        scale = weight * torch.rsqrt(variance + self.eps)
        return (x * scale[:, None, None] + (bias - mean * scale)[:, None, None]).to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, n: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        momentum = self.momentum
        if momentum is None:  # the average over all batches
            momentum = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * n / (n - 1)).to(self.running_var.dtype), momentum)


def synchronise_batchnorm(model: Network, device: torch.device) -> Network:
    """Have every BatchNorm of `model` synchronise: torch's in its place on accelerators, ours on
    CPUs.
    """
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = CPUSyncBatchNorm2d  # the same state, another forward pass
    return model
