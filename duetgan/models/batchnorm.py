"""BatchNorm for activation checkpointing, and BatchNorm synchronised over processes.

torch's SyncBatchNorm does not train on CPUs. On GPUs it makes the host wait three times in each
layer.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from duetgan.models.backbones.base import in_turn
from duetgan.models.layers.convolution import Context
from duetgan.utils.distributed.collectives import perform

Network = TypeVar("Network", bound=nn.Module)


@contextlib.contextmanager
def statistics_kept(*modules: nn.Module) -> Iterator[None]:
    """Keep the running statistics of the BatchNorms in `modules` unchanged inside the block.

    The BatchNorms still normalise by the statistics of the batch. Inside the block, a batch can be
    computed a second time without being counted twice.
    """
    originals: list[tuple[_BatchNorm, float | None, Tensor]] = []
    for module in modules:
        for norm in module.modules():
            if not isinstance(norm, _BatchNorm) or not norm.training:
                continue
            if norm.num_batches_tracked is not None:
                originals.append((norm, norm.momentum, norm.num_batches_tracked))
    for norm, _, count in originals:
        # Momentum 0 changes nothing. Without running statistics autograd would save other tensors
        # than in the first pass.
        norm.momentum = 0.0
        norm.num_batches_tracked = count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in originals:
            norm.momentum = momentum
            norm.num_batches_tracked = count


def recomputed(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Call the modules one after another, starting with `x`, and return the last output.

    Activations inside the modules are not stored; the backward pass computes them again.
    """
    function = partial(in_turn, modules)
    if torch.compiler.is_compiling():
        # A compiled graph updates BatchNorm's statistics once even if it computes them again.
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(
        function,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (contextlib.nullcontext(), statistics_kept(*modules)),
    )


class _AllReduceSum(torch.autograd.Function):
    """Autograd function that sums a tensor over all ranks; its backward pass sums the gradients.

    torch's own differentiable all-reduce is deprecated and prints a warning.
    """

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        perform(partial(dist.all_reduce, total))
        return total

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return _AllReduceSum.forward(ctx, gradients[0])


class CPUSyncBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` whose training statistics are computed over the samples of all ranks.

    In evaluation mode, and with one process, the outputs are those of BatchNorm2d. The state dict
    has the same keys as that of BatchNorm2d. Ranks may have different numbers of samples.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        return self.synchronised(input)

    def synchronised(self, x: Tensor) -> Tensor:
        """Normalise `x` [N, C, H, W] by all ranks' statistics; update the running statistics."""
        # Sums of squares must not be computed in half precision.
        dtype = x.dtype
        x = x if dtype == torch.float64 else x.float()
        channels = x.shape[1]
        count = x.new_full([1], x.numel() // channels)
        totals = _AllReduceSum.apply(
            torch.cat([x.sum(dim=(0, 2, 3)), x.square().sum(dim=(0, 2, 3)), count])
        )
        n = totals[-1]
        mean = totals[:channels] / n
        variance = (totals[channels : 2 * channels] / n - mean.square()).clamp_min(0)
        self._update_running(mean, variance, n)
        weight = self.weight if self.weight is not None else torch.ones_like(mean)
        bias = self.bias if self.bias is not None else torch.zeros_like(mean)
        scale = weight * torch.rsqrt(variance + self.eps)
        return (x * scale[:, None, None] + (bias - mean * scale)[:, None, None]).to(dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, n: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the average over all batches
            momentum = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * n / (n - 1)).to(self.running_var.dtype), momentum)


def _dense(x: Tensor, model: Tensor) -> Tensor:
    """Return `x` in the memory format of the tensor `model`: channels_last or contiguous.

    torch's BatchNorm kernels for CUDA need this.
    """
    is_last = model.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


class _Synchronised(torch.autograd.Function):
    """Autograd function like that of torch's SyncBatchNorm, but every rank must have samples.

    torch also supports ranks without samples. It removes their statistics by a mask, and the host
    must wait for the mask.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: nn.BatchNorm2d
    ) -> Tensor:
        x = _dense(x, x)
        channels = x.shape[1]
        local = [*torch.batch_norm_stats(x, layer.eps)]
        local.append(local[0].new_full([1], x.numel() // channels))
        row = torch.cat(local)
        rows = row.new_empty(dist.get_world_size() * len(row))
        perform(partial(dist.all_gather_into_tensor, rows, row))
        means, deviations, counts = rows.view(-1, len(row)).split([channels, channels, 1], dim=1)
        mean, inverse_deviation = torch.batch_norm_gather_stats_with_counts(
            x,
            means,
            deviations,
            layer.running_mean,
            layer.running_var,
            layer.momentum,  # type: ignore[arg-type]
            layer.eps,
            counts.flatten(),
        )
        ctx.save_for_backward(x, weight, mean, inverse_deviation, counts.int())
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse_deviation, layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation, counts = ctx.saved_tensors
        grad = _dense(grad, x)
        *sums, weight_grad, bias_grad = torch.batch_norm_backward_reduce(
            grad, x, mean, inverse_deviation, weight, *ctx.needs_input_grad[:3]
        )
        if not ctx.needs_input_grad[0]:  # the first layer after frozen stages
            return None, weight_grad, bias_grad, None
        total = torch.cat(sums)
        perform(partial(dist.all_reduce, total))
        x_grad = torch.batch_norm_backward_elemt(
            grad, x, mean, inverse_deviation, weight, total[: len(mean)], total[len(mean) :], counts
        )
        return x_grad, weight_grad, bias_grad, None


class SyncBatchNorm2d(CPUSyncBatchNorm2d):
    """`CPUSyncBatchNorm2d` for CUDA: the same results, computed by torch's BatchNorm kernels.

    Every rank must have samples. A training step runs 12 operators, which pass over the image eight
    times. The formula of CPUSyncBatchNorm2d would run 77 operators and move ten times as many
    bytes; it is used only if `momentum` is None.
    """

    def synchronised(self, x: Tensor) -> Tensor:
        if self.momentum is None:
            return super().synchronised(x)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return _Synchronised.apply(x, self.weight, self.bias, self)


def synchronise_batchnorm(model: Network, device: torch.device) -> Network:
    """Turn every nn.BatchNorm2d of `model` into a synchronised one, in place, and return `model`.

    `device` is the device of the model.
    """
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            # same state, different forward pass
            module.__class__ = CPUSyncBatchNorm2d if device.type == "cpu" else SyncBatchNorm2d
    return model
