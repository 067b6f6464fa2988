"""Convolutions with fast second derivatives.

Gradient penalties differentiate a network's gradient. Autograd's second derivative of a convolution
is a convolution with filters as large as the image; for grouped convolutions it is a loop over the
groups. On the CPU it is 2 times slower than necessary for grouped and 80 times for depthwise
convolutions. On an H200 it takes half the time of StyleGAN2's penalties.

Every derivative of a convolution is one of three operations: a convolution, its gradient for the
input, and its gradient for the weight. Here the input and the weight have separate autograd nodes.
A single node written in Python would compute both gradients, but the inner gradient of a penalty
needs none for weights.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_penalised = False


@contextlib.contextmanager
def penalised(on: bool = True) -> Iterator[None]:
    """Make second derivatives of `convolve` fast inside the block, and first ones a little slower.

    With `on` False, the block uses autograd's derivatives.
    """
    global _penalised
    previous = _penalised
    _penalised = on
    try:
        yield
    finally:
        _penalised = previous


def is_penalised() -> bool:
    """Return True inside a block of `penalised` whose `on` is True."""
    return _penalised


class Geometry(NamedTuple):
    """Stride, padding, groups and direction (transposed or not) of a convolution."""

    stride: int = 1
    padding: int = 0
    groups: int = 1
    transposed: bool = False


class Context(Protocol):
    """The attributes of an autograd context that functions of models/layers use."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    geometry: Geometry
    for_input: bool
    operation: tuple[str, float, int]
    limit: float | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_dirty(self, *tensors: Tensor) -> None: ...


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which convolutions of `x` run: autocast's if it is on, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    run = F.conv_transpose2d if geometry.transposed else F.conv2d
    return run(
        x, weight, bias, stride=geometry.stride, padding=geometry.padding, groups=geometry.groups
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the convolution of `x` in autocast's precision; for its derivatives see `penalised`.

    Args:
        x: [N, I, H, W].
        weight: [O, I / groups, k, k]; for a transposed convolution [I, O / groups, k, k].
        bias: [O] or None.
    """
    # Compiled and traced graphs have no second derivatives.
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
    """Convolution of x that passes a gradient to x, but not to the weight or bias."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _plain(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        return _Gradient.apply(grad, weight, x.detach(), ctx.geometry, True), None, None, None


class _WeightPath(torch.autograd.Function):
    """Function that returns zeros in the shape of a convolution's output, to pass gradients on.

    It passes gradients to the weight and the bias only. x comes in a tuple, which hides it from
    autograd: as an input it would connect this node to the image.
    """

    @staticmethod
    def forward(
        ctx: Context,
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
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_gradient = None
        bias_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = _Gradient.apply(grad, x, weight.detach(), ctx.geometry, False)
        if ctx.needs_input_grad[2]:
            bias_gradient = grad.sum(dim=(0, 2, 3))
        return None, weight_gradient, bias_gradient, None, None


class _Joined(torch.autograd.Function):
    """Function that returns the output of `_InputPath` and passes its gradient to both paths.

    Adding the zeros of `_WeightPath` would do the same, but pass over the image once more.
    """

    @staticmethod
    def forward(ctx: Context, y: Tensor, _zeros: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(_ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class _Gradient(torch.autograd.Function):
    """Gradient of a convolution with respect to its input if `for_input`, else to its weight.

    `grad` is the gradient for the convolution's output. `factor` is the weight if `for_input`, else
    the input. `target` is the tensor whose gradient is computed; only its shape and memory format
    matter. The result is bilinear in `grad` and `factor`.
    """

    @staticmethod
    def forward(
        ctx: Context,
        grad: Tensor,
        factor: Tensor,
        target: Tensor,
        geometry: Geometry,
        for_input: bool,
    ) -> Tensor:
        ctx.save_for_backward(grad, factor)
        ctx.geometry = geometry
        ctx.for_input = for_input
        x, weight = (target, factor) if for_input else (factor, target)
        gradients = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            stride=[geometry.stride] * 2,
            padding=[geometry.padding] * 2,
            dilation=[1, 1],
            transposed=geometry.transposed,
            output_padding=[0, 0],
            groups=geometry.groups,
            output_mask=[for_input, not for_input, False],
        )
        return gradients[0] if for_input else gradients[1]

    @staticmethod
    def backward(ctx: Context, outer: Tensor) -> tuple[Tensor | None, ...]:
        grad, factor = ctx.saved_tensors
        geometry = ctx.geometry
        x, weight = (outer, factor) if ctx.for_input else (factor, outer)
        grad_gradient = None
        factor_gradient = None
        if ctx.needs_input_grad[0]:
            grad_gradient = _twice(x, weight, None, geometry)
        if ctx.needs_input_grad[1]:
            factor_gradient = _Gradient.apply(
                grad, outer, factor.detach(), geometry, not ctx.for_input
            )
        return grad_gradient, factor_gradient, None, None, None
