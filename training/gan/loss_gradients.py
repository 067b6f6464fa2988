"""Several losses over one graph: each one's own gradient, its norm, and the cosines between them (docs/gan.md)."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from duetgan.training.optim.updater import Precision
from duetgan.utils.distributed import collectives


class PerLossGradients:
    """Gathers the gradients of a step's losses in the parameters' `.grad`; apart, also each loss's own.

    Gradients are taken outside any hooks of DDP and added up over the ranks afterwards (docs/distributed.md).

    Args: `parameters` that train; `apart`: take each loss's gradient by itself, so that `finish` can tell their norms
    and the cosines between them. The sum is the same either way, up to rounding.
    """

    def __init__(self, parameters: Sequence[Tensor], precision: Precision, *, apart: bool) -> None:
        self.parameters, self.precision, self.apart = list(parameters), precision, apart
        self.by_loss: dict[str, list[Tensor | None]] = {}  # name -> gradient of each parameter, of this rank's share

    def backward(self, terms: Mapping[str, Tensor]) -> None:
        """Add the gradients of `terms`, weighted 0-d losses that may share a graph; the graph is used up."""
        if not self.apart:
            self.precision.backward(torch.stack(list(terms.values())).sum(), self.parameters)
            return
        last = list(terms)[-1]
        for name, loss in terms.items():
            gradients = torch.autograd.grad(
                loss * self.precision.scale(), self.parameters, retain_graph=name != last, allow_unused=True
            )
            before = self.by_loss.get(name, [None] * len(self.parameters))
            self.by_loss[name] = [_sum([old, new]) for old, new in zip(before, gradients, strict=True)]

    def finish(self, name: str) -> dict[str, Tensor]:
        """Put the sum into `.grad`, and tell `gradient_norm/NAME/LOSS` and `gradient_cosine/NAME/LOSS~LOSS`.

        The figures are of the global gradients, unscaled; every rank contributes its part of the sum.
        """
        if not self.apart:
            return {}
        for index, parameter in enumerate(self.parameters):
            parameter.grad = _sum([gradients[index] for gradients in self.by_loss.values()])
        flat = {}  # one vector of all gradients, zeros where there is none
        for loss, gradients in self.by_loss.items():
            pairs = zip(self.parameters, gradients, strict=True)
            vector = torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs])
            flat[loss] = collectives.all_reduce_sum_(vector) / self.precision.scale()
        norms, world = {loss: gradient.norm() for loss, gradient in flat.items()}, collectives.world_size()
        figures = {f"gradient_norm/{name}/{loss}": norm / world for loss, norm in norms.items()}
        for a, b in combinations(flat, 2):
            cosine = flat[a] @ flat[b] / (norms[a] * norms[b]).clamp_min(torch.finfo(norms[a].dtype).tiny)
            figures[f"gradient_cosine/{name}/{a}~{b}"] = cosine / world
        return figures


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Of those that there are; None if there is none: the optimizer leaves such a parameter alone."""
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(given).sum(dim=0) if given else None
