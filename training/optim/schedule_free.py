"""Schedule-free SGD and AdamW (2405.15682): no decay of the rate, an average of the weights in its place.

Written out here rather than taken from the package `schedulefree`, whose counters are numbers on the host and cannot be
held back where a gradient is not finite without waiting for the device; tests compare the two.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from utils.tensors import by_device


class ScheduleFree(torch.optim.Optimizer):
    """The parameters hold y, where gradients are taken; `average` gives x, the weights to evaluate and to use.

    y = (1 - beta) z + beta x; z takes the steps, x is the mean of the z so far, weighed by the square of the highest
    rate until then. beta is `betas[0]`. Decoupled weight decay, at y. `found_inf`, a 0-d flag on the device, masks a
    step: parameters, moments and counters stay.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler hands over its flag instead of waiting for it
    grad_scale: Tensor | None = None  # gradients are unscaled before the step
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        kind: Literal["sgd", "adamw"],
        lr: float,
        betas: tuple[float, float],  # sgd: the second is not used
        eps: float,
    ) -> None:
        self.kind = kind
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            # updates, sum of their weights, highest rate: float64, as many small weights are added up
            group["counters"] = torch.zeros(3, dtype=torch.float64, device=group["params"][0].device)
            for parameter in group["params"]:
                self.state[parameter]["z"] = parameter.detach().clone()
                if kind == "adamw":
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update y and z by the gradients; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        counters: Tensor = group["counters"]
        skipped = torch.zeros_like(counters[0]) if self.found_inf is None else self.found_inf.to(counters)
        taken = 1 - (skipped > 0).to(counters.dtype)
        updates, weight_sum, highest = counters.unbind()
        updates += taken
        highest.copy_(torch.maximum(highest, group["lr"] * taken))
        weight = highest.square() * taken
        weight_sum += weight
        share = weight / weight_sum.clamp(min=1e-300)  # of the new z in x; 0 where every rate so far was 0
        for device, (here,) in by_device(parameters).items():
            numbers = [number.to(device) for number in (taken, updates, share, group["lr"] * taken)]
            self._move(group, here, *numbers)

    def _move(
        self, group: dict[str, Any], parameters: list[Tensor], taken: Tensor, updates: Tensor, share: Tensor, lr: Tensor
    ) -> None:
        """The update of parameters that lie on one device, and so do the 0-d numbers."""
        beta, dtype, grads = group["betas"][0], parameters[0].dtype, [p.grad for p in parameters if p.grad is not None]
        zs = [self.state[p]["z"] for p in parameters]
        # a masked step's gradients are not numbers, and would stay so whatever they are multiplied by
        directions = [torch.where(taken > 0, grad, 0.0) for grad in grads]
        if self.kind == "adamw":
            moments = [self.state[p]["exp_avg_sq"] for p in parameters]
            kept = 1 - (1 - group["betas"][1]) * taken
            torch._foreach_mul_(moments, kept.to(dtype))
            torch._foreach_addcmul_(moments, directions, directions, value=1 - group["betas"][1])
            correction = torch.where(updates > 0, 1 - group["betas"][1] ** updates, 1.0)
            denominators = torch._foreach_div(moments, correction.to(dtype))
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_div_(directions, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        towards_z = torch._foreach_sub(zs, parameters)
        torch._foreach_mul_(towards_z, share.to(dtype))
        torch._foreach_add_(parameters, towards_z)
        torch._foreach_mul_(directions, lr.to(dtype))
        torch._foreach_sub_(zs, directions)
        torch._foreach_mul_(directions, (beta * (1 - share) - 1).to(dtype))
        torch._foreach_add_(parameters, directions)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """x of each parameter: y + (1 - 1 / beta) (z - y). One that is not trained is its own average."""
        betas = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        return [torch.lerp(p, self.state[p]["z"], 1 - 1 / betas[p]) if p in betas else p.detach() for p in parameters]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the counters come to the parameters' device too."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["counters"] = group["counters"].to(group["params"][0].device)
