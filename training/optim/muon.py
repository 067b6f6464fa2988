"""Muon for matrices and filters, SGD for the rest: torch's own two, as one optimizer whose step can be masked.

torch.optim.Muon takes 2-D parameters only and waits for nobody's flag. Here filters go through it as matrices
[outputs, inputs x height x width], as in Keller Jordan's airbench94_muon.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd


class Muon(torch.optim.Optimizer):
    """Parameters of more than one row and column go by Muon, but for the `head`'s; these, norms, biases and scales
    [C, 1, 1] by SGD (Nesterov) at `sgd_momentum`. The rate is the group's for both; weight decay is decoupled for
    Muon alone.

    `found_inf`, a 0-d flag on the device, masks a step: parameters and momenta stay.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler hands over its flag instead of waiting for it
    grad_scale: Tensor | None = None  # gradients are unscaled before the step
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        sgd_momentum: float,
        ns_steps: int,  # Newton-Schulz iterations
        unit_filters: bool,  # before a step Muon's matrices are scaled to the norm sqrt(outputs)
        head: Iterable[Tensor],
    ) -> None:
        self.sgd_momentum, self.ns_steps, self.unit_filters = sgd_momentum, ns_steps, unit_filters
        self.head = {id(parameter) for parameter in head}
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by their gradients; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            own = {id(p) for p in parameters if 1 < len(p) < p.numel() and id(p) not in self.head}
            if matrices := [p for p in parameters if id(p) in own]:
                self._muon(group, matrices)
            if rest := [p for p in parameters if id(p) not in own]:
                self._sgd(group, rest)

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        matrices = [p.detach().clone().flatten(1) for p in parameters]
        how = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
        # its state is ours: it lives for this step
        muon = torch.optim.Muon(matrices, **how, nesterov=True, ns_steps=self.ns_steps)
        for parameter, matrix in zip(parameters, matrices, strict=True):
            if self.unit_filters:
                matrix.mul_(len(matrix) ** 0.5 / matrix.norm())
            assert parameter.grad is not None
            matrix.grad = parameter.grad.flatten(1)
            muon.state[matrix]["momentum_buffer"] = self.state[parameter]["momentum_buffer"].clone().flatten(1)
        muon.step()
        for parameter, matrix in zip(parameters, matrices, strict=True):
            buffer = self.state[parameter]["momentum_buffer"]
            for old, new in ((parameter, matrix), (buffer, muon.state[matrix]["momentum_buffer"])):
                new = new.view(old.shape)
                if self.found_inf is not None:
                    new = torch.where(self.found_inf.to(old.device) > 0, old, new)
                old.copy_(new)

    def _sgd(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        sgd(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [self.state[p]["momentum_buffer"] for p in parameters],
            fused=True,
            found_inf=self.found_inf,
            lr=group["lr"],
            momentum=self.sgd_momentum,
            weight_decay=group["weight_decay"],
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )
