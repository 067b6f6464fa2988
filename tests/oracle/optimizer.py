"""Optimizers, schedules and clipping in plain arithmetic: the papers' formulas, a parameter at a time."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# what the keys of an optimizer are where a tree does not set them
DEFAULTS: dict[str, Any] = {
    **{"name": "adam", "betas": [0.9, 0.999], "beta2_final": None, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.0},
    **{"clip_norm": None, "clip_value": None, "clip_adaptive": None, "warmup_steps": 0, "schedule": "constant"},
    **{"hold": 0.0, "final_lr": 0.0, "milestones": [], "step_every": None, "gamma": 0.1},
    **{"pct_start": 0.3, "cycle_start": 0.04, "cycle_momentum": None, "lr_batch_size": None},
}


def in_updates(value: Any, images: int, batch: int) -> Any:
    """A tree whose lengths in epochs, such as 90ep, are updates: as many whole ones as come nearest."""
    if isinstance(value, Mapping):
        return {key: in_updates(part, images, batch) for key, part in value.items()}
    if isinstance(value, list):
        return [in_updates(part, images, batch) for part in value]
    if isinstance(value, str) and re.fullmatch(r"[\d.]+ep", value):
        return math.floor(float(value[:-2]) * images / batch + 0.5)
    return value


def half_cosine(start: float, end: float, done: float) -> float:
    """From `start` at 0 to `end` at 1 along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, max(0.0, done)))) / 2


class Optimizer:
    """Adam (1412.6980), AdamW (1711.05101) or SGD with Nesterov's momentum over named parameters."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        given: Mapping[str, Any],
        steps: int,  # of the schedules
        batch_size: int,
        factors: Mapping[str, float] | None = None,  # of the rate
        head: frozenset[str] = frozenset(),  # never clipped adaptively
    ) -> None:
        self.parameters, self.steps, self.head = dict(parameters), steps, head
        self.given = DEFAULTS | dict(given)
        self.factors = dict.fromkeys(parameters, 1.0) | dict(factors or {})
        self.lr = self.given["lr"] * (batch_size / (self.given["lr_batch_size"] or batch_size))
        self.reset()

    def reset(self) -> None:
        """Forget all moments."""
        zeros = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.moments: dict[str, Any] = {name: {"t": 0, "m": zero, "v": zero} for name, zero in zeros.items()}

    def rate(self, step: int) -> float:
        """The learning rate of an update, from 0."""
        given, lr, warm = self.given, self.lr, self.given["warmup_steps"]
        if given["schedule"] == "one-cycle":  # 1708.07120
            rise, low, end = given["pct_start"], lr * given["cycle_start"], lr * given["final_lr"]
            return self._cycle(step, rise, low, lr, end) * min(1.0, (step + 1) / max(1, warm))
        if step < warm:
            return lr * (step + 1) / warm
        if given["schedule"] == "step":
            falls = step // given["step_every"] if given["step_every"] else sum(m <= step for m in given["milestones"])
            return lr * given["gamma"] ** falls
        if given["schedule"] == "constant":
            return lr
        begin = max(warm, given["hold"] * self.steps)
        done = max(0.0, (step - begin) / (self.steps - begin))
        left = max(0.0, 1 - done) if given["schedule"] == "linear" else half_cosine(1, 0, done)
        return lr * (given["final_lr"] + (1 - given["final_lr"]) * left)

    def _cycle(self, step: int, rise: float, low: float, high: float, end: float) -> float:
        top, last = rise * self.steps - 1, self.steps - 1
        if step <= top:
            return half_cosine(low, high, step / top)
        return half_cosine(high, end, (step - top) / (last - top))

    @torch.no_grad()
    def update(self, step: int, gradients: Mapping[str, Tensor | None]) -> None:
        """One update; a parameter without a gradient stays."""
        given = self.given
        found = self._clipped({name: g.clone() for name, g in gradients.items() if g is not None})
        beta1, beta2 = given["betas"]
        momentum = given["momentum"]
        if given["beta2_final"] is not None:
            beta2 = half_cosine(beta2, given["beta2_final"], step / self.steps)
        if given["cycle_momentum"] is not None:
            ends, peak = given["cycle_momentum"]
            beta1 = momentum = self._cycle(step, given["pct_start"], ends, peak, ends)
        for name, gradient in found.items():
            parameter, kept, lr = self.parameters[name], self.moments[name], self.rate(step) * self.factors[name]
            decay = given["weight_decay"] if parameter.ndim > 1 else 0.0
            if given["name"] == "adamw":
                parameter.mul_(1 - lr * decay)
            else:
                gradient = gradient + decay * parameter
            kept["t"] += 1
            if given["name"] == "sgd":
                kept["m"] = momentum * kept["m"] + gradient
                parameter.sub_(lr * (gradient + momentum * kept["m"]))
                continue
            kept["m"] = beta1 * kept["m"] + (1 - beta1) * gradient
            kept["v"] = beta2 * kept["v"] + (1 - beta2) * gradient**2
            unbiased = kept["v"] / (1 - beta2 ** kept["t"])
            parameter.sub_(lr * kept["m"] / (1 - beta1 ** kept["t"]) / (unbiased.sqrt() + given["eps"]))

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        given = self.given
        if given["clip_norm"] is not None:
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
            return {name: g * min(1.0, given["clip_norm"] / (norm + 1e-6)) for name, g in gradients.items()}
        if given["clip_value"] is not None:
            return {name: g.clamp(-given["clip_value"], given["clip_value"]) for name, g in gradients.items()}
        if given["clip_adaptive"] is not None:  # 2102.06171, equation 3: each unit by its weights' norm
            for name, g in gradients.items():
                if name in self.head:
                    continue
                weights = self.parameters[name]
                for own, unit in [(g, weights)] if g.ndim < 2 else zip(g, weights, strict=True):
                    largest = given["clip_adaptive"] * max(float(unit.norm()), 1e-3)
                    own *= min(1.0, largest / max(float(own.norm()), 1e-6))
        return gradients
