"""Warnings of the common failures of GAN training, with remedies, from the logged metrics."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from duetgan.training.base.monitors import Fields
from duetgan.training.gan.losses import Objective
from duetgan.utils.config.model import (
    AboveOne,
    Config,
    InnerFraction,
    NonNegativeFloat,
    PositiveFraction,
    PositiveInt,
)
from duetgan.utils.errors import UserError

# Metrics whose sudden growth or decay causes a warning.
NORMS = {
    "gradient_norm/generator": "the generator's gradient norm",
    "gradient_norm/discriminator": "the discriminator's gradient norm",
    "path_length/mean": "the mean path length",
}
# The margin D(real) - D(fake), limited to CAP above the threshold that clears "blind", so that its
# mean falls soon after a large margin.
LOW = "logits/low_margin"
CAP = 0.15
# Metrics whose moving means are computed.
MEANS = (
    "logits/real",
    "logits/fake",
    "logits/margin",
    LOW,
    "logits/real_sign",
    "loss/discriminator",
    "ada/p",
)
ADA = "set ada.mode to adaptive (fixed with loss.objective relativistic or wasserstein)"
GENERALISE = f"{ADA}, give more data (or --init-from a related run), or raise loss.r1_gamma"
CALM = "raise loss.r1_gamma (x2 to x10), lower discriminator_optimizer.lr"
VARY = (
    f"{CALM} and generator_optimizer.lr, or go back to the best checkpoint; keep minibatch_std_group 4 or more and "
    "style_mixing on"
)
MORE_DATA = (
    "give more data, start from a related run with --init-from, or take a smaller discriminator; beyond about 0.8 "
    "augmentations leak into the samples, so look at them"
)
SHARPEN = "lower loss.r1_gamma (/2 to /10), raise discriminator_optimizer.lr, or lower a fixed ada.p that is high"
REVIVE = (
    "go back to an earlier checkpoint, with a lower discriminator_optimizer.lr or another loss.objective; if it came "
    "slowly, lower loss.r1_gamma"
)
FORGET = f"{GENERALISE}; neighbours.png of evaluate.py shows the pairs, an earlier checkpoint may be free of it"
EXPLODES = "lower the learning rates or set clip_norm, raise loss.r1_gamma; the last good checkpoint is kept"
VANISHES = "the other network has won: look at D(real) - D(fake), change loss.r1_gamma, lower its learning rate"


class WatchConfig(Config):
    """Thresholds of the warnings of failures.

    A pair of thresholds is that at which a warning appears, and that at which it is cleared.
    """

    on: bool = True  # print warnings of known failures at log ticks
    # thousand images before the first warning, because both networks vary a lot at first
    warmup_kimg: NonNegativeFloat = 20.0
    # half-life of the moving means that are checked, as a fraction of the images seen
    memory: PositiveFraction = 0.1
    patience: PositiveInt = 2  # evaluations in a row that must show a failure before its warning
    # overfitting of D, r_v of ADA (2006.06676): 0 none, 1 complete
    overfit: tuple[float, float] = (0.5, 0.35)
    # overfitting of D without held-out images: mean sign of D(real), r_t of ADA
    sign: tuple[float, float] = (0.9, 0.8)
    # D(real) - D(fake) at which D wins outright; healthy is about 0.5 to 4
    margin_high: tuple[float, float] = (8.0, 5.0)
    # D(real) - D(fake) at which D cannot tell real images from samples
    margin_low: tuple[float, float] = (0.05, 0.15)
    worse: AboveOne = 1.25  # Frechet distance / best distance above which samples are worse
    # diversity of samples / diversity of real images, unless distances still fall
    diversity: tuple[float, float] = (0.2, 0.3)
    # diversity / best diversity below which it has fallen, if distances are worse too
    diversity_fall: InnerFraction = 0.6
    ada: tuple[float, float] = (0.98, 0.9)  # augmentation probability that cannot rise much more
    norm_factor: AboveOne = 10.0  # gradient norm / its long-term mean, or the inverse
    memorised: tuple[float, float] = (0.001, 0.05)  # p-value of the test for copied training images

    def check(self) -> None:
        rising = ("margin_low", "diversity", "memorised")  # The other pairs must fall.
        for name, pair in vars(self).items():
            if isinstance(pair, tuple) and pair != tuple(sorted(pair, reverse=name not in rising)):
                order = "at most" if name in rising else "at least"
                raise UserError(
                    f"{name} {pair[0]}, {pair[1]}: the first must be {order} the second"
                )


class Finding(NamedTuple):
    """The result of a check for one failure of the training."""

    name: str
    shows: bool | None  # True if present; None between the thresholds
    message: str


class Watch(Fields):
    """A monitor that checks every row of metrics for failures of the training.

    A warning is repeated only after its failure has disappeared. As warnings are a function of the
    rows, they are the same on all ranks, and in resumed and uninterrupted runs.
    """

    STATE = ("images", "active", "means", "norms", "figures", "streaks")

    def __init__(self, config: WatchConfig, objective: Objective) -> None:
        self.config = config
        self.objective = objective
        self.images = 0.0
        self.active: list[str] = []  # failures with a warning that is not cleared
        self.means: dict[str, float] = {}  # moving means of the metrics in MEANS
        # Moving means of logarithms: `fast/...` over few rows, `slow/...` over a quarter of all.
        self.norms: dict[str, float] = {}
        # Metrics of the last evaluation, and best values. `saw` is a margin that was not "blind".
        self.figures: dict[str, float] = {}
        self.streaks: dict[str, int] = {}  # number of consecutive evaluations with a failure

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["said"] = state.pop("active")  # the name in existing checkpoints
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"active": state["said"]})

    def observe(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Process a row of metrics, and return the new warnings.

        A row is either a row of the log, which has the key `images`, or an evaluation, with keys
        `val/...`. Rows must be in the order of the steps. Values that are missing or not finite are
        ignored.
        """
        if not self.config.on:
            return []
        finite = {
            key: float(value)
            for key, value in row.items()
            if value is not None and math.isfinite(value)
        }
        if "images" in finite:
            self._update_means(finite)
        else:
            self._update_evaluation(finite)
        messages: list[str] = []
        if self.images < 1000 * self.config.warmup_kimg:
            return messages
        for name, shows, message in self._findings():
            if shows and name not in self.active:
                self.active.append(name)
                messages.append(message)
            elif shows is False and name in self.active:
                self.active.remove(name)
        return messages

    def _update_means(self, row: dict[str, float]) -> None:
        passed = row["images"] - self.images
        self.images = row["images"]
        if passed <= 0:
            return

        def blend(means: dict[str, float], key: str, value: float, memory: float) -> None:
            # The half-life is `memory` times the images seen, which suits short and long runs. No
            # row has a weight above one half, so that a single spike causes no warning.
            keep = max(0.5, 0.5 ** (passed / (memory * self.images)))
            means[key] = keep * means.get(key, value) + (1 - keep) * value

        if "logits/real" in row and "logits/fake" in row:
            row.setdefault("logits/margin", row["logits/real"] - row["logits/fake"])
            row[LOW] = min(row["logits/margin"], self.config.margin_low[1] + CAP)
        for key in MEANS:
            if key in row:
                blend(self.means, key, row[key], self.config.memory)
        for key in NORMS:
            if row.get(key, 0.0) > 0:
                blend(self.norms, f"fast/{key}", math.log(row[key]), self.config.memory / 5)
                blend(self.norms, f"slow/{key}", math.log(row[key]), self.config.memory * 2.5)

    def _update_evaluation(self, row: dict[str, float]) -> None:
        def metric(name: str) -> float | None:
            """Return the value of the first key `val/{name}/...`; None if there is no such key."""
            return next(
                (value for key, value in row.items() if key.startswith(f"val/{name}/")), None
            )

        figures, config = self.figures, self.config
        if (distance := metric("frechet")) is not None:
            figures["fell"] = float(distance < 0.98 * figures.get("distance", math.inf))
            if distance < figures.get("best", math.inf):
                figures["best"] = distance
                figures["margin at best"] = self.means.get("logits/margin", 0.0)
            figures["distance"] = distance
            self._count("worse", distance > config.worse * figures["best"])
        if (diversity := metric("diversity_ratio")) is not None:
            figures["diversity"] = diversity
            figures["best diversity"] = max(diversity, figures.get("best diversity", 0.0))
        if (p_value := metric("memorised_p")) is not None:
            figures["memorised"] = metric("memorised") or 0.0
            figures["chance"] = p_value
            self._count("memorised", p_value <= config.memorised[0])
        # r_v of ADA: the position of held-out logits between those of training images (0) and of
        # samples (1), from this evaluation if it has them, else from the means of the log.
        logits = self.means | {key.removeprefix("val/"): value for key, value in row.items()}
        real = logits.get("logits/real", 0.0)
        margin = real - logits.get("logits/fake", 0.0)
        # With a small margin the ratio means nothing.
        if "logits/held_out" in logits and margin > 10 * config.margin_low[0]:
            figures["overfit"] = (real - logits["logits/held_out"]) / margin
            self._count("overfit", figures["overfit"] >= config.overfit[0])

    def _count(self, name: str, fails: bool) -> None:
        self.streaks[name] = self.streaks.get(name, 0) + 1 if fails else 0

    def _lasts(self, name: str) -> bool:
        return self.streaks.get(name, 0) >= self.config.patience

    def _findings(self) -> Iterator[Finding]:
        # The order matters: "runs away" depends on an active warning of "overfit".
        yield self._overfits()
        yield self._runs_away()
        yield self._is_blind()
        yield self._collapses()
        yield self._ada_at_limit()
        yield self._memorises()
        limits = (math.log(self.config.norm_factor), math.log(self.config.norm_factor) / 2)
        for key, name in NORMS.items():
            # Compare recent values with the long-term mean.
            if f"slow/{key}" in self.norms:
                fast, slow = self.norms[f"fast/{key}"], self.norms[f"slow/{key}"]
                change = f"{math.exp(fast):.3g}, it was {math.exp(slow):.3g}"
                explodes = f"{name} explodes: {change}. Try: {EXPLODES}"
                yield Finding(f"exploding {key}", _above(fast - slow, limits), explodes)
                vanishes = f"{name} vanishes: {change}. Try: {VANISHES}"
                yield Finding(f"vanishing {key}", _above(slow - fast, limits), vanishes)

    def _overfits(self) -> Finding:
        """Check for a discriminator that has memorised its training images."""
        if (ratio := self.figures.get("overfit")) is not None:
            shows = _shows(self._lasts("overfit"), is_gone=ratio < self.config.overfit[1])
            evidence = f"held-out images are {ratio:.0%} of the way from training images to samples in its logits"
        else:
            sign = self.means.get("logits/real_sign", 0.0) if self.objective.signed else 0.0
            shows = _above(sign, self.config.sign)
            evidence = f"it calls {(1 + sign) / 2:.0%} of the training images real"
        message = f"the discriminator overfits: {evidence}. Try: {GENERALISE}"
        return Finding("overfit", shows, message)

    def _runs_away(self) -> Finding:
        """Check for a discriminator that wins outright, or improves while the samples get worse."""
        margin, figures = self.means.get("logits/margin", 0.0), self.figures
        shows = _above(margin, self.config.margin_high) if self.objective.bounded else None
        evidence = f"D(real) - D(fake) is {margin:.2g}"
        if self._lasts("worse") and margin > 1.1 * figures.get("margin at best", math.inf):
            shows = True
            evidence += f" and rising, while the distance went from {figures['best']:.3g} to {figures['distance']:.3g}"
        elif shows is False and self.streaks.get("worse", 0):
            shows = None
        if (
            shows and "overfit" in self.active
        ):  # The warning "overfit" names the cause and a remedy.
            shows = None
        remedy = CALM
        if figures.get("overfit", 1.0) >= 0.5:
            remedy = f"{CALM}; if held-out logits are near the samples', {ADA}"
        message = f"the discriminator runs away: {evidence}; gamma is too small or its rate too high. Try: {remedy}"
        return Finding("runs away", shows, message)

    def _is_blind(self) -> Finding:
        """Check for a discriminator that cannot tell real images from samples."""
        margin, (low, high) = self.means.get(LOW, math.nan), self.config.margin_low
        shows = _above(-margin, (-low, -high)) if self.objective.bounded else None
        if margin > high:
            self.figures["saw"] = margin
        cause = f"gamma is too large. Try: {SHARPEN}"
        if "saw" in self.figures:
            cause = f"the margin was larger, so the discriminator has died. Try: {REVIVE}"
        loss, chance = self.means.get("loss/discriminator", math.nan), self.objective.chance_level
        message = (
            f"the discriminator cannot tell real images from samples: D(real) - D(fake) is lately {margin:.2g}, "
            f"its loss {loss:.3g} ({chance:.3g} is chance level); {cause}"
        )
        return Finding("blind", shows, message)

    def _collapses(self) -> Finding:
        """Check for samples that vary far less than real images."""
        config, figures = self.config, self.figures
        ratio, best = figures.get("diversity", math.nan), figures.get("best diversity", 0.0)
        is_low = ratio < config.diversity[0] and not figures.get("fell", 0.0)
        falls = ratio < config.diversity_fall * best and self.streaks.get("worse", 0) > 0
        fails = is_low or falls or ratio < config.diversity[0] / 2
        message = (
            f"the generator collapses: the least varied class has {ratio:.0%} of the variety of real images "
            f"(its best was {best:.0%}). Try: {VARY}"
        )
        return Finding("collapse", _shows(fails, is_gone=ratio > config.diversity[1]), message)

    def _ada_at_limit(self) -> Finding:
        p = self.means.get("ada/p", math.nan)
        message = (
            f"the augmentation probability stands at {p:.2f} and the discriminator still overfits. "
            f"Try: {MORE_DATA}"
        )
        return Finding("ada", _above(p, self.config.ada), message)

    def _memorises(self) -> Finding:
        """Check for samples that are copies of training images more often than chance allows."""
        p_value, fraction = self.figures.get("chance", math.nan), self.figures.get("memorised", 0.0)
        shows = _shows(self._lasts("memorised"), is_gone=p_value > self.config.memorised[1])
        message = (
            f"the generator copies training images: {fraction:.0%} of the samples are nearer to a training image than "
            f"all but 1 % of held-out images are. Try: {FORGET}"
        )
        return Finding("memorised", shows, message)


def _shows(fails: bool, *, is_gone: bool) -> bool | None:
    if fails:
        return True
    return False if is_gone else None


def _above(value: float, limits: tuple[float, float]) -> bool | None:
    """Return True if `value` is above the first limit, False if it is below the second.

    Return None between the limits, and for NaN.
    """
    return _shows(value > limits[0], is_gone=value < limits[1])
