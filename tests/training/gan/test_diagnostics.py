"""What the watch says of healthy and of failing trainings: real curves in short, and simulated ones."""

import math
import re
from typing import Any

import pytest
import torch

from duetgan.training.gan.diagnostics import Watch, WatchConfig
from duetgan.training.gan.losses import OBJECTIVES
from duetgan.utils.seeding import numpy_generator

BATCH, EVERY = 32, 50
HEALTHY = {  # as our Fashion-MNIST run after 100 thousand images
    "logits/real": 0.6,
    "logits/fake": -0.7,
    "logits/real_sign": 0.35,
    "loss/discriminator": 1.12,
    "loss/generator": 1.15,
    "gradient_norm/generator": 10.0,
    "gradient_norm/discriminator": 4.7,
    "path_length/mean": 0.3,
    "ada/p": 0.2,
}


def log_row(step, **changes):
    """A row of the log with noise of 15 % on every value."""
    draw = numpy_generator(0, "test watch", step)
    values = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    return {"images": step * BATCH} | {k: v * (1 + 0.15 * draw.standard_normal()) for k, v in values.items()}


def evaluation(distance=0.1, diversity=0.7, **more):
    row = {"val/frechet/pixels": distance, "val/kernel/pixels": 1e-4, "val/diversity_ratio/pixels": diversity}
    return row | {f"val/{name.replace('__', '/')}": value for name, value in more.items()}


def run(watch, first, last, change=None, evaluate=None):
    """Log rows of the steps up to `last`, evaluations every 500; returns (step, line) of all that was said."""
    said = []
    for step in range(first + EVERY, last + EVERY, EVERY):
        said += [(step, line) for line in watch.observe(step, log_row(step, **(change(step) if change else {})))]
        if step % 500 == 0 and evaluate is not None:
            said += [(step, line) for line in watch.observe(step, evaluate(step))]
    return said


def only(said, *words):
    """The one line that was said, which holds all of these words; returns its step."""
    assert len(said) == 1, said
    for word in words:
        assert word in said[0][1]
    return said[0][0]


def improving(step):
    return evaluation(distance=30 / step**0.5, diversity=0.4 + 0.3 * step / 8000)


def test_a_healthy_training_is_left_in_peace():
    watch = Watch(WatchConfig(), NONSATURATING)

    def wild_start(step):
        """Peaks of the first thousand steps, as in real runs: D is ahead, norms grow tenfold."""
        ahead = math.exp(-step / 400)
        return {
            "logits__real": 0.6 + 3 * ahead,
            "logits__fake": -0.7 - 3 * ahead,
            "logits__real_sign": 0.35 + 0.5 * ahead,
            "gradient_norm__generator": 10 * min(1.0, 0.1 + step / 500),
        }

    assert run(watch, 0, 8000, wild_start, improving) == []
    assert watch.means["logits/margin"] == pytest.approx(1.3, rel=0.1)


def always(margin_of=None, **values):
    """The same changes in every row; `margin_of(step)`: D's logits of images, and of samples below 0."""
    if margin_of is None:
        return lambda _: values
    return lambda step: values | {"logits__real": margin_of(step), "logits__fake": -margin_of(step)}


def judged(distance=0.1, diversity=0.7, **more):
    """Evaluations whose figures are numbers or functions of the step."""
    figures = {"distance": distance, "diversity": diversity} | more
    return lambda step: evaluation(**{name: f(step) if callable(f) else f for name, f in figures.items()})


def noisy(step):
    draw = numpy_generator(1, "test watch", step).standard_normal(2)
    figures = {"memorised__pixels": 0.012, "memorised_p__pixels": 0.3, "logits__held_out": 0.55}
    return evaluation(0.05 * (1 + 0.1 * draw[0]), 0.6 * (1 + 0.08 * draw[1]), **figures)


