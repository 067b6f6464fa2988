"""Parameters of several layers times their gains, and normalisations, with few operators.

A GPU waits for the host where a step has many small operators (docs/measurements/operators.md). The
functions of autograd here have derivatives of fewer operators than those of their formulas. They
can be differentiated any number of times: quantities that are neither inputs nor outputs are
computed again where a derivative will itself be differentiated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-8


def is_plain() -> bool:
    """Return True where plain operators run: without gradients, and while a graph is recorded."""
    is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return is_recorded or not torch.is_grad_enabled()


# --- equalised learning rate


class _Scaled(torch.autograd.Function):
    """Tensors of one dtype times numbers, as `dtype`; on gradients it is its own derivative."""

    @staticmethod
    def forward(
        ctx: Any, gains: Sequence[float], dtype: torch.dtype, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gains = gains
        ctx.dtype = tensors[0].dtype
        if dtype.itemsize > ctx.dtype.itemsize:
            return tuple(torch._foreach_mul(_cast(tensors, dtype), gains))
        return tuple(_cast(torch._foreach_mul(tensors, gains), dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_Scaled.apply(ctx.gains, ctx.dtype, *grads)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    if tensors[0].dtype == dtype:
        return tensors
    results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(results, tensors)
    return results


def scaled(tensors: Sequence[Tensor], gains: Sequence[float], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of one dtype, each multiplied by its gain, as `dtype`."""
    if is_plain():
        return [(tensor * gain).to(dtype) for tensor, gain in zip(tensors, gains, strict=True)]
    return list(_Scaled.apply(gains, dtype, *tensors))


# --- normalisations


class _SecondMoment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = _factor(x)
        y = x * ctx.factor
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        factor = _factor(x) if torch.is_grad_enabled() else ctx.factor
        return torch.addcmul(grad, y, (grad * y).mean(dim=1, keepdim=True), value=-1) * factor


def _factor(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPSILON)


def normalize_second_moment(x: Tensor) -> Tensor:
    """Scale `x` [N, F, ...] to unit mean square over F (StyleGAN2, mapping network's input)."""
    return x * _factor(x) if is_plain() else _SecondMoment.apply(x)


class _GroupStd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.deviations = _deviations(x)
        return ctx.deviations[1].mean(dim=(1, 2, 3))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        difference, std = _deviations(x) if torch.is_grad_enabled() else ctx.deviations
        # The differences of a group add up to 0, so that the mean adds nothing.
        factor = (grad / x[0].numel())[:, None, None, None] / std
        return difference * factor[:, None]


def _deviations(x: Tensor) -> tuple[Tensor, Tensor]:
    difference = x - x.mean(dim=1, keepdim=True)
    # On the CPU torch.var over an inner dimension was measured to be 20 times slower.
    return difference, (difference.square().mean(dim=1) + EPSILON).sqrt()


def group_std(x: Tensor) -> Tensor:
    """Return sqrt(var + 1e-8) over groups, averaged: [groups, samples, C, H, W] -> [groups]."""
    return _deviations(x)[1].mean(dim=(1, 2, 3)) if is_plain() else _GroupStd.apply(x)


class _Demodulated(torch.autograd.Function):
    """Style, filters and demodulation coefficient of a convolution.

    The first two are returned so that their gradients need not be added to those of the
    coefficient, each by another operator.
    """

    @staticmethod
    def forward(
        ctx: Any, style: Tensor, weight: Tensor, gain: float, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.squares = _squares(style, weight)
        ctx.gain = gain
        scale = (ctx.squares[0] @ ctx.squares[1].t()).add_(epsilon).rsqrt_().mul_(gain)
        ctx.save_for_backward(style, weight, scale)
        return style, weight, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        style, weight, scale = ctx.saved_tensors
        squares = _squares(style, weight) if torch.is_grad_enabled() else ctx.squares
        # d scale / d energy = -scale^3 / (2 gain^2), and the energy is squares[0] @ squares[1]^T.
        slope = grads[2] * scale.pow(3)
        factor = -1 / ctx.gain**2
        style_grad = torch.addcmul(grads[0], style, slope @ squares[1], value=factor)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            energy_grad = (slope.t() @ squares[0])[:, :, None, None]
            weight_grad = torch.addcmul(grads[1], weight, energy_grad, value=factor)
        return style_grad, weight_grad, None, None


def _squares(style: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return style.square(), weight.square().sum(dim=(2, 3))


def demodulated(
    style: Tensor, weight: Tensor, gain: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `style`, `weight`, and gain / sqrt(sum (weight * style)^2 + epsilon).

    Args:
        style: [N, I].
        weight: Filters [O, I, k, k].
        gain: Factor of the coefficients [N, O].
        epsilon: Lower bound of the sum over inputs and pixels of a filter.
    """
    if is_plain():
        energy = style.square() @ weight.square().sum(dim=(2, 3)).t()
        return style, weight, gain * torch.rsqrt(energy + epsilon)
    return _Demodulated.apply(style, weight, gain, epsilon)
