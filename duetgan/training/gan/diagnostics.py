"""Watches a GAN's metrics for the failures that everyone meets, and says in words what it sees and
what to try.
"""

import math
from collections.abc import Iterator, Mapping

from duetgan.training.base.monitors import Fields
from duetgan.training.gan.losses import OBJECTIVES, Objective
from duetgan.utils.config.model import (
    AboveOne,
    Config,
    InnerShare,
    NonNegativeFloat,
    PositiveInt,
    Share,
)
from duetgan.utils.errors import UserError

NORMS = {  # whose sudden growth or loss is told
    "gradient_norm/generator": "the generator's gradient norm",
    "gradient_norm/discriminator": "the discriminator's gradient norm",
    "path_length/mean": "the mean path length",
}
# counts no margin for much more than the one that ends "blind": what was is soon forgotten
LOW = "logits/low_margin"
CAP = 0.15  # for so much more
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
    """When a warning is given. Thresholds come in pairs: it appears at the first and is cleared at
    the second.
    """

    on: bool = True  # warnings about known failures at log ticks
    # thousand images before the first word: both networks' beginnings are wild
    warmup_kimg: NonNegativeFloat = 20.0
    memory: Share = 0.1  # half-life of the means that are judged, as a share of the images seen
    patience: PositiveInt = 2  # evaluations in a row that must agree, where evaluations are judged
    # r_v of ADA (2006.06676): 0 no overfitting, 1 nothing else
    overfit: tuple[float, float] = (0.5, 0.35)
    # mean sign of D(real), r_t of ADA, where no held-out logit is known
    sign: tuple[float, float] = (0.9, 0.8)
    # D(real) - D(fake): D wins outright; healthy is about 0.5 to 4
    margin_high: tuple[float, float] = (8.0, 5.0)
    margin_low: tuple[float, float] = (0.05, 0.15)  # D(real) - D(fake): D is blind
    worse: AboveOne = 1.25  # distance over its best that counts as worse
    # ratio to real images' diversity, unless distances still fall
    diversity: tuple[float, float] = (0.2, 0.3)
    # ratio over its best that counts as falling, if distances are worse too
    diversity_fall: InnerShare = 0.6
    ada: tuple[float, float] = (0.98, 0.9)  # augmentation probability that has nowhere to go
    norm_factor: AboveOne = 10.0  # change of a gradient norm against its own long mean
    memorised: tuple[float, float] = (0.001, 0.05)  # p-value of metrics.samples.memorisation

    def check(self) -> None:
        rising = ("margin_low", "diversity", "memorised")  # the other pairs fall
        for name, pair in vars(self).items():
            if isinstance(pair, tuple) and pair != tuple(sorted(pair, reverse=name not in rising)):
                order = "at most" if name in rising else "at least"
                raise UserError(
                    f"{name} {pair[0]}, {pair[1]}: the first must be {order} the second"
                )


# (a failure, whether it shows (None: neither clearly there nor clearly gone), what to say)
Finding = tuple[str, bool | None, str]


