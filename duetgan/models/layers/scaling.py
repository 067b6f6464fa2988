"""Parameters of several layers times their gains, standard deviations and demodulation, with few
operators.

A GPU waits for the host where a step has many small operators (docs/measurements/operators.md). The
autograd functions here have derivatives with fewer operators than those that autograd derives from
the formulas. They can be differentiated any number of times: quantities that are neither inputs nor
outputs are computed again where a derivative will itself be differentiated.
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
    """Tensors of one dtype times numbers, as `dtype`; the derivative is the same function."""

    @staticmethod
    def forward(
        ctx: Any, gains: Sequence[float] | None, dtype: torch.dtype, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gains = gains
        ctx.dtype = tensors[0].dtype
        results = tensors
        if dtype.itemsize > ctx.dtype.itemsize:
            results = _cast(results, dtype)
        if gains is not None:
            results = torch._foreach_mul(results, gains)
        return _cast(results, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        present = {number: grad for number, grad in enumerate(grads) if grad is not None}
        gains = ctx.gains and [ctx.gains[number] for number in present]
        results = iter(_Scaled.apply(gains, ctx.dtype, *present.values()) if present else ())
        return None, None, *(next(results) if n in present else None for n in range(len(grads)))


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    if tensors[0].dtype == dtype:
        return tensors
    results = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    torch._foreach_copy_(results, tensors)
    return results


def scaled(
    tensors: Sequence[Tensor], gains: Sequence[float] | None, dtype: torch.dtype
) -> list[Tensor]:
    """Return tensors of one dtype, each multiplied by its gain if there are gains, as `dtype`."""
    if not tensors or (gains is None and tensors[0].dtype == dtype):
        return list(tensors)
    if is_plain():
        gains = gains or [1.0] * len(tensors)
        return [(t * g).to(dtype) for t, g in zip(tensors, gains, strict=True)]
    return list(_Scaled.apply(gains, dtype, *tensors))


# --- statistics and demodulation


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
        # The differences of a group add up to 0, so the mean's derivative adds 0.
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
    coefficient by further operators.
    """

    @staticmethod
    def forward(
        ctx: Any, style: Tensor, weight: Tensor, gain: float, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.gain = gain
        ctx.squares = _squares(style, weight)
        scale = _coefficient(ctx.squares[0], ctx.squares[1], gain, epsilon)
        ctx.save_for_backward(style, weight, scale)
        return style, weight, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        style, weight, scale = ctx.saved_tensors
        squares = _squares(style, weight) if torch.is_grad_enabled() else ctx.squares
        # d scale / d energy = -scale^3 / (2 gain^2), and the energy is style^2 @ (weight^2)^T.
        slope = grads[2] * scale.pow(3)
        value = -1 / ctx.gain**2
        by_weight = (slope.t() @ squares[0])[:, :, None, None]
        return (
            torch.addcmul(grads[0], style, slope @ squares[1], value=value),
            torch.addcmul(grads[1], weight, by_weight, value=value),
            None,
            None,
        )


def _squares(style: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return style.square(), weight.square().sum(dim=(2, 3))


def _coefficient(styles: Tensor, weights: Tensor, gain: float, epsilon: float) -> Tensor:
    # One operator adds epsilon and divides by gain^2: rsub is other - alpha * input.
    energy = styles @ weights.t()
    return torch.rsub(energy, epsilon / gain**2, alpha=-1 / gain**2).rsqrt()


def demodulated(
    style: Tensor, weight: Tensor, gain: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `style` and `weight`, and gain / sqrt(sum (weight * style)^2 + epsilon), [N, O].

    Args:
        style: [N, I].
        weight: Filters [O, I, k, k].
        gain: Factor of the coefficients.
        epsilon: Lower bound of the sum over inputs and pixels of a filter.
    """
    if is_plain():
        styles, weights = _squares(style, weight)
        return style, weight, _coefficient(styles, weights, gain, epsilon)
    return _Demodulated.apply(style, weight, gain, epsilon)
