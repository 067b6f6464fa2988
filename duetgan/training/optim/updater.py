"""Mixed precision, and the update of a network from its gradients."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from duetgan.training.base import graphs
from duetgan.training.base.config import PrecisionName
from duetgan.training.optim import optimizers
from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.gradients import Compression, GradientExchange
from duetgan.utils.errors import UserError

# Keys of a parameter group that are loaded from checkpoints; the others come from the config.
STATE = {"params", "param_names", "lr", "counters"}


class Precision:
    """The precision of a run: autocast and, for fp16, one loss scaler for all networks."""

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.device = device
        self.switch(name)

    def switch(self, name: PrecisionName) -> None:
        """Change to the precision `name`, with a new loss scale.

        The name "auto" means fp32 here. A training run does not use it: it chooses a precision
        before it builds its task (`training.engine.hardware`).
        """
        self.name = "fp32" if name == "auto" else name
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.name == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.name != "fp32")

    def backward(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        """Accumulate the gradients of the scaled loss in `parameters`.

        If `parameters` is None, all leaves of the loss's graph get gradients.
        """
        self.scaler.scale(loss).backward(inputs=parameters)

    def scale(self) -> Tensor:
        """Return the loss scale, 0-d, without waiting for the device; it is 1 except for fp16."""
        return self.scaler.scale(torch.ones((), device=self.device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the loss scale."""
        if self.scaler.is_enabled():  # A step that was interrupted has not reached `update_scale`.
            self.scaler._per_optimizer_states.pop(id(optimizer), None)
        self.scaler.unscale_(optimizer)

    def update_scale(self) -> None:
        """Adapt the loss scale; called once per step, after the updates of all networks."""
        self.scaler.update()

    def state_dict(self) -> StateDict:
        return self.scaler.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        if state:  # The saved run may have used another precision, without a scaler.
            self.scaler.load_state_dict(state)


class Update(NamedTuple):
    """The outcome of an update, as 0-d tensors on the device, the same on all ranks."""

    norm: Tensor  # total gradient norm before clipping
    skipped: Tensor  # 1.0 if the update was masked because the norm is not finite
    nonfinite: Tensor  # 1.0 if it was masked, but not because fp16's loss scale is too high
    applied: Tensor  # bool: False if the update was masked

    def metrics(self, name: str) -> dict[str, Tensor]:
        """Return this update's metrics, a dict from `METRIC/name` to a 0-d tensor.

        `name` is the name of the network. The value of a metric is the sum of its tensor over the
        ranks.
        """
        world = collectives.world_size()
        values = self[:3] if world == 1 else torch.stack(self[:3]) / world
        names = ("gradient_norm", "skipped_updates", "nonfinite_updates")
        return {f"{key}/{name}": value for key, value in zip(names, values, strict=True)}