BLIND = {"logits__real": 0.01, "logits__fake": 0.0}
TOO_LARGE = BLIND | {"logits__real": -0.09, "logits__fake": -0.1, "logits__real_sign": -0.9}
TOO_LARGE |= {"loss__discriminator": 1.45}  # as a real run with gamma 1000: margin 0.01, loss at 2 ln 2 and above
SURE = {"logits__real": 2.0, "logits__fake": -2.0, "logits__real_sign": 1.1}
LARGE = {"margin_of": lambda step: step / 1500}
# a real run with gamma 0: distances rise again while the discriminator gains
WORSE = judged(lambda step: 0.9 - step / 5000 if step <= 1500 else 0.6 * 1.3, 0.37)
NONSATURATING = OBJECTIVES["nonsaturating"]
RELATIVISTIC: dict[str, Any] = {"objective": OBJECTIVES["relativistic"]}
LATE: dict[str, Any] = {"config": WatchConfig(warmup_kimg=40.0)}

# name: steps, changes of the log's rows, evaluations, words of the one line, its steps, another watch
TOLD: dict[str, Any] = {
    "nothing while warming up, then at once": (3000, always(**BLIND), None,
        ("cannot tell real", "lower loss.r1_gamma"), [1250], LATE),  # 40 thousand images
    "gamma too large": (2000, always(**TOO_LARGE), improving, ("cannot tell real", "1.39 is chance level")),
    # both losses at ln 2 from step 3,000 on, as a real run
    "a discriminator that dies": (4500, lambda step: BLIND if step > 3000 else {"logits__real": 1.5}, None,
        ("cannot tell real", "0.693 is chance level", "has died. Try: go back"), range(3300, 4100), RELATIVISTIC),
    # margin 8 at step 800, seen in the mean a little later
    "gamma too small by the margin": (2000, always(lambda step: step / 200, loss__discriminator=0.02), None,
        ("runs away", "D(real) - D(fake) is", "gamma is too small", "raise loss.r1_gamma"), range(801, 1100)),
    # the second evaluation that is worse
    "gamma too small by the distance": (4000, always(**LARGE), WORSE,
        ("runs away", "distance went from 0.6 to 0.78"), [2500]),
    # r_v is 0.5 at 2,600; the second evaluation in a row
    "overfitting by held-out logits": (6000, None,
        judged(logits__held_out=lambda step: 0.6 - step / 4000, logits__real=0.6, logits__fake=-0.7),
        ("overfits", "held-out images are", "ada.mode to adaptive"), [3500]),
    "an overfitting discriminator that runs away": (4000, always(lambda step: step / 500),
        judged(lambda step: 0.1 * max(1, step / 1000), logits__held_out=lambda step: -step / 500), ("overfits",)),
    # the first evaluation could still be on its way down
    "mode collapse": (3000, None, judged(1.0, 0.15), ("collapses", "15% of the variety"), [1000]),
}  # fmt: skip
SILENT: dict[str, Any] = {
    "a healthy margin where no margin counts as blind": (2000, None, None, (), None,
        {"config": WatchConfig(margin_low=(-1.0, -1.0))}),
    "noise near the floor": (20_000, None, noisy),
    "worse, but the discriminator gains nothing: noise, or a new stage": (4000, None, WORSE),
    "the sign, of pairs": (2000, always(**SURE), None, (), None, RELATIVISTIC),
    "a held-out logit overrules the sign": (2000, always(**SURE), judged(logits__held_out=1.9)),
    "an early generator gets better from there": (4000, None, judged(lambda step: 100 / step, 0.15)),
    "one spike": (4000, lambda step: {"gradient_norm__generator": 500.0 if step == 3000 else 10.0}, None),
    "evaluations that do not agree in a row": (8000, None, judged(
        memorised__pixels=0.05, memorised_p__pixels=lambda step: 0.02 if step % 1000 else 1e-4,
        logits__real=1.0, logits__fake=-1.0, logits__held_out=lambda step: 0.2 if step % 1000 else -0.5)),
}  # fmt: skip


@pytest.mark.parametrize("case", [*TOLD.values(), *SILENT.values()], ids=[*TOLD, *SILENT])
def test_what_is_said(case):
    defaults: list[Any] = [(), None, {}]
    steps, change, evaluate, words, at, other = list(case) + defaults[len(case) - 3 :]
    usual: dict[str, Any] = {"config": WatchConfig(), "objective": NONSATURATING}
    said = run(Watch(**(usual | other)), 0, steps, change, evaluate)
    assert (only(said, *words) in (at or range(steps + 1))) if words else said == []


NORM = "gradient_norm/generator"
# thresholds none of which is the default
ODD = WatchConfig(
    patience=3, overfit=(0.6, 0.4), sign=(0.7, 0.5), margin_high=(6.0, 3.0), margin_low=(0.2, 0.4), worse=1.5,
    diversity=(0.3, 0.5), diversity_fall=0.5, ada=(0.8, 0.6), norm_factor=4.0, memorised=(0.01, 0.02),
)  # fmt: skip
# the best distance had the margin 2, the last is twice as large
RISEN = {"margin at best": 2.0, "best": 1.0, "distance": 2.0}


@pytest.mark.parametrize(
    ("name", "place", "key", "appears", "clears"),
    [
        ("overfit", "means", "logits/real_sign", 0.7, 0.5),
        ("runs away", "means", "logits/margin", 6.0, 3.0),
        ("blind", "means", "logits/low_margin", 0.2, 0.4),
        ("collapse", "figures", "diversity", 0.3, 0.5),
        ("ada", "means", "ada/p", 0.8, 0.6),
        (f"exploding {NORM}", "norms", f"fast/{NORM}", math.log(4), math.log(2)),
        (f"vanishing {NORM}", "norms", f"slow/{NORM}", math.log(4), math.log(2)),
    ],
)
def test_a_failure_shows_beyond_one_threshold_and_is_gone_beyond_the_other(name, place, key, appears, clears):
    step = math.copysign(1e-9, appears - clears)
    for value, shows in ((appears + step, True), (appears, None), (clears, None), (clears - step, False)):
        watch = Watch(ODD, NONSATURATING)
        watch.norms = {f"fast/{NORM}": 0.0, f"slow/{NORM}": 0.0}
        getattr(watch, place)[key] = value
        assert {finding.name: finding.shows for finding in watch._findings()}[name] is shows, value


@pytest.mark.parametrize(
    ("name", "figures", "streaks", "means", "shows"),
    [
        ("memorised", {"chance": 0.5}, {"memorised": 3}, {}, True),
        ("memorised", {"chance": 0.02}, {"memorised": 2}, {}, None),
        ("memorised", {"chance": 0.021}, {}, {}, False),
        ("overfit", {"overfit": 0.1}, {"overfit": 3}, {}, True),
        ("overfit", {"overfit": 0.4}, {"overfit": 2}, {}, None),
        ("overfit", {"overfit": 0.39}, {}, {"logits/real_sign": 1.0}, False),
        ("collapse", {"diversity": 0.149, "fell": 1.0}, {}, {}, True),
        ("collapse", {"diversity": 0.15, "fell": 1.0}, {}, {}, None),
        ("collapse", {"diversity": 0.39, "best diversity": 0.8}, {"worse": 1}, {}, True),
        ("collapse", {"diversity": 0.4, "best diversity": 0.8}, {"worse": 1}, {}, None),
        ("collapse", {"diversity": 0.39, "best diversity": 0.8}, {}, {}, None),
        ("runs away", RISEN, {"worse": 3}, {"logits/margin": 2.3}, True),
        ("runs away", RISEN, {"worse": 3}, {"logits/margin": 2.2}, None),
        ("runs away", RISEN, {"worse": 2}, {"logits/margin": 2.3}, None),
        ("runs away", RISEN, {}, {"logits/margin": 2.3}, False),
    ],
)
def test_what_evaluations_show(name, figures, streaks, means, shows):
    watch = Watch(ODD, NONSATURATING)
    watch.figures, watch.streaks, watch.means = dict(figures), streaks, means
    assert {finding.name: finding.shows for finding in watch._findings()}[name] is shows


