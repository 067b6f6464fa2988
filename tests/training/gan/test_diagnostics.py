"""What the watch says of healthy and of failing trainings: real curves in short, and simulated ones."""

import math
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
    watch = Watch(WatchConfig())

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
COPIED = {"memorised__pixels": 0.08, "memorised_p__pixels": 1e-9}
LARGE = {"margin_of": lambda step: step / 1500}
# a real run with gamma 0: distances rise again while the discriminator gains
WORSE = judged(lambda step: 0.9 - step / 5000 if step <= 1500 else 0.6 * 1.3, 0.37)
RELATIVISTIC: dict[str, Any] = {"objective": OBJECTIVES["relativistic"]}
LATE: dict[str, Any] = {"config": WatchConfig(warmup_kimg=40.0)}

# name: steps, changes of the log's rows, evaluations, words of the one line, its steps, another watch
TOLD: dict[str, Any] = {
    "nothing while warming up, then at once": (3000, always(**BLIND), None,
        ("cannot tell real", "lower loss.r1_gamma"), [1250], LATE),  # 40 thousand images
    "gamma too large": (2000, always(**TOO_LARGE), improving, ("cannot tell real", "1.39 is chance level")),
    "gamma too large, of pairs": (2000, always(**TOO_LARGE), None,
        ("cannot tell real", "0.693 is chance level"), None, RELATIVISTIC),
    # both losses at ln 2 from step 3,000 on, as a real run
    "a discriminator that dies": (4500, lambda step: BLIND if step > 3000 else {"logits__real": 1.5}, None,
        ("cannot tell real", "has died. Try: go back"), range(3300, 4100), RELATIVISTIC),
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
    "overfitting by the sign where nothing is held out": (2000, always(**SURE), None,
        ("overfits", "of the training images real")),
    "an overfitting discriminator that runs away": (4000, always(lambda step: step / 500),
        judged(lambda step: 0.1 * max(1, step / 1000), logits__held_out=lambda step: -step / 500), ("overfits",)),
    # the first evaluation could still be on its way down
    "mode collapse": (3000, None, judged(1.0, 0.15), ("collapses", "15% of the variety"), [1000]),
    # no excuse counts; the end of the warm-up
    "total collapse": (1000, None, judged(lambda step: 100 / step, 0.05), ("collapses",), [650]),
    "variety that falls": (4000, None,
        judged(lambda step: 0.1 if step < 2000 else 0.14, lambda step: 0.7 if step < 2000 else 0.4),
        ("collapses", "40%", "best was 70%"), [2000]),
    "augmentation at its end": (6000, lambda step: {"ada__p": min(1.0, step / 1000) * 1.3}, None,
        ("augmentation probability stands at", "more data", "--init-from"), range(2500)),
    "memorisation": (3000, None, judged(**COPIED),
        ("copies training images", "8% of the samples", "neighbours.png"), [1000]),
}  # fmt: skip
SILENT: dict[str, Any] = {
    "a healthy margin where no margin counts as blind": (2000, None, None, (), None,
        {"config": WatchConfig(margin_low=(-1.0, -1.0))}),
    "noise near the floor": (20_000, None, noisy),
    "a distance of 1.2 times the best": (4000, always(**LARGE), judged(lambda step: 0.6 if step <= 1500 else 0.72)),
    "worse, but the discriminator gains nothing: noise, or a new stage": (4000, None, WORSE),
    "the sign, of pairs": (2000, always(**SURE), None, (), None, RELATIVISTIC),
    "a held-out logit overrules the sign": (2000, always(**SURE), judged(logits__held_out=1.9)),
    "an early generator gets better from there": (4000, None, judged(lambda step: 100 / step, 0.15)),
    "varied because it was noise, and getting better": (4000, None,
        judged(lambda step: 100 / step, lambda step: 0.9 if step < 1000 else 0.45)),
    "one spike": (4000, lambda step: {"gradient_norm__generator": 500.0 if step == 3000 else 10.0}, None),
    "copies once": (5000, None, judged(memorised__pixels=lambda step: 0.08 if step == 2000 else 0.01,
        memorised_p__pixels=lambda step: 1e-9 if step == 2000 else 0.5)),
    "evaluations that do not agree in a row": (8000, None, judged(
        memorised__pixels=0.05, memorised_p__pixels=lambda step: 0.02 if step % 1000 else 1e-4,
        logits__real=1.0, logits__fake=-1.0, logits__held_out=lambda step: 0.2 if step % 1000 else -0.5)),
}  # fmt: skip


