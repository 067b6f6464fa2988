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
        ctx: Any, gains: Sequence[float] | None, dtype: torch.dtype, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gains = gains
        ctx.dtype = tensors[0].dtype
        results = tensors
        if dtype.itemsize > ctx.dtype.itemsize:
            results = _cast(results, dtype)
        if gains is not None:
            results = torch._foreach_mul(results, gains)
        return _cast(results, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_Scaled.apply(ctx.gains, ctx.dtype, *grads)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    if tensors[0].dtype == dtype:
        return tensors
    results = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    torch._foreach_copy_(results, tensors)
    return results


def scaled(tensors: Sequence[Tensor], gains: Sequence[float], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of one dtype, each multiplied by its gain, as `dtype`."""
    if is_plain():
        return [(tensor * gain).to(dtype) for tensor, gain in zip(tensors, gains, strict=True)]
    return list(_Scaled.apply(gains, dtype, *tensors))


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of one dtype as `dtype`."""
    if is_plain() or not tensors or tensors[0].dtype == dtype:
        return [tensor.to(dtype) for tensor in tensors]
    return list(_Scaled.apply(None, dtype, *tensors))


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
    """Styles, filters and demodulation coefficients of several convolutions.

    The first two are returned so that their gradients need not be added to those of the
    coefficients by further operators.
    """

    @staticmethod
    def forward(
        ctx: Any, gain: float, epsilons: Sequence[float], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gain = gain
        ctx.squares = _squares(tensors)
        styles, weights = _halves(ctx.squares)
        scales = [style @ weight.t() for style, weight in zip(styles, weights, strict=True)]
        torch._foreach_add_(scales, epsilons)
        torch._foreach_rsqrt_(scales)
        torch._foreach_mul_(scales, gain)
        ctx.save_for_backward(*tensors, *scales)
        return *tensors, *scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count = len(grads) // 3
        tensors = ctx.saved_tensors[: 2 * count]
        scales = ctx.saved_tensors[2 * count :]
        squares = _squares(tensors) if torch.is_grad_enabled() else ctx.squares
        # d scale / d energy = -scale^3 / (2 gain^2), and the energy is style^2 @ (weight^2)^T.
        slopes = torch._foreach_mul(grads[2 * count :], torch._foreach_pow(scales, 3))
        factors = []
        for slope, weight in zip(slopes, squares[count:], strict=True):
            factors.append(slope @ weight)
        for slope, style in zip(slopes, squares[:count], strict=True):
            factors.append((slope.t() @ style)[:, :, None, None])
        results = torch._foreach_addcmul(
            grads[: 2 * count], tensors, factors, value=-1 / ctx.gain**2
        )
        return None, None, *results


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


def _squares(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the squares of styles [N, I], then those of filters, summed over pixels [O, I]."""
    styles, weights = _halves(torch._foreach_mul(tensors, tensors))
    return [*styles, *(weight.sum(dim=(2, 3)) for weight in weights)]


def demodulated(
    styles: Sequence[Tensor], weights: Sequence[Tensor], gain: float, epsilons: Sequence[float]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (style, weight, gain / sqrt(sum (weight * style)^2 + epsilon)) of each convolution.

    Args:
        styles: [N, I] of each.
        weights: Filters [O, I, k, k] of each.
        gain: Factor of the coefficients [N, O].
        epsilons: Lower bounds of the sums over inputs and pixels of a filter.
    """
    if is_plain() or not styles:
        energies = [
            style.square() @ weight.square().sum(dim=(2, 3)).t()
            for style, weight in zip(styles, weights, strict=True)
        ]
        scales = [
            gain * torch.rsqrt(e + floor) for e, floor in zip(energies, epsilons, strict=True)
        ]
    else:
        results = _Demodulated.apply(gain, epsilons, *styles, *weights)
        count = len(styles)
        styles = results[:count]
        weights = results[count : 2 * count]
        scales = results[2 * count :]
    return list(zip(styles, weights, scales, strict=True))
