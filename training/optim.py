"""Optimizers, schedules, and the one place that turns gradients into an update."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from training.config import Precision
from training.schedules import cosine
from utils import distributed
from utils.errors import UserError

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = 0.001  # peak rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # Adam's
    beta2_final: float | None = None  # where beta2 ends, by a cosine over the schedule's length; None: constant
    eps: float = 1e-8
    momentum: float = 0.9  # SGD's (Nesterov)
    weight_decay: float = 0.0  # decoupled for adamw; not applied to norms and biases
    clip_norm: float | None = None  # largest total gradient norm
    warmup_steps: int = 0  # linear from 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    hold: float = 0.0  # share of the training at the peak rate before cosine or linear decay begins
    final_lr: float = 0.0  # where the decay ends, as a share of lr

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise UserError("optimizer: lr must be positive, weight_decay and warmup_steps 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer: betas {self.betas} must be two numbers in [0, 1)")
        if self.beta2_final is not None and not 0 <= self.beta2_final < 1:
            raise UserError(f"optimizer: beta2_final {self.beta2_final} must lie in [0, 1), or null")
        if not 0 <= self.hold < 1 or not 0 <= self.final_lr <= 1:
            raise UserError("optimizer: hold must lie in [0, 1), final_lr in [0, 1]: both are shares")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError("optimizer: clip_norm must be positive, or null for no clipping")

    def betas_at(self, step: int, steps: int) -> tuple[float, float]:
        """Adam's betas of update number `step` (from 0) out of `steps`."""
        beta1, beta2 = (float(beta) for beta in self.betas)
        return beta1, beta2 if self.beta2_final is None else cosine(beta2, self.beta2_final, step, steps)

    def lr_at(self, step: int, steps: int) -> float:
        """The rate of update number `step` (from 0) out of `steps`: a function of the step alone, so nothing to
        save.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        start = max(self.warmup_steps, self.hold * steps)
        progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
        left = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * (self.final_lr + (1 - self.final_lr) * left)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the parameters that train: matrices and filters with decay; norms and biases (1-D) without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The fused optimizer of `config` over the model's trained parameters; fused ones can be masked on the device."""
    groups = parameter_groups(model, config.weight_decay)
    betas = (float(config.betas[0]), float(config.betas[1]))
    if config.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=True)
        if config.momentum > 0:
            # the fused kernel makes its momentum on the first step, and leaves it uninitialised where that step is
            # masked
            for group in sgd.param_groups:
                for parameter in group["params"]:
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    optimizer_class = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return optimizer_class(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


class Mixed:
    """Precision of a run: the autocast context and, for fp16, the one loss scaler that all networks share."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> torch.autocast:
        """Reduced precision inside the block (none for fp32)."""
        dtype = AUTOCAST_DTYPES.get(self.precision, torch.bfloat16)
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "fp32")

    def backward(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        """Accumulate the gradients of the (scaled) loss in `parameters` alone; None: in all leaves of its graph."""
        self.scaler.scale(loss).backward(inputs=parameters)

    def scale(self) -> Tensor:
        """The loss scale as a 0-d tensor on the device, 1 without a scaler: nobody waits for its value."""
        one = torch.ones((), device=self.device)
        return self.scaler.scale(one) if self.scaler.is_enabled() else one

    def update_scale(self) -> None:
        """Adapt the loss scale: once a step, after every network's update."""
        if self.scaler.is_enabled():
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # a run may be resumed at another precision: without a scaler there is nothing to restore
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


class Update(NamedTuple):
    """What became of an update; 0-d tensors on the device, the same on all ranks."""

    norm: Tensor  # total gradient norm before clipping
    skipped: Tensor  # 1.0: masked, because the norm is not finite
    nonfinite: Tensor  # 1.0: masked, and fp16's loss scale is not the reason

    def metrics(self, name: str) -> dict[str, Tensor]:
        """For the log; every rank contributes its part of the sum."""
        world = distributed.world_size()
        return {
            f"gradient_norm/{name}": self.norm / world,
            f"skipped_updates/{name}": self.skipped / world,
            f"nonfinite_updates/{name}": self.nonfinite / world,
        }


class Updater:
    """One network's optimizer: reduces gradients over the ranks, unscales, clips, and steps unless they are not
    finite.

    Nothing here waits for the device: a non-finite gradient norm is a flag that masks the fused optimizer's update.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        mixed: Mixed,
        steps: int,
        *,
        growing: bool = False,  # a step may leave parameters out, the same on all ranks: they are not updated then
    ) -> None:
        self.model, self.growing = model, growing
        self.config = config
        self.mixed = mixed
        self.steps = steps  # length of the schedules
        self.optimizer = build_optimizer(model, config)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, step: int) -> Update:
        """Apply update number `step` (from 0), unless the gradients are not finite."""
        distributed.all_reduce_gradients(self.parameters, missing="skip" if self.growing else "zeros")
        scaler = self.mixed.scaler
        if scaler.is_enabled():
            scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step, self.steps)
            if self.config.beta2_final is not None:
                group["betas"] = self.config.betas_at(step, self.steps)
        skipped = (~torch.isfinite(norm)).float()
        if scaler.is_enabled():
            scaler.step(self.optimizer)
        else:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        # a loss scale above 1 explains an overflow, and will be lowered; below it the numbers themselves are at fault
        return Update(norm, skipped, skipped * (self.mixed.scale() <= 1))

    def reset(self) -> None:
        """Forget the optimizer's moments: the next update is a first one."""
        self.optimizer = build_optimizer(self.model, self.config)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


@torch.no_grad()
def restore_where_(tensors: Iterable[Tensor], before: Iterable[Tensor], skipped: Tensor) -> None:
    """Put `before` back where the 0-d flag `skipped` is 1: a masked step must not leave its NaN in running
    statistics.
    """
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skipped > 0, old, tensor))


def foreach_lerp_(targets: Iterable[Tensor], sources: Iterable[Tensor], weight: Tensor) -> None:
    """targets += weight * (sources - targets) for a 0-d `weight` on the device, without waiting for its value."""
    targets, sources = list(targets), list(sources)
    if not targets:
        return
    delta = torch._foreach_sub(sources, targets)
    torch._foreach_mul_(delta, weight)
    torch._foreach_add_(targets, delta)