class Watch(Fields):
    """Reads every row of metrics; a failure is said once, and again only after it has been away.

    What it says is a function of the rows alone: all ranks say the same, and a resumed run what an
    unbroken one says.
    """

    STATE = ("images", "said", "means", "norms", "figures", "streaks")

    def __init__(
        self, config: WatchConfig, objective: Objective = OBJECTIVES["nonsaturating"]
    ) -> None:
        self.config, self.objective = config, objective
        self.images = 0.0
        self.said: list[str] = []
        self.means: dict[str, float] = {}  # of the last tenth or so of the training
        # of logarithms: `fast/...` of the last rows, `slow/...` of the last quarter
        self.norms: dict[str, float] = {}
        # of the last evaluation, best ones, `saw`: a margin not blind
        self.figures: dict[str, float] = {}
        self.streaks: dict[str, int] = {}  # evaluations in a row

    def observe(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Take a row of the log (it has `images`) or of an evaluation (keys `val/...`); returns
        what there is to say.

        Rows come in order of steps. Values that are missing or not finite are passed over.
        """
        if not self.config.on:
            return []
        finite = {
            key: float(value)
            for key, value in row.items()
            if value is not None and math.isfinite(value)
        }
        if "images" in finite:
            self._remember(finite)
        else:
            self._evaluated(finite)
        lines: list[str] = []
        if self.images < 1000 * self.config.warmup_kimg:
            return lines
        for name, shows, words in self._findings():
            if shows and name not in self.said:
                self.said.append(name)
                lines.append(words)
            elif shows is False and name in self.said:
                self.said.remove(name)
        return lines

    def _remember(self, row: dict[str, float]) -> None:
        passed, self.images = row["images"] - self.images, row["images"]
        if passed <= 0:
            return

        def blend(means: dict[str, float], key: str, value: float, memory: float) -> None:
            """With a half-life of `memory` times the images seen, so that it fits short runs and
            long ones. No row counts for more than half, however rare rows are: one spike is no
            state.
            """
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

    def _evaluated(self, row: dict[str, float]) -> None:
        """Compare an evaluation's figures with those before and count how often in a row they were
        bad.
        """

        def figure(name: str) -> float | None:
            """The first of that name, whatever extractor it names."""
            return next(
                (value for key, value in row.items() if key.startswith(f"val/{name}/")), None
            )

        figures, config = self.figures, self.config
        if (distance := figure("frechet")) is not None:
            figures["fell"] = float(distance < 0.98 * figures.get("distance", math.inf))
            if distance < figures.get("best", math.inf):
                figures["best"], figures["margin at best"] = (
                    distance,
                    self.means.get("logits/margin", 0.0),
                )
            figures["distance"] = distance
            self._count("worse", distance > config.worse * figures["best"])
        if (diversity := figure("diversity_ratio")) is not None:
            figures["diversity"] = diversity
            figures["best diversity"] = max(diversity, figures.get("best diversity", 0.0))
        if (chance := figure("memorised_p")) is not None:
            figures["memorised"], figures["chance"] = figure("memorised") or 0.0, chance
            self._count("memorised", chance <= config.memorised[0])
        # r_v of ADA: where held-out logits lie between those of training images (0) and of fakes
        # (1); these are of the same evaluation, where it has them, else of the log's means
        logits = self.means | {key.removeprefix("val/"): value for key, value in row.items()}
        real, margin = (
            logits.get("logits/real", 0.0),
            logits.get("logits/real", 0.0) - logits.get("logits/fake", 0.0),
        )
        # a discriminator that tells nothing apart cannot overfit
        if "logits/held_out" in logits and margin > 10 * config.margin_low[0]:
            figures["overfit"] = (real - logits["logits/held_out"]) / margin
            self._count("overfit", figures["overfit"] >= config.overfit[0])

    def _count(self, name: str, bad: bool) -> None:
        self.streaks[name] = self.streaks.get(name, 0) + 1 if bad else 0

    def _lasts(self, name: str) -> bool:
        return self.streaks.get(name, 0) >= self.config.patience

    def _findings(self) -> Iterator[Finding]:
        yield self._overfits()
        yield self._runs_away()
        yield from self._other_states()
        limits = (math.log(self.config.norm_factor), math.log(self.config.norm_factor) / 2)
        for key, what in NORMS.items():
            # one that has left its own long mean far behind, upwards or downwards
            if f"slow/{key}" in self.norms:
                fast, slow = self.norms[f"fast/{key}"], self.norms[f"slow/{key}"]
                seen = f"{math.exp(fast):.3g}, it was {math.exp(slow):.3g}"
                yield (
                    f"exploding {key}",
                    _above(fast - slow, limits),
                    f"{what} explodes: {seen}. Try: {EXPLODES}",
                )
                yield (
                    f"vanishing {key}",
                    _above(slow - fast, limits),
                    f"{what} vanishes: {seen}. Try: {VANISHES}",
                )

    def _overfits(self) -> Finding:
        """The discriminator knows its training images by heart."""
        if (ratio := self.figures.get("overfit")) is not None:
            shows = _shows(self._lasts("overfit"), gone=ratio < self.config.overfit[1])
            seen = (
                f"held-out images look {ratio:.0%} of the way from training images to fakes to it"
            )
        else:
            sign = self.means.get("logits/real_sign", 0.0) if self.objective.signed else 0.0
            shows = _above(sign, self.config.sign)
            seen = f"it calls {(1 + sign) / 2:.0%} of the training images real"
        return "overfit", shows, f"the discriminator overfits: {seen}. Try: {GENERALISE}"

    def _runs_away(self) -> Finding:
        """The discriminator wins outright, or ever more while the samples get worse: gamma is too
        small.
        """
        margin, figures = self.means.get("logits/margin", 0.0), self.figures
        shows = _above(margin, self.config.margin_high) if self.objective.bounded else None
        seen = f"D(real) - D(fake) is {margin:.2g}"
        if self._lasts("worse") and margin > 1.1 * figures.get("margin at best", math.inf):
            shows = True
            seen += f" and rising, while the distance went from {figures['best']:.3g} to {figures['distance']:.3g}"
        elif shows is False and self.streaks.get("worse", 0):
            shows = None
        if shows and "overfit" in self.said:  # the reason is told, and the cure with it
            shows = None
        cure = (
            CALM
            if figures.get("overfit", 1.0) < 0.5
            else f"{CALM}; if held-out logits are near the fakes', {ADA}"
        )
        words = f"the discriminator runs away: {seen}; gamma is too small or its rate too high. Try: {cure}"
        return "runs away", shows, words

    def _other_states(self) -> Iterator[Finding]:
        """A discriminator that tells nothing apart, samples that differ far less than real images
        do, ADA at its end, and samples that keep to training images more than chance allows.
        """
        config, means, figures = self.config, self.means, self.figures
        margin, (said, forgotten) = means.get(LOW, math.nan), config.margin_low
        shows = _above(-margin, (-said, -forgotten)) if self.objective.bounded else None
        loss, chance = means.get("loss/discriminator", math.nan), self.objective.chance_level
        seen = f"D(real) - D(fake) is lately {margin:.2g}, its loss {loss:.3g} ({chance:.3g} is chance level)"
        if margin > forgotten:
            figures["saw"] = margin
        died, large = (
            f"it did before, so it has died. Try: {REVIVE}",
            f"gamma is too large. Try: {SHARPEN}",
        )
        why = died if "saw" in figures else large
        yield "blind", shows, f"the discriminator tells nothing apart: {seen}; {why}"
        ratio, best = figures.get("diversity", math.nan), figures.get("best diversity", 0.0)
        low = ratio < config.diversity[0] and not figures.get("fell", 0.0)
        falls = ratio < config.diversity_fall * best and self.streaks.get("worse", 0) > 0
        shows = _shows(
            low or falls or ratio < config.diversity[0] / 2, gone=ratio > config.diversity[1]
        )
        seen = f"the least varied class has {ratio:.0%} of the variety of real images (its best was {best:.0%})"
        yield "collapse", shows, f"the generator collapses: {seen}. Try: {VARY}"
        p = means.get("ada/p", math.nan)
        seen = f"the augmentation probability stands at {p:.2f} and the discriminator is still too sure"
        yield "ada", _above(p, config.ada), f"{seen}. Try: {MORE_DATA}"
        shows = _shows(
            self._lasts("memorised"), gone=figures.get("chance", math.nan) > config.memorised[1]
        )
        share = figures.get("memorised", 0.0)
        seen = f"{share:.0%} of the samples are nearer to a training image than all but 1 % of held-out images are"
        yield "memorised", shows, f"the generator copies training images: {seen}. Try: {FORGET}"


def _shows(bad: bool, *, gone: bool) -> bool | None:
    return True if bad else False if gone else None


def _above(value: float, limits: tuple[float, float]) -> bool | None:
    """Whether a value lies above the first limit; False below the second, None between, and of a
    NaN.
    """
    return _shows(value > limits[0], gone=value < limits[1])