def test_what_the_watch_keeps_of_evaluations():
    watch = Watch(ODD, NONSATURATING)
    watch.means = {"logits/margin": 5.0, "logits/real": 3.0, "logits/fake": 0.5}
    watch.observe(1, evaluation(1.0, 0.8, logits__held_out=1.5))
    first = {"fell": 1.0, "best": 1.0, "margin at best": 5.0, "distance": 1.0}
    assert watch.figures == first | {"diversity": 0.8, "best diversity": 0.8, "overfit": 0.6}
    assert watch.streaks == {"worse": 0, "overfit": 1}
    watch.means["logits/margin"] = 4.0
    # a margin of ten times the lower threshold is too small for the logits to count
    logits = {"logits__held_out": 0.0, "logits__real": 2.5, "logits__fake": 0.5}
    watch.observe(2, evaluation(0.98, 0.5, memorised__pixels=0.05, memorised_p__pixels=0.01, **logits))
    second = {"fell": 0.0, "best": 0.98, "margin at best": 4.0, "distance": 0.98, "diversity": 0.5}
    second |= {"best diversity": 0.8, "overfit": 0.6, "memorised": 0.05, "chance": 0.01}
    assert watch.figures == second
    assert watch.streaks == {"worse": 0, "overfit": 1, "memorised": 1}
    for distance, streak in ((1.5 * 0.98, 0), (1.5 * 0.98 + 1e-9, 1), (1.44, 0)):
        watch.observe(3, {"val/frechet/pixels": distance})
        assert watch.streaks["worse"] == streak
    assert (watch.figures["fell"], watch.figures["best"]) == (1.0, 0.98)


def test_messages_name_the_numbers_that_were_judged():
    watch = Watch(ODD, NONSATURATING)
    watch.norms = {f"fast/{NORM}": math.log(50), f"slow/{NORM}": math.log(3)}
    watch.means = {"logits/margin": 7.3, "logits/low_margin": 0.13, "loss/discriminator": 1.21, "ada/p": 0.87}
    watch.figures = RISEN | {"overfit": 0.45, "diversity": 0.12, "best diversity": 0.83, "memorised": 0.07}
    watch.streaks["worse"] = 3
    found = {}
    for finding in watch._findings():
        found[finding.name] = re.findall(r"[\d.]*\d%?", finding.message.partition(". Try: ")[0])
    assert found == {
        **{"overfit": ["45%"], "runs away": ["7.3", "1", "2"], "blind": ["0.13", "1.21", "1.39"]},
        **{"collapse": ["12%", "83%"], "ada": ["0.87"], "memorised": ["7%", "1"]},
        **{f"exploding {NORM}": ["50", "3"], f"vanishing {NORM}": ["50", "3"]},
    }
    watch = Watch(ODD, NONSATURATING)
    watch.means["logits/real_sign"] = 0.5
    assert "it calls 75% of the training images real" in next(watch._findings()).message


@pytest.mark.parametrize(("factor", "word"), [(100.0, "explodes"), (0.01, "vanishes")])
@pytest.mark.parametrize("name", ["gradient_norm/generator", "gradient_norm/discriminator", "path_length/mean"])
def test_norms_that_jump(name, factor, word):
    watch = Watch(WatchConfig(), NONSATURATING)
    usual = {name.replace("/", "__"): HEALTHY[name]}
    assert run(watch, 0, 4000, lambda _: usual) == []
    jumped = {name.replace("/", "__"): HEALTHY[name] * factor}
    assert 4050 < only(run(watch, 4000, 4500, lambda _: jumped), word, "Try:") <= 4300


