"""The optimizers of a config: torch's, and two of our own. The step of each can be masked on the
device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.distributed.collectives import by_kind, widest


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the parameters that train: matrices and filters with decay; norms and biases
    (1-D) without.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    groups: Sequence[dict[str, Any]] | None = None,
    head: Iterable[Tensor] = (),  # parameters that Muon leaves to SGD
) -> torch.optim.Optimizer:
    """The fused optimizer of `config`, which can be masked on the device; `groups` None: see
    `parameter_groups`.
    """
    if groups is None:
        groups = parameter_groups(model, config.weight_decay)
    # their rates' factors stay with the Updater: the optimizer's state is that of a checkpoint,
    # which may be older
    groups = [{key: value for key, value in group.items() if key != "lr_scale"} for group in groups]
    if config.schedule_free:
        return ScheduleFree(groups, config)
    if config.name.startswith("muon"):
        return Muon(groups, config, head) if config.name == "muon" else MuonAdam(groups, config)
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        momentum = config.momentum
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=momentum, nesterov=momentum > 0, fused=True
        )
        kept = ["momentum_buffer"] if momentum else []
    else:
        betas, kept = (float(config.betas[0]), float(config.betas[1])), ["exp_avg", "exp_avg_sq"]
        kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    # the fused kernels make their state on the first step, and leave it uninitialised where that
    # step is masked
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if kept):
        count = (
            {}
            if config.name == "sgd"
            else {"step": torch.zeros((), device=parameter.device, dtype=torch.float32)}
        )
        optimizer.state[parameter] |= count | {key: torch.zeros_like(parameter) for key in kept}
    return optimizer


class Masked(torch.optim.Optimizer):
    """An optimizer whose step `found_inf`, a 0-d flag on the device, can mask: parameters and state
    stay.
    """

    # torch's GradScaler hands over its flag instead of waiting for it
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None  # gradients are unscaled before the step
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by their gradients; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self.update(group, parameters)

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        raise NotImplementedError


class Muon(Masked):
    """Muon for matrices and filters, SGD for the rest: torch's own two, as one optimizer whose step
    can be masked.

    Parameters of more than one row and column go by Muon, but for the `head`'s, filters as matrices
    [outputs, inputs x height x width] (as in Keller Jordan's airbench94_muon.py); these, norms,
    biases and scales [C, 1, 1] by SGD (Nesterov) at `sgd_momentum`. The rate is the group's for
    both; weight decay is decoupled for Muon alone.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, head: Iterable[Tensor]
    ) -> None:
        self.config, self.head = config, {id(parameter) for parameter in head}
        super().__init__(
            groups, {"lr": config.lr, "momentum": config.momentum, "weight_decay": 0.0}
        )
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter goes by Muon."""
        return 1 < len(parameter) < parameter.numel() and id(parameter) not in self.head

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if matrices := [p for p in parameters if self.takes(p)]:
            self._muon(group, matrices)
        if rest := [p for p in parameters if not self.takes(p)]:
            self._others(group, rest)

    def _others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        sgd(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            self._kept(parameters, "momentum_buffer"),
            fused=True,
            found_inf=self.found_inf,
            lr=group["lr"],
            momentum=self.config.sgd_momentum,
            weight_decay=group["weight_decay"],
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )

    def _kept(self, parameters: list[Tensor], name: str) -> list[Any]:
        return [self.state[p][name] for p in parameters]

    def _rates(self, group: dict[str, Any]) -> dict[str, Any]:
        """Muon's rate and decay, and what its updates are scaled by."""
        return {"lr": group["lr"], "weight_decay": group["weight_decay"]}

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        matrices = [p.detach().clone().flatten(1) for p in parameters]
        # its state is ours: it lives for this step
        how = self._rates(group) | {"momentum": group["momentum"], "ns_steps": self.config.ns_steps}
        muon = torch.optim.Muon(matrices, **how, nesterov=True)
        for parameter, matrix in zip(parameters, matrices, strict=True):
            if self.config.unit_filters:  # to the norm sqrt(outputs)
                matrix.mul_(len(matrix) ** 0.5 / matrix.norm())
            assert parameter.grad is not None
            matrix.grad = parameter.grad.flatten(1)
            muon.state[matrix]["momentum_buffer"] = (
                self.state[parameter]["momentum_buffer"].clone().flatten(1)
            )
        muon.step()
        for parameter, matrix in zip(parameters, matrices, strict=True):
            buffer = self.state[parameter]["momentum_buffer"]
            for old, new in ((parameter, matrix), (buffer, muon.state[matrix]["momentum_buffer"])):
                new = new.view(old.shape)
                if self.found_inf is not None:
                    new = torch.where(self.found_inf.to(old.device) > 0, old, new)
                old.copy_(new)


