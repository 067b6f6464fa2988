"""Optimizers, and the one place that turns gradients into an update."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from duetgan.training.base.config import PrecisionName
from duetgan.training.optim.config import OptimizerConfig
from duetgan.training.optim.optimizers import ScheduleFree, build_optimizer
from duetgan.utils.checkpoint.state_schema import check_moments
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.gradients import Compression, GradientExchange
from duetgan.utils.errors import UserError

# norm that a unit's weights count for at least, so that new ones can leave zero
SMALLEST_WEIGHTS = 1e-3
SMALLEST_GRADIENT = 1e-6
# of a group of parameters; all else is configuration
STATE = {"params", "param_names", "lr", "counters"}


class Precision:
    """Precision of a run: the autocast context and, for fp16, the one loss scaler that all networks
    share.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.device = device
        self.switch(name)

    def switch(self, name: PrecisionName) -> None:
        """Go on in this precision, with a new loss scale. Training resolves "auto" before it builds
        a task (`training.engine.speed`); a task that is built without is in fp32.
        """
        self.name = "fp32" if name == "auto" else name
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.name == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.name != "fp32")

    def backward(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        """Accumulate the gradients of the (scaled) loss in `parameters` alone; None: in all leaves
        of its graph.
        """
        self.scaler.scale(loss).backward(inputs=parameters)

    def scale(self) -> Tensor:
        """The loss scale as a 0-d tensor on the device, 1 without a scaler: nobody waits for its
        value.
        """
        return self.scaler.scale(torch.ones((), device=self.device))

    def update_scale(self) -> None:
        """Adapt the loss scale: once a step, after every network's update."""
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # a run may be resumed at another precision
            self.scaler.load_state_dict(state)


class Update(NamedTuple):
    """What became of an update; 0-d tensors on the device, the same on all ranks."""

    norm: Tensor  # total gradient norm before clipping
    skipped: Tensor  # 1.0: masked, because the norm is not finite
    nonfinite: Tensor  # 1.0: masked, and fp16's loss scale is not the reason

    def metrics(self, name: str) -> dict[str, Tensor]:
        """For the log; every rank contributes its part of the sum."""
        named = zip(("gradient_norm", "skipped_updates", "nonfinite_updates"), self, strict=True)
        return {f"{kind}/{name}": value / collectives.world_size() for kind, value in named}


class Updater:
    """One network's optimizer: adds up gradients over the ranks, unscales, clips, and steps if they
    are finite, which nothing here waits for: a flag on the device masks the update.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        precision: Precision,
        steps: int,
        *,
        # a step may leave parameters out, the same on all ranks: they are not updated then
        growing: bool = False,
        exchange: bool = True,  # False: DDP has added up the gradients
        compress: Compression = "off",  # of the exchange
        # parameters that are not clipped adaptively (2102.06171, section 4.1), and that Muon leaves
        # to SGD
        head: Iterable[Tensor] = (),
        # of the optimizer, each with its `lr_scale`; None: as usual
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        if config.lr_batch_size is not None:
            raise UserError("lr_batch_size is for classifiers; give this network's own lr instead")
        self.model, self.config, self.precision, self.growing, self.groups = (
            model,
            config,
            precision,
            growing,
            groups,
        )
        self.steps = steps  # length of the schedules
        self.rate: float | None = None  # of the next updates, in place of the schedule's
        self.head = list(head)
        self.reset()
        self.lr_scales = [
            group.get("lr_scale", 1.0) for group in groups or self.optimizer.param_groups
        ]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        missing: Literal["zeros", "skip"] = "skip" if growing else "zeros"
        self.exchange = GradientExchange(
            self.parameters if exchange else [], missing=missing, compress=compress
        )
        # parameters that train and had no gradient in the first step here
        self.unused: list[str] | None = None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def overlap(self, *, last: bool) -> None:
        """Before a backward pass; of the `last` one before `step`, gradients travel while it goes
        on.
        """
        if last:
            self.exchange.overlap()

    def step(self, step: int) -> Update:
        """Apply update number `step` (from 0), unless the gradients are not finite."""
        if self.unused is None:
            parameters = self.model.named_parameters()
            self.unused = (
                []
                if self.growing
                else [n for n, p in parameters if p.requires_grad and p.grad is None]
            )
        self.exchange.finish()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = laid_like(parameter.grad, parameter)
        self.precision.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters if p.grad is not None]
        )
        # of several devices it lies where the first gradient does
        norm = norm.to(self.precision.device)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)
        if self.config.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.config.clip_value)
        if self.config.clip_adaptive is not None:
            excluded = {id(p) for p in self.head}
            clip_adaptively_(
                (p for p in self.parameters if id(p) not in excluded), self.config.clip_adaptive
            )
        for group, scale in zip(self.optimizer.param_groups, self.lr_scales, strict=True):
            group["lr"] = (
                self.config.lr_at(step, self.steps) if self.rate is None else self.rate
            ) * scale
            if self.config.beta2_final is not None:
                group["betas"] = self.config.betas_at(step, self.steps)
            if (momentum := self.config.momentum_at(step, self.steps)) is not None:
                group |= (
                    {"momentum": momentum}
                    if "momentum" in group
                    else {"betas": (momentum, group["betas"][1])}
                )
        skipped = (~torch.isfinite(norm)).float()
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.precision.scaler.step(self.optimizer)  # with flags of its own for fp16
        # a loss scale above 1 explains an overflow, and will be lowered; below it the numbers
        # themselves are at fault
        return Update(norm, skipped, skipped * (self.precision.scale() <= 1))

    def average(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """The weights to evaluate, where the optimizer averages them itself (schedule-free); else
        None.
        """
        return (
            self.optimizer.average(parameters) if isinstance(self.optimizer, ScheduleFree) else None
        )

    def reset(self) -> None:
        """Forget the optimizer's moments: the next update is a first one."""
        self.optimizer = build_optimizer(self.model, self.config, self.groups, self.head)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over moments and counters; decay, momentum and the like stay as configured. Raises
        UserError for the state of other parameter groups: it would go to the wrong parameters.
        """
        here, saved = self.optimizer.state_dict()["param_groups"], state["param_groups"]
        if _members(saved) != _members(here):
            raise UserError(
                "the checkpoint's optimizer has other groups of parameters: the finetune section was changed since; "
                "give the run's own, or start in another --run-dir with --init-from and this run"
            )
        check_moments(self.optimizer, state)
        for mine, group in zip(here, saved, strict=True):
            if isinstance(self.optimizer, ScheduleFree) and mine["betas"][0] != group["betas"][0]:
                raise UserError(
                    f"the average of schedule-free weights was begun with a share of {group['betas'][0]}, which a "
                    "resume cannot change; give the same optimizer.momentum (schedulefree-adamw: betas)"
                )
            mine |= {key: group[key] for key in STATE & group.keys()}
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": here})
        # `channels_last` may be another than it was
        for parameter, moments in self.optimizer.state.items():
            for key, value in moments.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    moments[key] = laid_like(value, parameter)


def _members(groups: Iterable[dict[str, Any]]) -> list[Any]:
    return [group.get("param_names", group["params"]) for group in groups]


def _unit_norm(values: Tensor) -> Tensor:
    """The norm of every output unit's weights, [units, 1, ...]; of a bias or a norm's weights as a
    whole, [1].
    """
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)) or None, keepdim=True)


@torch.no_grad()
def clip_adaptively_(parameters: Iterable[Tensor], factor: float) -> None:
    """Shrink each unit's gradient to at most `factor` times the norm of its weights (2102.06171,
    equation 3).
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        largest = _unit_norm(parameter).clamp_(min=SMALLEST_WEIGHTS).mul_(factor)
        norm = _unit_norm(parameter.grad).clamp_(min=SMALLEST_GRADIENT)
        parameter.grad.mul_((largest / norm).clamp_(max=1))


def laid_like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` in the memory order of `model`, which has its shape: fused optimizers take both
    element by element as they lie in memory, whatever their strides say.
    """
    strides = zip(tensor.shape, tensor.stride(), model.stride(), strict=True)
    if tensor.stride() == model.stride() or all(
        size == 1 or own == other for size, own, other in strides
    ):
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
