"""Settings of an optimizer, and its schedules, which are pure functions of the step."""

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, Literal

from annotated_types import Interval
from pydantic import BeforeValidator

from duetgan.training.base.config import Epochs, Updates, in_updates
from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import (
    Config,
    Decay,
    InnerFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
)
from duetgan.utils.errors import UserError, refuse

WarmUp = Annotated[
    NonNegativeInt, BeforeValidator(in_updates, json_schema_input_type=NonNegativeInt | Epochs)
]


# Functions from the progress of the decay to the fraction of the peak rate, both in [0, 1].
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}


MOMENTA = ("sgd", "muon", "muon-adam")  # names of the optimizers that use `momentum`


class OptimizerConfig(Config):
    """Optimizer, gradient clipping and learning-rate schedule."""

    # schedulefree-*: the evaluated weights are an average, which replaces a decay of the rate.
    # muon: Muon for matrices and filters, SGD for norms, biases and the head; classifiers only.
    # muon-adam: Muon for filters larger than 1x1, Adam for other parameters
    name: Literal[
        "adam", "adamw", "sgd", "schedulefree-sgd", "schedulefree-adamw", "muon", "muon-adam"
    ] = "adam"
    lr: PositiveFloat = 0.001  # peak learning rate
    # global batch size for which lr is meant; for others lr is scaled in proportion; null: never
    lr_batch_size: PositiveInt | None = None
    betas: list[Decay] = [0.9, 0.999]  # Adam: decays of the moments, beta1 and beta2
    # Adam: final value of beta2, by a cosine over the schedule's length; null: constant
    beta2_final: Decay | None = None
    eps: NonNegativeFloat = 1e-8  # Adam: added to the denominator
    # momentum of SGD (Nesterov) and Muon; schedulefree-sgd: beta, the fraction of the average
    momentum: Decay = 0.9
    sgd_momentum: InnerFraction = 0.9  # muon: momentum of the parameters that SGD updates
    # Muon: Newton-Schulz iterations per step
    ns_steps: Annotated[int, Interval(ge=1, le=99)] = 5
    # muon-adam: approximate root mean square of a filter's update / lr; Adam's is about 1
    muon_rms: PositiveFloat = 3.0
    # Muon: keep the norm of each matrix at sqrt(outputs), for layers before a BatchNorm
    unit_filters: bool = False
    # decay of the weights, decoupled except for adam, sgd and muon's head; not of norms and biases
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat | None = None  # largest total gradient norm
    clip_value: PositiveFloat | None = None  # largest absolute value of a gradient's element
    # largest ratio of the norms of an output unit's gradient and weights; 0.01 in 2102.06171
    clip_adaptive: PositiveFloat | None = None
    # steps, or epochs (5ep), in which the rate rises linearly from 0; multiplies one-cycle's rise
    warmup_steps: WarmUp = 0
    # schedule of the rate over the steps: constant, cosine, linear, step or one-cycle
    schedule: str = "constant"
    # fraction of the training at the peak rate, before a cosine or linear decay
    hold: Decay = 0.0
    final_lr: Probability = 0.0  # final rate of the decay, as a fraction of lr
    # step: updates, or epochs (30ep), at which the rate is multiplied by gamma
    milestones: list[Updates] = []
    # step: in place of milestones, the number of updates, or epochs (30ep), between them
    step_every: Updates | None = None
    gamma: PositiveFraction = 0.1  # step: factor of the rate at each milestone
    pct_start: InnerFraction = 0.3  # one-cycle: fraction of the training in which the rate rises
    cycle_start: PositiveFraction = 0.04  # one-cycle: initial rate, as a fraction of lr
    # one-cycle: momentum, or Adam's beta1, at both ends and at the peak of the rate: [0.95, 0.85];
    # null: constant
    cycle_momentum: tuple[Decay, Decay] | None = None

    def check(self) -> None:
        entry(dict.fromkeys(("constant", *DECAYS, "step", "one-cycle")), self.schedule, "schedule")
        clipping = [
            key
            for key in ("clip_norm", "clip_value", "clip_adaptive")
            if getattr(self, key) is not None
        ]
        refuse(
            (
                len(clipping) > 1,
                f"{' and '.join(clipping)} are given; gradients are clipped in one way, keep one",
            ),
            (len(self.betas) != 2, f"betas {self.betas}: must be two numbers"),
            (
                self.cycle_momentum is not None and len(self.cycle_momentum) != 2,
                f"cycle_momentum {self.cycle_momentum}: must be two numbers",
            ),
            (
                self.schedule == "step" and bool(self.milestones) == bool(self.step_every),
                "schedule step needs milestones, the updates where the rate falls: [3000, 6000], or "
                "step_every, the updates from one fall to the next: 3000; and not both",
            ),
            (
                self.milestones != sorted(set(self.milestones)),
                f"milestones {self.milestones}: must be rising numbers of updates",
            ),
            (
                self.cycle_momentum is not None and self.name in MOMENTA and not self.momentum,
                "cycle_momentum changes a momentum, but momentum is 0; leave out one of them",
            ),
            (
                self.schedule_free and self.schedule != "constant",
                f"name {self.name} replaces schedules; set schedule constant",
            ),
            (
                self.beta2_final is not None and self.name not in ("adam", "adamw", "muon-adam"),
                f"beta2_final is Adam's; leave it out with {self.name}",
            ),
        )
        if self.schedule_free and not self.average_beta:
            key = "momentum" if self.name == "schedulefree-sgd" else "the first of betas"
            raise UserError(
                f"name {self.name} needs {key} above 0: the average's share; 0.9 is usual"
            )

    @property
    def schedule_free(self) -> bool:
        return self.name.startswith("schedulefree-")

    @property
    def average_beta(self) -> float:
        """The weight beta of the average x in y = (1 - beta) z + beta x (`ScheduleFree`)."""
        return self.momentum if self.name == "schedulefree-sgd" else float(self.betas[0])

    def for_batch(self, batch_size: int) -> "OptimizerConfig":
        """Return this config with the learning rate for a global batch size.

        The rate is lr * batch_size / lr_batch_size (1706.02677); if lr_batch_size is None, it stays
        lr.
        """
        if self.lr_batch_size is None:
            return self
        return self.changed(lr=self.lr * batch_size / self.lr_batch_size, lr_batch_size=None)

    def momentum_at(self, step: int, steps: int) -> float | None:
        """Return the momentum, or Adam's beta1, of update number `step` in the one-cycle schedule.

        Return None if the config keeps it constant.
        """
        if self.schedule != "one-cycle" or self.cycle_momentum is None:
            return None
        ends, peak = self.cycle_momentum
        return one_cycle(step, steps, rise=self.pct_start, start=ends, peak=peak, end=ends)

    def betas_at(self, step: int, steps: int) -> tuple[float, float]:
        """Return Adam's betas of update number `step` (from 0) out of `steps`."""
        beta1, beta2 = map(float, self.betas)
        if self.beta2_final is not None:
            beta2 = cosine(beta2, self.beta2_final, step, steps)
        return beta1, beta2

    def lr_at(self, step: int, steps: int) -> float:
        """Return the learning rate of update number `step` (from 0) out of `steps`."""
        if self.schedule == "one-cycle":
            start, end = self.lr * self.cycle_start, self.lr * self.final_lr
            rate = one_cycle(step, steps, rise=self.pct_start, start=start, peak=self.lr, end=end)
            return rate * min(1.0, (step + 1) / max(1, self.warmup_steps))
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "step":
            if self.step_every:
                return self.lr * self.gamma ** (step // self.step_every)
            return self.lr * self.gamma ** bisect_right(self.milestones, step)
        if self.schedule == "constant":
            return self.lr
        start = max(self.warmup_steps, self.hold * steps)
        progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
        return self.lr * (self.final_lr + (1 - self.final_lr) * DECAYS[self.schedule](progress))


def cosine(start: float, end: float, images_seen: int, over_images: int) -> float:
    """Return the value at `images_seen` of half a cosine from `start` to `end`.

    The value is exactly `start` before the first image, and exactly `end` after `over_images`
    images. If `over_images` is 0 or less, it is always `end`. Both numbers may count steps instead
    of images. R3GAN (2501.05441) uses this for learning rate, beta2, gamma, the probability of
    augmentation and the half-life of the average.
    """
    if images_seen >= over_images:
        return end
    if images_seen <= 0:
        return start
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * images_seen / over_images))


def one_cycle(
    step: int, steps: int, *, rise: float, start: float, peak: float, end: float
) -> float:
    """Return the value at update number `step` of a curve from `start` up to `peak`, then to `end`.

    Both parts are half cosines, as in torch's OneCycleLR (1708.07120). The peak is at update number
    `rise` * `steps` - 1, which may lie between two updates. The end is at the last update, number
    `steps` - 1; later the value stays `end`.
    """
    top, last = rise * steps - 1, steps - 1
    if step <= top:
        return _half_cosine(start, peak, step / top if top > 0 else 1.0)
    return _half_cosine(peak, end, min(1.0, (step - top) / (last - top) if last > top else 1.0))


def _half_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
