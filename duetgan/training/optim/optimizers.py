"""The optimizers of a config, those of torch and three others, and the clipping of gradients.

The step of each can be masked on the device. Gradients are clipped by their total norm, their
values, or their ratio to the weights.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import StateDict
from torch.optim.sgd import sgd

from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.distributed.collectives import by_kind, widest

# Lower bounds of norms in adaptive clipping, so that weights of zero can change.
SMALLEST_WEIGHTS = 1e-3
SMALLEST_GRADIENT = 1e-6
Group = dict[str, Any]  # a parameter group of torch's optimizers: `params` and settings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Return optimizer groups of the parameters that train.

    Matrices and filters have weight decay; vectors (norms, biases) have none.
    """
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups: list[Group] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    groups: Sequence[Group] | None = None,
    head: Iterable[Tensor] = (),  # parameters that Muon leaves to SGD
) -> torch.optim.Optimizer:
    """Build the optimizer of `config`, with a fused step that a flag on the device can mask.

    Without `groups`, those of `parameter_groups` are used.
    """
    if groups is None:
        groups = parameter_groups(model, config.weight_decay)
    # The factors of the learning rates are left to the Updater, so that the optimizer's state is
    # compatible with older checkpoints.
    groups = [{key: value for key, value in group.items() if key != "lr_scale"} for group in groups]
    if config.schedule_free:
        return ScheduleFree(groups, config)
    if config.name == "muon":
        return Muon(groups, config, head)
    if config.name == "muon-adam":
        return MuonAdam(groups, config)
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        momentum = config.momentum
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=momentum, nesterov=momentum > 0, fused=True
        )
        if momentum:
            _init_state(optimizer, _parameters(optimizer), ["momentum_buffer"])
    else:
        betas = (float(config.betas[0]), float(config.betas[1]))
        cls = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
        optimizer = cls(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
        _init_state(optimizer, _parameters(optimizer), ["exp_avg", "exp_avg_sq"], has_step=True)
    return optimizer


def _init_state(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[Tensor],
    buffers: Sequence[str],
    *,
    has_step: bool = False,
) -> None:
    """Create the optimizer state of `parameters`, filled with zeros.

    Fused kernels create it in the first step, and leave it uninitialised if that step is masked.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if has_step:
            state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
        for name in buffers:
            state[name] = torch.zeros_like(parameter)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Masked(torch.optim.Optimizer):
    """Base class of optimizers whose step a 0-d flag on the device, `found_inf`, can mask.

    In a masked step parameters and state do not change.
    """

    # With this attribute torch's GradScaler passes its flag on instead of waiting for it.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None  # always None: gradients are unscaled before the step
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self.update(group, parameters)

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        raise NotImplementedError

    def buffers(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in parameters]


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Muon(Masked):
    """Muon for matrices and filters, and SGD for other parameters, in one optimizer.

    Parameters with more than one row and column use Muon, except those of the `head`. Filters are
    treated as matrices [outputs, inputs x height x width] (as in Keller Jordan's
    airbench94_muon.py). The head, norms, biases and scales [C, 1, 1] use SGD (Nesterov) with
    `sgd_momentum`. Both use the learning rate of the group; weight decay is decoupled for Muon
    only.
    """

    def __init__(
        self, groups: Iterable[Group], config: OptimizerConfig, head: Iterable[Tensor]
    ) -> None:
        self.config = config
        self.head = {id(parameter) for parameter in head}
        self.rate_factor = 1.0  # torch's learning rate / that of the group
        self.adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
        super().__init__(
            groups, {"lr": config.lr, "momentum": config.momentum, "weight_decay": 0.0}
        )
        _init_state(self, _parameters(self), ["momentum_buffer"])

    def uses_muon(self, parameter: Tensor) -> bool:
        return 1 < len(parameter) < parameter.numel() and id(parameter) not in self.head

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        if matrices := [p for p in parameters if self.uses_muon(p)]:
            self._muon(group, matrices)
        if vectors := [p for p in parameters if not self.uses_muon(p)]:
            self._update_vectors(group, vectors)

    def _update_vectors(self, group: Group, parameters: list[Tensor]) -> None:
        sgd(
            parameters,
            _gradients(parameters),
            [*self.buffers(parameters, "momentum_buffer")],
            fused=True,
            found_inf=self.found_inf,
            lr=group["lr"],
            momentum=self.config.sgd_momentum,
            weight_decay=group["weight_decay"],
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )

    def _muon(self, group: Group, parameters: list[Tensor]) -> None:
        matrices = [p.detach().clone().flatten(1) for p in parameters]
        # torch's optimizer exists for this step only; its state is copied from and to `self.state`.
        muon = torch.optim.Muon(
            matrices,
            lr=group["lr"] * self.rate_factor,
            # Weights shrink by the group's rate times the decay, whatever the size of the updates.
            weight_decay=group["weight_decay"] / self.rate_factor,
            momentum=group["momentum"],
            ns_steps=self.config.ns_steps,
            nesterov=True,
            adjust_lr_fn=self.adjust_lr_fn,
        )
        for parameter, matrix in zip(parameters, matrices, strict=True):
            if self.config.unit_filters:  # Scale to the norm sqrt(outputs).
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
    """Muon for filters larger than 1x1, and Adam for other parameters, in one optimizer.

    The filters of a transposed convolution are the matrix [inputs, outputs x height x width].

    The root mean square of a filter's update is 0.7 to 0.9 of `muon_rms` times the learning rate,
    because after a few iterations the matrix is not quite orthogonal. For Adam's updates it is
    about the learning rate (2502.16982, section 2.2, uses 0.2). Weight decay is decoupled. Without
    it filters grow, and the relative size of the updates shrinks.
    """

    def __init__(self, groups: Iterable[Group], config: OptimizerConfig) -> None:
        self.config = config
        # match_rms_adamw scales updates to 0.2 times the rate.
        self.rate_factor = config.muon_rms / 0.2
        self.adjust_lr_fn = "match_rms_adamw"
        defaults = {
            "lr": config.lr,
            "momentum": config.momentum,
            "weight_decay": 0.0,
            "betas": (float(config.betas[0]), float(config.betas[1])),
            # With this key torch loads Adam's step counts to the device of the parameters, where
            # the fused kernel needs them.
            "fused": True,
        }
        Masked.__init__(self, groups, defaults)
        vectors = [p for p in _parameters(self) if not self.uses_muon(p)]
        _init_state(self, filter(self.uses_muon, _parameters(self)), ["momentum_buffer"])
        _init_state(self, vectors, ["exp_avg", "exp_avg_sq"], has_step=True)

    def uses_muon(self, parameter: Tensor) -> bool:
        return parameter.ndim == 4 and parameter.shape[-1] > 1 and len(parameter) > 1

    def _update_vectors(self, group: Group, parameters: list[Tensor]) -> None:
        adamw(
            parameters,
            _gradients(parameters),
            self.buffers(parameters, "exp_avg"),
            self.buffers(parameters, "exp_avg_sq"),
            [],
            self.buffers(parameters, "step"),
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


class ScheduleFree(Masked):
    """Schedule-free SGD and AdamW (2405.15682).

    An average of the weights takes the place of a decay of the learning rate. The parameters hold
    y, where gradients are computed, and `average` returns x, the weights to evaluate and to use: y
    = (1 - beta) z + beta x. The steps change z, and x is the mean of all z, weighted by the square
    of the highest rate until then. beta is `betas[0]`. Weight decay is decoupled, at y.

    The package `schedulefree` has its counters on the host, so that it cannot mask a step without
    waiting for the device. Tests compare this class with it.
    """

    def __init__(self, groups: Iterable[Group], config: OptimizerConfig) -> None:
        # Otherwise the optimizer is SGD, which does not use the second of betas.
        self.adamw = config.name == "schedulefree-adamw"
        betas = (config.average_beta, float(config.betas[1]))
        super().__init__(
            groups, {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": 0.0}
        )
        for group in self.param_groups:
            # Counters: number of updates, sum of their weights, highest rate. The dtype is the
            # widest because the sum has many small terms.
            device = group["params"][0].device
            group["counters"] = torch.zeros(3, dtype=widest(device), device=device)
            for parameter in group["params"]:
                self.state[parameter]["z"] = parameter.detach().clone()
                if self.adamw:
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        counters: Tensor = group["counters"]
        if self.found_inf is None:
            is_active = torch.ones_like(counters[0])
        else:
            is_active = 1 - (self.found_inf.to(counters) > 0).to(counters.dtype)
        updates, weight_sum, highest_rate = counters.unbind()
        updates += is_active
        lr = group["lr"] * is_active
        highest_rate.copy_(torch.maximum(highest_rate, lr))
        weight = highest_rate.square() * is_active
        weight_sum += weight
        # The weight of the new z in x is 0 while all rates are 0.
        fraction = weight / weight_sum.clamp(min=torch.finfo(weight.dtype).tiny)
        for (device, _), (tensors,) in by_kind(parameters).items():
            self._move(
                group,
                tensors,
                is_active.to(device),
                updates.to(device),
                fraction.to(device),
                lr.to(device),
            )

    def _move(
        self,
        group: Group,
        parameters: list[Tensor],  # of one device and dtype
        is_active: Tensor,  # 0-d: 1.0, or 0.0 if the step is masked
        updates: Tensor,
        fraction: Tensor,
        lr: Tensor,
    ) -> None:
        beta, beta2 = group["betas"]
        dtype = parameters[0].dtype
        zs = self.buffers(parameters, "z")
        # The gradients of a masked step may be NaN, which a factor of 0 would not remove.
        directions = [torch.where(is_active > 0, grad, 0.0) for grad in _gradients(parameters)]
        if self.adamw:
            moments = self.buffers(parameters, "exp_avg_sq")
            torch._foreach_mul_(moments, (1 - (1 - beta2) * is_active).to(dtype))
            torch._foreach_addcmul_(moments, directions, directions, value=1 - beta2)
            correction = torch.where(updates > 0, 1 - beta2**updates, 1.0)
            denominators = torch._foreach_div(moments, correction.to(dtype))
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_div_(directions, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        towards_z = torch._foreach_sub(zs, parameters)
        torch._foreach_mul_(towards_z, fraction.to(dtype))
        torch._foreach_add_(parameters, towards_z)
        torch._foreach_mul_(directions, lr.to(dtype))
        torch._foreach_sub_(zs, directions)
        torch._foreach_mul_(directions, (beta * (1 - fraction) - 1).to(dtype))
        torch._foreach_add_(parameters, directions)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return x = y + (1 - 1 / beta) (z - y) for each parameter; frozen parameters as they are."""
        betas = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        return [
            torch.lerp(p, self.state[p]["z"], 1 - 1 / betas[p]) if p in betas else p.detach()
            for p in parameters
        ]

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state, and move the counters to the device of the parameters."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            device = group["params"][0].device
            group["counters"] = group["counters"].to(device, widest(device))


# --- clipping


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
