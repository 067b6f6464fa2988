"""Operations on the parameters of several layers at once, and the standard deviation of groups.

The operations are gains, casts, affine layers and demodulation. A GPU waits for the host where a
step has many small operators (docs/measurements/operators.md). The autograd functions here have
derivatives with fewer operators than those that autograd derives from the formulas. They can be
differentiated any number of times. Where a backward pass will be differentiated again, it computes
intermediate values anew from the inputs, because autograd cannot differentiate values that were
stored in the forward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-8


def is_plain() -> bool:
    """Return True while torch.compile or torch.jit records a graph.

    Graphs must consist of operators that exports know, so the custom functions here are not used.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors * 2)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second = grads[: len(grads) // 2], grads[len(grads) // 2 :]
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if None not in (a, b)]
        sums = iter(torch._foreach_add(*zip(*pairs, strict=True)) if pairs else ())
        return tuple(
            (b if a is None else a) if a is None or b is None else next(sums)
            for a, b in zip(first, second, strict=True)
        )


def twice(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the list of tensors two times, for two uses.

    One operator adds the gradients of both uses for all tensors.
    """
    if is_plain():
        return list(tensors), list(tensors)
    results = _Twice.apply(*tensors)
    return list(results[: len(tensors)]), list(results[len(tensors) :])


# --- equalised learning rate


class _Scaled(torch.autograd.Function):
    """Autograd function that multiplies tensors of one dtype by numbers and casts them to `dtype`.

    The derivative is the same function.
    """

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
    """Multiply tensors of one dtype by their gains, if any, and cast them to `dtype`."""
    if not tensors or (gains is None and tensors[0].dtype == dtype):
        return list(tensors)
    if is_plain():
        gains = gains or [1.0] * len(tensors)
        return [(t * g).to(dtype) for t, g in zip(tensors, gains, strict=True)]
    return list(_Scaled.apply(gains, dtype, *tensors))


def cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Cast each tensor to its dtype in `dtypes`, with one operator for each of the dtypes."""
    results = list(tensors)
    for dtype in set(dtypes):
        numbers = [n for n, t in enumerate(tensors) if dtypes[n] == dtype != t.dtype]
        copies = scaled([tensors[n] for n in numbers], None, dtype)
        for n, copy in zip(numbers, copies, strict=True):
            results[n] = copy
    return results


class _ScaledNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: list[Tensor], *strengths: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.maps = maps
        return torch._foreach_mul(maps, strengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(
            None if grad is None else torch.dot(grad.flatten(), noise.flatten())
            for grad, noise in zip(grads, ctx.maps, strict=True)
        )


def scaled_noise(maps: Sequence[Tensor], strengths: Sequence[Tensor]) -> list[Tensor]:
    """Multiply each noise map by its strength, a 0-d tensor. Only the strengths get gradients."""
    if is_plain():
        return [noise * strength for noise, strength in zip(maps, strengths, strict=True)]
    return list(_ScaledNoise.apply(list(maps), *strengths))


# --- several matrices in one tensor


class _Stacked(torch.autograd.Function):
    """Autograd function that puts matrices into the corners of a tensor of zeros, see `stacked`.

    The derivative is `_Corners`.
    """

    @staticmethod
    def forward(ctx: Any, size: torch.Size, *matrices: Tensor | None) -> Tensor:
        ctx.shapes = [None if matrix is None else matrix.shape for matrix in matrices]
        present = [matrix for matrix in matrices if matrix is not None]
        stack = present[0].new_zeros(size)
        corners = _corners(stack, ctx.shapes)
        torch._foreach_copy_([corner for corner in corners if corner is not None], present)
        return stack

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Corners.apply(grad, ctx.shapes)


class _Corners(torch.autograd.Function):
    """Autograd function that takes matrices out of the corners of a stack, see `corners`.

    The derivative is `_Stacked`.
    """

    @staticmethod
    def forward(ctx: Any, stack: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.size = stack.shape
        return tuple(_corners(stack, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return None, None
        return _Stacked.apply(ctx.size, *grads), None


def _corners(stack: Tensor, shapes: Sequence[torch.Size | None]) -> list[Tensor | None]:
    """Return a view of the top left corner of each matrix in `stack`, in the given shape.

    If a shape is None, so is the entry of the result.
    """
    return [
        None if shape is None else matrix[: shape[0], : shape[1]]
        for matrix, shape in zip(stack.unbind(), shapes, strict=True)
    ]


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Put n matrices of several sizes into one tensor [n, rows, columns], padded with zeros.

    rows and columns are the largest of all matrices. Each matrix is in the top left corner.
    """
    rows = max(matrix.shape[0] for matrix in matrices)
    columns = max(matrix.shape[1] for matrix in matrices)
    if is_plain():
        return torch.stack(
            [F.pad(m, (0, columns - m.shape[1], 0, rows - m.shape[0])) for m in matrices]
        )
    return _Stacked.apply(torch.Size([len(matrices), rows, columns]), *matrices)


def corners(stack: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Undo `stacked`: take matrices of the given shapes out of the corners of `stack`."""
    if is_plain():
        return [matrix[:r, :c] for matrix, (r, c) in zip(stack.unbind(), shapes, strict=True)]
    return list(_Corners.apply(stack, [torch.Size(shape) for shape in shapes]))


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
    """Return the standard deviation within each group, averaged over C, H and W.

    `x` is [groups, samples, C, H, W], the result [groups]. The deviation is sqrt(var + 1e-8), with
    the variance over the samples of the group.
    """
    return _deviations(x)[1].mean(dim=(1, 2, 3)) if is_plain() else _GroupStd.apply(x)


class _Demodulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, styles: Tensor, gain: float, epsilons: Sequence[float], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gain = gain
        ctx.squares = _squares(styles, weights)
        energies = _energies(ctx.squares, weights)
        scales = torch._foreach_rsqrt(torch._foreach_add(energies, epsilons))
        scales = torch._foreach_mul(scales, gain)
        ctx.save_for_backward(styles, *weights, *scales)
        return scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        styles, *saved = ctx.saved_tensors
        weights, scales = tuple(saved[: len(grads)]), saved[len(grads) :]
        squares = _squares(styles, weights) if torch.is_grad_enabled() else ctx.squares
        present = {number: grad for number, grad in enumerate(grads) if grad is not None}
        if not present:
            return (None,) * (3 + len(grads))
        # d scale / d energy = -scale^3 / (2 gain^2), and the energy is style^2 @ (weight^2)^T.
        cubes = torch._foreach_pow([scales[n] for n in present], 3.0)
        products = torch._foreach_mul(cubes, [*present.values()])
        slopes = iter(torch._foreach_mul(products, -1 / ctx.gain**2))
        size = torch.Size([len(grads), styles.shape[1], squares[1].shape[1]])
        slope = _Stacked.apply(
            size, *(next(slopes) if n in present else None for n in range(len(grads)))
        )
        by_weight = _Corners.apply(slope.mT @ squares[0], [weight.shape[:2] for weight in weights])
        weight_grads = torch._foreach_mul(
            weights, [matrix[:, :, None, None] for matrix in by_weight]
        )
        return styles * (slope @ squares[1]), None, None, *weight_grads


def _squares(styles: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the squares of `styles` [L, N, I], and the summed squares of filters [L, O, I].

    The squares of a filter are summed over its pixels.
    """
    if is_plain():
        squares = tuple(weight.square() for weight in weights)
    else:
        squares = torch._foreach_mul(weights, weights)
    return styles.square(), stacked([square.sum(dim=(2, 3)) for square in squares])


def _energies(squares: tuple[Tensor, Tensor], weights: tuple[Tensor, ...]) -> list[Tensor]:
    """Return for each convolution the sums [N, O] of (weight * style)^2.

    `squares` is the result of `_squares`.
    """
    energies = squares[0] @ squares[1].mT
    return corners(energies, [(energies.shape[1], len(weight)) for weight in weights])


def demodulated(
    styles: Tensor, weights: Sequence[Tensor], gain: float, epsilons: Sequence[float]
) -> list[Tensor]:
    """Return gain / sqrt(sum((weight * style)^2) + epsilon), [N, O], for each of L convolutions.

    The sum is over the inputs and pixels of a filter.

    Args:
        styles: [L, N, I], see `stacked`.
        weights: Filters [O, I, k, k] of each convolution.
        gain: Factor of the coefficients.
        epsilons: The number epsilon of each convolution.
    """
    if not is_plain():
        return list(_Demodulated.apply(styles, gain, epsilons, *weights))
    filters = tuple(weights)
    energies = _energies(_squares(styles, filters), filters)
    pairs = zip(energies, epsilons, strict=True)
    return [(energy + epsilon).rsqrt() * gain for energy, epsilon in pairs]
