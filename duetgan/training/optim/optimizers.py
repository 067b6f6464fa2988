"""The optimizers that a config can name, from torch and from this module, and gradient clipping.

A flag on the device can mask a step of each optimizer: parameters and state then do not change.
Gradients are clipped by their total norm, by their values, or by their ratio to the weights.
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
    """Return the trainable parameters in groups for an optimizer, with and without weight decay.

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
    groups: Sequence[Group] | None,
    head: Iterable[Tensor],  # parameters that Muon leaves to SGD
) -> torch.optim.Optimizer:
    """Build the optimizer of `config`, whose steps a flag on the device can mask.

    If `groups` is None, the parameter groups are those of `parameter_groups`.
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

    Fused kernels would create it in the first step, but leave it uninitialised if that step is
    masked.
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
    """Base class of optimizers with steps that a flag on the device can mask.

    The flag is `found_inf`, 0-d. If it is not 0, the step changes neither parameters nor state.
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
    """An optimizer that updates matrices and filters by Muon, and other parameters by SGD.

    Muon is used for parameters with more than one row and column, except those of the `head`.
    Filters are treated as matrices [outputs, inputs x height x width] (as in Keller Jordan's
    airbench94_muon.py). SGD with Nesterov momentum `sgd_momentum` is used for the head, norms,
    biases and scales [C, 1, 1]. Both use the learning rate of the group. Weight decay is decoupled
    for Muon only.
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
    """An optimizer that updates filters larger than 1x1 by Muon, and other parameters by Adam.

    The filters of a transposed convolution are treated as a matrix [inputs, outputs x height x
    width].

    The root mean square (RMS) of a filter's update is 0.7 to 0.9 times `muon_rms` times the
    learning rate, because the matrix is not quite orthogonal after a few Newton-Schulz iterations.
    The RMS of Adam's updates is about the learning rate. (Section 2.2 of 2502.16982 uses 0.2 in
    place of `muon_rms`.) Weight decay is decoupled. Without weight decay, filters grow, and the
    relative size of the updates shrinks.
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
    """Schedule-free SGD or AdamW (2405.15682), which averages weights instead of decaying the rate.

    Each weight has three versions. z is changed by the steps. x is the mean of all z, weighted by
    the square of the highest learning rate until then; these are the weights to evaluate and to
    use. y = (1 - beta) z + beta x, with beta = `betas[0]`, is where gradients are computed. The
    parameters hold y, and `average` returns x. Weight decay is decoupled, at y.

    The package `schedulefree` is not used because it counts steps on the host. To leave out a
    skipped step (see `Masked`), it would have to wait for the device. Tests compare this class with
    the package.
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
        """Return the averaged weights x = y + (1 - 1 / beta) (z - y) of each parameter y.

        Parameters that this optimizer does not train are returned unchanged, detached.
        """
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
    """Clip the gradients of `parameters` in place, in the way that `config` chooses.

    `norm` is the total norm of these gradients. Adaptive clipping leaves out the parameters of the
    `head` (2102.06171, section 4.1).
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
    """Return the norm of the values of each output unit, [units, 1, ...].

    For a vector, return the norm of all values, [1].
    """
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)) or None, keepdim=True)


@torch.no_grad()
def clip_adaptively_(parameters: Iterable[Tensor], factor: float) -> None:
    """Limit the gradient norm of each output unit to `factor` times the norm of the unit's weights.

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
