"""Clipping of gradients by their values, or by their ratio to the weights. (By their total norm: torch's own.)"""

from collections.abc import Iterable

import torch
from torch import Tensor

SMALLEST_WEIGHTS = 1e-3  # norm that a unit's weights count for at least, so that new ones can leave zero
SMALLEST_GRADIENT = 1e-6


def unit_norm(values: Tensor) -> Tensor:
    """The norm of every output unit's weights, [units, 1, ...]; of a bias or a norm's weights as a whole, 0-d."""
    if values.ndim <= 1:
        return torch.linalg.vector_norm(values)
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)), keepdim=True)


@torch.no_grad()
def clip_adaptively_(parameters: Iterable[Tensor], factor: float) -> None:
    """Shrink each unit's gradient to at most `factor` times the norm of its weights (2102.06171, equation 3)."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        largest = unit_norm(parameter).clamp_(min=SMALLEST_WEIGHTS).mul_(factor)
        norm = unit_norm(parameter.grad).clamp_(min=SMALLEST_GRADIENT)
        parameter.grad.mul_((largest / norm).clamp_(max=1))