class Updater:
    """An object that turns the gradients of a network into an update of its parameters.

    It adds up the gradients over the ranks, unscales and clips them, and steps the optimizer.
    Gradients that are not finite set a flag on the device, which masks the update. So the host
    never waits for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        precision: Precision,
        steps: int,
        *,
        # True if a step may have no gradients for some parameters, the same ones on all ranks.
        growing: bool = False,
        exchange: bool = True,  # False if DDP adds up the gradients
        compress: Compression = "off",  # compression of the exchanged gradients
        # Parameters without adaptive clipping (2102.06171, section 4.1) and without Muon.
        head: Iterable[Tensor] = (),
        # Parameter groups with their `lr_scale`; None for those of `parameter_groups`.
        groups: Sequence[optimizers.Group] | None = None,
    ) -> None:
        if config.lr_batch_size is not None:
            raise UserError("lr_batch_size is for classifiers; give this network's own lr instead")
        self.model = model
        self.config = config
        self.precision = precision
        self.growing = growing
        self.groups = groups
        self.steps = steps  # length of the schedules
        self.rate: float | None = None  # learning rate that overrides the schedule
        self.head = list(head)
        self.reset()
        self.lr_scales: list[float] = []
        self.parameters: list[nn.Parameter] = []
        for group in groups or self.optimizer.param_groups:
            self.lr_scales.append(group.get("lr_scale", 1.0))
        for group in self.optimizer.param_groups:
            self.parameters += group["params"]
        missing: Literal["zeros", "skip"] = "skip" if growing else "zeros"
        self.exchange = GradientExchange(
            self.parameters if exchange else [], missing=missing, compress=compress
        )

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def overlap(self, *, last: bool) -> None:
        """Prepare for a backward pass.

        `last` is True for the last backward pass of a step, in which the exchange of gradients
        between the ranks begins.
        """
        if last:
            self.exchange.overlap()

    def step(self, step: int) -> Update:
        """Make update number `step` (from 0) from the accumulated gradients.

        If the total norm of the gradients is not finite, the parameters do not change.
        """
        self.exchange.finish()
        gradients: list[Tensor] = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = in_memory_order_of(parameter, parameter.grad)
                gradients.append(parameter.grad)
        self.precision.unscale(self.optimizer)
        # With several devices the norm is computed on the device of the first gradient.
        norm = torch.nn.utils.get_total_norm(gradients).to(self.precision.device)
        optimizers.clip_(self.parameters, self.config, norm, self.head)
        applied = norm < math.inf  # False for NaN, too
        skipped = applied.new_empty((), dtype=torch.float32)
        torch.logical_not(applied, out=skipped)
        graphs.outside(partial(self._apply, [p.grad for p in self.parameters], skipped), step)
        nonfinite = skipped
        if self.precision.scaler.is_enabled():
            # A loss scale above 1 explains an overflow and will be lowered. With a scale of at most
            # 1 the gradients themselves are not finite.
            nonfinite = skipped * (self.precision.scale() <= 1)
        return Update(norm, skipped, nonfinite, applied)

    def _apply(self, gradients: Sequence[Tensor | None], skipped: Tensor, step: int) -> None:
        """Update the parameters from `gradients`, unless the 0-d flag `skipped` is 1."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient  # A replayed graph has its own gradient tensors.
        self._schedule(step)
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.optimizer.step()

    def _schedule(self, step: int) -> None:
        config = self.config
        rate = config.lr_at(step, self.steps) if self.rate is None else self.rate
        momentum = config.momentum_at(step, self.steps)
        for group, scale in zip(self.optimizer.param_groups, self.lr_scales, strict=True):
            group["lr"] = rate * scale
            if config.beta2_final is not None:
                group["betas"] = config.betas_at(step, self.steps)
            if momentum is not None:
                if "momentum" in group:
                    group["momentum"] = momentum
                else:
                    group["betas"] = (momentum, group["betas"][1])

    def average(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """Return the schedule-free optimizer's averages of `parameters`.

        Return None for other optimizers.
        """
        if isinstance(self.optimizer, optimizers.ScheduleFree):
            return self.optimizer.average(parameters)
        return None

    def reset(self) -> None:
        """Build a new optimizer, with empty moments."""
        self.optimizer = optimizers.build_optimizer(self.model, self.config, self.groups, self.head)

    def state_dict(self) -> StateDict:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Load the optimizer's moments and counters; keep its settings, such as weight decay.

        Raises UserError if the parameter groups differ, because moments would be assigned to the
        wrong parameters, or if the beta of schedule-free averages differs.
        """
        current, saved = self.optimizer.state_dict()["param_groups"], state["param_groups"]
        if _members(saved) != _members(current):
            raise UserError(
                "the checkpoint's optimizer has other groups of parameters: the finetune section was changed since; "
                "give the run's own, or start in another --run-dir with --init-from and this run"
            )
        for group, saved_group in zip(current, saved, strict=True):
            if isinstance(self.optimizer, optimizers.ScheduleFree):
                beta, saved_beta = group["betas"][0], saved_group["betas"][0]
                if beta != saved_beta:
                    raise UserError(
                        f"the average of schedule-free weights was begun with a share of {saved_beta}, which a "
                        "resume cannot change; give the same optimizer.momentum (schedulefree-adamw: betas)"
                    )
            for key in STATE & saved_group.keys():
                group[key] = saved_group[key]
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": current})
        # The saved run may have had another memory order (`channels_last`).
        for parameter, moments in self.optimizer.state.items():
            for key, value in moments.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    moments[key] = in_memory_order_of(parameter, value)


def _members(groups: Iterable[optimizers.Group]) -> list[object]:
    return [group.get("param_names", group["params"]) for group in groups]


def in_memory_order_of(reference: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` in the memory order of `reference`, which has the same shape.

    Fused optimizers read parameter and gradient element by element in memory order, and ignore
    strides.
    """
    for size, a, b in zip(tensor.shape, reference.stride(), tensor.stride(), strict=True):
        if size > 1 and a != b:
            return torch.empty_like(reference, dtype=tensor.dtype, requires_grad=False).copy_(
                tensor
            )
    return tensor
