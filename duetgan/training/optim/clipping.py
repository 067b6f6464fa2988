"""Clipping of gradients: by their total norm, their values, or their ratio to the weights."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.distributed.collectives import by_kind

# Lower bounds of norms in adaptive clipping, so that weights of zero can change.
SMALLEST_WEIGHTS = 1e-3
SMALLEST_GRADIENT = 1e-6


def clip_(
    parameters: Sequence[Tensor], config: OptimizerConfig, norm: Tensor, head: Iterable[Tensor]
) -> None:
    """Clip the gradients of `parameters`, whose total norm is `norm`, as `config` says.

    Adaptive clipping leaves out the `head` (2102.06171, section 4.1).
    """
    if config.clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm)
    if config.clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, config.clip_value)
    if config.clip_adaptive is not None:
        left_out = {id(parameter) for parameter in head}
        body = (parameter for parameter in parameters if id(parameter) not in left_out)
        clip_adaptively_(body, config.clip_adaptive)


def _unit_norm(values: Tensor) -> Tensor:
    """Return the norm of the weights of each output unit, [units, 1, ...].

    For a vector, return the norm of all values, [1].
    """
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)) or None, keepdim=True)


@torch.no_grad()
def clip_adaptively_(parameters: Iterable[Tensor], factor: float) -> None:
    """Scale the gradient of each output unit to at most `factor` times the norm of its weights.

    Source: 2102.06171, equation 3.
    """
    pairs = [(weights, weights.grad) for weights in parameters if weights.grad is not None]
    for trained, gradients in by_kind(*zip(*pairs, strict=True)).values():
        ratios = [_unit_norm(weights) for weights in trained]
        norms = [_unit_norm(gradient) for gradient in gradients]
        torch._foreach_clamp_min_(ratios, SMALLEST_WEIGHTS)
        torch._foreach_mul_(ratios, factor)
        torch._foreach_clamp_min_(norms, SMALLEST_GRADIENT)
        torch._foreach_div_(ratios, norms)
        torch._foreach_clamp_max_(ratios, 1)
        torch._foreach_mul_(gradients, ratios)