@pytest.mark.parametrize("case", [*TOLD.values(), *SILENT.values()], ids=[*TOLD, *SILENT])
def test_what_is_said(case):
    defaults: list[Any] = [(), None, {}]
    steps, change, evaluate, words, at, other = list(case) + defaults[len(case) - 3 :]
    said = run(Watch(**({"config": WatchConfig()} | other)), 0, steps, change, evaluate)
    assert (only(said, *words) in (at or range(steps + 1))) if words else said == []


def test_held_out_logits_stand_against_those_of_the_log_where_an_evaluation_has_no_others():
    watch = Watch(WatchConfig())
    run(watch, 0, 1000, None, lambda _: evaluation(logits__held_out=-0.05))
    real, fake = watch.means["logits/real"], watch.means["logits/fake"]
    assert watch.figures["overfit"] == pytest.approx((real + 0.05) / (real - fake))
    assert watch.figures["overfit"] == pytest.approx(0.5, abs=0.06)
    blind = Watch(WatchConfig())
    run(blind, 0, 1000, lambda _: {"logits__real": 0.1, "logits__fake": -0.1}, lambda _: evaluation(logits__held_out=9))
    assert "overfit" not in blind.figures


@pytest.mark.parametrize(("factor", "word"), [(100.0, "explodes"), (0.01, "vanishes")])
@pytest.mark.parametrize("name", ["gradient_norm/generator", "gradient_norm/discriminator", "path_length/mean"])
def test_norms_that_jump(name, factor, word):
    watch = Watch(WatchConfig())
    usual = {name.replace("/", "__"): HEALTHY[name]}
    assert run(watch, 0, 4000, lambda _: usual) == []
    jumped = {name.replace("/", "__"): HEALTHY[name] * factor}
    assert 4050 < only(run(watch, 4000, 4500, lambda _: jumped), word, "Try:") <= 4300


def test_a_warning_comes_again_only_after_recovery():
    watch = Watch(WatchConfig())

    def margin(value):
        return lambda _: {"logits__real": value, "logits__fake": 0.0, "gradient_norm__generator": 10.0}

    only(run(watch, 0, 2000, margin(9.0)), "runs away")
    assert run(watch, 2000, 4000, margin(6.5)) == []  # between the thresholds
    assert run(watch, 4000, 6000, margin(9.0)) == []
    assert run(watch, 6000, 9000, margin(2.0)) == []
    assert watch.active == []
    only(run(watch, 9000, 14000, margin(9.0)), "runs away")


def test_the_means_have_their_half_life_in_images():
    watch = Watch(WatchConfig(memory=0.25))
    watch.observe(1, {"images": 1000, "logits/real": 0.0, "logits/fake": 0.0})
    watch.observe(2, {"images": 1100, "logits/real": 4.0, "logits/fake": 1.0})
    keep = 0.5 ** (100 / (0.25 * 1100))
    assert watch.means["logits/margin"] == pytest.approx(3 * (1 - keep), rel=1e-12)
    assert watch.means["logits/fake"] == pytest.approx(1 - keep, rel=1e-12)
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
    straight = run(Watch(WatchConfig()), 0, 6000, failing, worsening)
    assert len(straight) >= 4
    for stop in (600, 1500, 2000, 3300):
        first = Watch(WatchConfig())
        said = run(first, 0, stop // EVERY * EVERY, failing, worsening)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = Watch(WatchConfig())
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert second.state_dict() == first.state_dict()
        assert said + run(second, stop // EVERY * EVERY, 6000, failing, worsening) == straight
        assert second.active is not first.active


def test_values_that_are_not_numbers_are_passed_over_and_switched_off_it_is_silent():
    watch = Watch(WatchConfig())
    run(watch, 0, 1000, None, improving)
    before = watch.state_dict()
    for bad in (math.nan, math.inf, -math.inf):
        row = dict.fromkeys(HEALTHY, bad) | {"images": 32_001}
        assert watch.observe(1001, row) == []
        assert watch.observe(1001, {"val/frechet/pixels": bad, "val/logits/held_out": bad}) == []
    assert watch.state_dict() == before | {"images": 32_001.0}
    assert watch.observe(1002, {"images": 32_100, "gradient_norm/generator": 0.0}) == []
    assert watch.observe(1003, {}) == []
    assert run(Watch(WatchConfig(on=False)), 0, 3000, failing, worsening) == []