class MuonAdam(Muon):
    """Muon for filters larger than 1x1, Adam for the rest, in one optimizer whose step can be
    masked. A transposed convolution's filters are the matrix [inputs, outputs x height x width].

    The root mean square of a filter's update is 0.7 to 0.9 of `muon_rms` times the rate (few
    iterations leave a matrix that is not quite orthogonal); of Adam's updates it is about the rate
    (2502.16982, section 2.2, takes 0.2). Weight decay is decoupled. Without it filters grow, and
    what an update changes shrinks.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        self.config = config
        betas = (float(config.betas[0]), float(config.betas[1]))
        defaults = {
            "lr": config.lr,
            "momentum": config.momentum,
            "weight_decay": 0.0,
            "betas": betas,
        }
        # fused: torch then loads Adam's counts of steps to their parameters' device, where its
        # kernel wants them
        Masked.__init__(self, groups, defaults | {"fused": True})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            names = ["momentum_buffer"] if self.takes(parameter) else ["exp_avg", "exp_avg_sq"]
            self.state[parameter] |= {name: torch.zeros_like(parameter) for name in names}
            if not self.takes(parameter):
                self.state[parameter]["step"] = torch.zeros(
                    (), device=parameter.device, dtype=torch.float32
                )

    def takes(self, parameter: Tensor) -> bool:
        return parameter.ndim == 4 and parameter.shape[-1] > 1 and len(parameter) > 1

    def _others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            self._kept(parameters, "exp_avg"),
            self._kept(parameters, "exp_avg_sq"),
            [],
            self._kept(parameters, "step"),
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.config.eps,
            maximize=False,
        )

    def _rates(self, group: dict[str, Any]) -> dict[str, Any]:
        """Weights shrink by the rate times the decay, however large the updates are."""
        times = self.config.muon_rms / 0.2
        rates = {"lr": group["lr"] * times, "weight_decay": group["weight_decay"] / times}
        return rates | {"adjust_lr_fn": "match_rms_adamw"}


class ScheduleFree(Masked):
    """Schedule-free SGD and AdamW (2405.15682): no decay of the rate, an average of the weights in
    its place.

    The parameters hold y, where gradients are taken; `average` gives x, the weights to evaluate and
    to use. y = (1 - beta) z + beta x; z takes the steps, x is the mean of the z so far, weighed by
    the square of the highest rate until then. beta is `betas[0]`. Decoupled weight decay, at y. The
    package `schedulefree` has its counters on the host, where a step cannot be held back without
    waiting for the device; tests compare the two.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        # else SGD, which does not use the second of betas
        self.adamw = config.name == "schedulefree-adamw"
        betas = (config.average_beta, float(config.betas[1]))
        super().__init__(
            groups, {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": 0.0}
        )
        for group in self.param_groups:
            # updates, sum of their weights, highest rate: as wide as can be, for many small weights
            # are added up
            device = group["params"][0].device
            group["counters"] = torch.zeros(3, dtype=widest(device), device=device)
            for parameter in group["params"]:
                self.state[parameter]["z"] = parameter.detach().clone()
                if self.adamw:
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        counters: Tensor = group["counters"]
        skipped = (
            torch.zeros_like(counters[0]) if self.found_inf is None else self.found_inf.to(counters)
        )
        taken = 1 - (skipped > 0).to(counters.dtype)
        updates, weight_sum, highest = counters.unbind()
        updates += taken
        highest.copy_(torch.maximum(highest, group["lr"] * taken))
        weight = highest.square() * taken
        weight_sum += weight
        # of the new z in x; 0 where every rate so far was 0
        share = weight / weight_sum.clamp(min=torch.finfo(weight.dtype).tiny)
        for (device, _), (here,) in by_kind(parameters).items():
            self._move(
                group,
                here,
                *[number.to(device) for number in (taken, updates, share, group["lr"] * taken)],
            )

    def _move(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        taken: Tensor,
        updates: Tensor,
        share: Tensor,
        lr: Tensor,
    ) -> None:
        beta, dtype, grads = (
            group["betas"][0],
            parameters[0].dtype,
            [p.grad for p in parameters if p.grad is not None],
        )
        zs = [self.state[p]["z"] for p in parameters]
        # a masked step's gradients are not numbers, and would stay so whatever they are multiplied
        # by
        directions = [torch.where(taken > 0, grad, 0.0) for grad in grads]
        if self.adamw:
            moments = [self.state[p]["exp_avg_sq"] for p in parameters]
            torch._foreach_mul_(moments, (1 - (1 - group["betas"][1]) * taken).to(dtype))
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
        """x of each parameter: y + (1 - 1 / beta) (z - y). One that is not trained is its own
        average.
        """
        betas = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        return [
            torch.lerp(p, self.state[p]["z"], 1 - 1 / betas[p]) if p in betas else p.detach()
            for p in parameters
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the counters come to the parameters' device too."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            device = group["params"][0].device
            group["counters"] = group["counters"].to(device, widest(device))