def test_a_warning_comes_again_only_after_recovery():
    watch = Watch(WatchConfig(), NONSATURATING)

    def margin(value):
        return lambda _: {"logits__real": value, "logits__fake": 0.0, "gradient_norm__generator": 10.0}

    only(run(watch, 0, 2000, margin(9.0)), "runs away")
    assert run(watch, 2000, 4000, margin(6.5)) == []  # between the thresholds
    assert run(watch, 4000, 6000, margin(9.0)) == []
    assert run(watch, 6000, 9000, margin(2.0)) == []
    assert watch.active == []
    only(run(watch, 9000, 14000, margin(9.0)), "runs away")


def test_the_means_have_their_half_life_in_images():
    watch = Watch(WatchConfig(memory=0.25), NONSATURATING)
    watch.observe(1, {"images": 1000, "logits/real": 0.0, "logits/fake": 0.0, NORM: 1.0})
    watch.observe(2, {"images": 1020, "logits/real": 4.0, "logits/fake": 1.0, NORM: math.exp(3.0)})
    keep, fast, slow = (0.5 ** (20 / (memory * 1020)) for memory in (0.25, 0.05, 0.625))
    assert watch.means["logits/margin"] == pytest.approx(3 * (1 - keep), rel=1e-12)
    assert watch.means["logits/fake"] == pytest.approx(1 - keep, rel=1e-12)
    assert watch.means["logits/low_margin"] == pytest.approx(0.3 * (1 - keep), rel=1e-12)
    norms = {f"fast/{NORM}": 3 * (1 - fast), f"slow/{NORM}": 3 * (1 - slow)}
    assert watch.norms == pytest.approx(norms, rel=1e-12)
    watch.observe(3, {"images": 9000, "logits/margin": 1.0})
    assert watch.means["logits/margin"] == pytest.approx(1.5 * (1 - keep) + 0.5, rel=1e-12)  # half at most
    state = watch.state_dict()
    watch.observe(3, {"images": 9000, "logits/margin": 7.0})  # the same images once more change nothing
    assert watch.state_dict() == state


def failing(step):
    return {"logits__real": step / 300, "logits__fake": -step / 300, "gradient_norm__generator": 10 * 1.002**step}


def worsening(step):
    return evaluation(1 + step / 2000, 0.8 - step / 8000, memorised__pixels=0.05, memorised_p__pixels=1e-5)


def test_a_resumed_watch_says_what_an_unbroken_one_says(tmp_path):
    straight = run(Watch(WatchConfig(), NONSATURATING), 0, 6000, failing, worsening)
    assert len(straight) >= 4
    for stop in (600, 1500, 2000, 3300):
        first = Watch(WatchConfig(), NONSATURATING)
        said = run(first, 0, stop // EVERY * EVERY, failing, worsening)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = Watch(WatchConfig(), NONSATURATING)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert second.state_dict() == first.state_dict()
        assert said + run(second, stop // EVERY * EVERY, 6000, failing, worsening) == straight
        assert second.active is not first.active


def test_values_that_are_not_numbers_are_passed_over_and_switched_off_it_is_silent():
    watch = Watch(WatchConfig(), NONSATURATING)
    run(watch, 0, 1000, None, improving)
    before = watch.state_dict()
    for bad in (math.nan, math.inf, -math.inf):
        row = dict.fromkeys(HEALTHY, bad) | {"images": 32_001}
        assert watch.observe(1001, row) == []
        assert watch.observe(1001, {"val/frechet/pixels": bad, "val/logits/held_out": bad}) == []
    assert watch.state_dict() == before | {"images": 32_001.0}
    assert watch.observe(1002, {"images": 32_100, "gradient_norm/generator": 0.0}) == []
    assert watch.observe(1003, {}) == []
    assert run(Watch(WatchConfig(on=False), NONSATURATING), 0, 3000, failing, worsening) == []
