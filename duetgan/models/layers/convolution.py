"""Convolutions to be differentiated twice.

Penalties differentiate a network's gradient. Autograd's own second derivative of a convolution is
itself a convolution with filters as large as the image, for grouped ones a loop over the groups: on
the CPU 2 times slower than need be for grouped and 80 times for depthwise convolutions, on an H200
half of StyleGAN2's penalties. But every derivative of a convolution is one of three: a convolution,
its gradient for the input, its gradient for the weight. Input and weight have a node each, because
autograd asks a node that is written in Python for all its gradients, and the inner gradient of a
penalty needs none for weights.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_penalised = False


@contextlib.contextmanager
def penalised(on: bool = True) -> Iterator[None]:
    """In it `convolve` prepares for a penalty: second derivatives are fast then, first ones a
    little slower.
    """
    global _penalised
    before, _penalised = _penalised, on
    try:
        yield
    finally:
        _penalised = before


def penalty_comes() -> bool:
    return _penalised


class Geometry(NamedTuple):
    """How a convolution of square filters moves over the image."""

    stride: int = 1
    padding: int = 0
    groups: int = 1
    transposed: bool = False


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that convolutions of `x` run in: autocast's where it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    run = F.conv_transpose2d if geometry.transposed else F.conv2d
    return run(
        x, weight, bias, stride=geometry.stride, padding=geometry.padding, groups=geometry.groups
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """x [N, I, H, W], filters [O, I / groups, k, k] (transposed: [I, O / groups, k, k]), bias [O];
    under autocast.
    """
    # which know of no second derivatives
    plain = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if plain or not _penalised or not torch.is_grad_enabled():
        return _plain(x, weight, bias, geometry)
    dtype = compute_dtype(x)
    return _twice(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), geometry)


def _twice(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    y = _InputPath.apply(x, weight, bias, geometry)
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return _Joined.apply(y, _WeightPath.apply((x,), weight, bias, geometry, y.shape))
    return y


class _InputPath(torch.autograd.Function):
    """The convolution, whose gradient goes to x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _plain(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        return _Gradient.apply(grad, weight, x.detach(), ctx.geometry, True), None, None, None


class _WeightPath(torch.autograd.Function):
    """Nothing, in the shape of the convolution, whose gradient goes to weight and bias alone.

    x comes in a tuple, which autograd does not look into: as an input it would put this node on the
    way to the image.
    """

    @staticmethod
    def forward(
        ctx: Any,
        wrapped: tuple[Tensor],
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        shape: torch.Size,
    ) -> Tensor:
        (x,) = wrapped
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return x.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_weight = (
            _Gradient.apply(grad, x, weight.detach(), ctx.geometry, False)
            if ctx.needs_input_grad[1]
            else None
        )
        return (
            None,
            to_weight,
            grad.sum(dim=(0, 2, 3)) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class _Joined(torch.autograd.Function):
    """y as it lies in memory, with both paths' gradients: a sum would pass over the image."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, _nothing: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:
        return grad, grad


class _Gradient(torch.autograd.Function):
    """d<grad, convolution>/dx, bilinear in grad and weight, or /dweight, bilinear in grad and x.

    `other` is weight or x; of `like`, the one that the gradient is for, only the shape and the
    layout matter.
    """

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, other: Tensor, like: Tensor, geometry: Geometry, of_input: bool
    ) -> Tensor:
        ctx.save_for_backward(grad, other)
        ctx.settings = geometry, of_input
        x, weight = (like, other) if of_input else (other, like)
        (stride, padding, groups, transposed), mask = geometry, [of_input, not of_input, False]
        # no dilation, no padding of the output
        how = [stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups
        gradients = torch.ops.aten.convolution_backward(grad, x, weight, None, *how, mask)
        return gradients[0] if of_input else gradients[1]

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:
        (grad, other), (geometry, of_input) = ctx.saved_tensors, ctx.settings
        x, weight = (outer, other) if of_input else (other, outer)
        to_grad = _twice(x, weight, None, geometry) if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[1]
        to_other = (
            _Gradient.apply(grad, outer, other.detach(), geometry, not of_input) if wanted else None
        )
        return to_grad, to_other, None, None, None
