"""What the watch says of healthy and of failing trainings: real curves in short, and simulated ones."""

import math

import pytest
import torch

from duetgan.training.gan.diagnostics import Watch, WatchConfig
from duetgan.training.gan.losses import OBJECTIVES
from duetgan.utils.errors import UserError
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


def test_noisy_evaluations_near_their_floor_are_no_failure():
    def noisy(step):
        draw = numpy_generator(1, "test watch", step).standard_normal(2)
        return evaluation(0.05 * (1 + 0.1 * draw[0]), 0.6 * (1 + 0.08 * draw[1]), memorised__pixels=0.012,
                          memorised_p__pixels=0.3, logits__held_out=0.55)  # fmt: skip

    assert run(Watch(WatchConfig()), 0, 20_000, None, noisy) == []


def test_nothing_is_said_while_warming_up_and_then_at_once():
    blind = {"logits__real": 0.01, "logits__fake": 0.0}
    watch = Watch(WatchConfig(warmup_kimg=40.0))
    step = only(run(watch, 0, 3000, lambda _: blind), "tells nothing apart", "lower loss.r1_gamma")
    assert step == 1250  # 40 thousand images


def test_gamma_too_large():
    """As a real run with gamma 1000: margin 0.01, loss at 2 ln 2 and above."""
    change = {"logits__real": -0.09, "logits__fake": -0.1, "logits__real_sign": -0.9, "loss__discriminator": 1.45}
    only(run(Watch(WatchConfig()), 0, 2000, lambda _: change, improving), "tells nothing apart", "1.39 is chance level")
    relativistic = Watch(WatchConfig(), OBJECTIVES["relativistic"])
    only(run(relativistic, 0, 2000, lambda _: change), "tells nothing apart", "0.693 is chance level")


def test_gamma_too_small_by_the_margin():
    def change(step):
        return {"logits__real": step / 200, "logits__fake": -step / 200, "loss__discriminator": 0.02}

    said = run(Watch(WatchConfig()), 0, 2000, change)
    step = only(said, "runs away", "D(real) - D(fake) is", "gamma is too small", "raise loss.r1_gamma")
    assert 800 < step < 1100  # margin 8 at step 800, seen in the mean a little later


def test_gamma_too_small_by_the_distance():
    """As a real run with gamma 0: distances rise again while the discriminator gains."""

    def change(step):
        return {"logits__real": step / 1500, "logits__fake": -step / 1500}

    def worse(step):
        return evaluation(distance=0.9 - step / 5000 if step <= 1500 else 0.6 * 1.3, diversity=0.37)

    step = only(run(Watch(WatchConfig()), 0, 4000, change, worse), "runs away", "distance went from 0.6 to 0.78")
    assert step == 2500  # the second evaluation that is worse
    hardly = run(Watch(WatchConfig()), 0, 4000, change, lambda step: evaluation(0.6 if step <= 1500 else 0.72))
    assert hardly == []  # 1.2 times the best
    assert (
        run(Watch(WatchConfig()), 0, 4000, None, worse) == []
    )  # the discriminator gains nothing: noise, or a new stage


def test_overfitting_by_held_out_logits():
    def drifting(step):
        return evaluation(0.1, logits__held_out=0.6 - step / 4000, logits__real=0.6, logits__fake=-0.7)

    said = run(Watch(WatchConfig()), 0, 6000, None, drifting)
    step = only(said, "overfits", "held-out images look", "ada.mode to adaptive")
    assert step == 3500  # r_v is 0.5 at 2,600; the second evaluation in a row


def test_held_out_logits_stand_against_those_of_the_log_where_an_evaluation_has_no_others():
    watch = Watch(WatchConfig())
    run(watch, 0, 1000, None, lambda _: evaluation(logits__held_out=-0.05))
    real, fake = watch.means["logits/real"], watch.means["logits/fake"]
    assert watch.figures["overfit"] == pytest.approx((real + 0.05) / (real - fake))
    assert watch.figures["overfit"] == pytest.approx(0.5, abs=0.06)
    blind = Watch(WatchConfig())
    run(blind, 0, 1000, lambda _: {"logits__real": 0.1, "logits__fake": -0.1}, lambda _: evaluation(logits__held_out=9))
    assert "overfit" not in blind.figures


def test_overfitting_by_the_sign_where_nothing_is_held_out():
    def change(_):
        return {"logits__real": 2.0, "logits__fake": -2.0, "logits__real_sign": 1.1}

    only(run(Watch(WatchConfig()), 0, 2000, change), "overfits", "of the training images real")
    assert run(Watch(WatchConfig(), OBJECTIVES["relativistic"]), 0, 2000, change) == []
    # a held-out logit overrules the sign
    assert run(Watch(WatchConfig()), 0, 2000, change, lambda _: evaluation(logits__held_out=1.9)) == []


def test_an_overfitting_discriminator_that_runs_away_is_told_once():
    def change(step):
        return {"logits__real": step / 500, "logits__fake": -step / 500}

    def overfitting(step):
        return evaluation(0.1 * max(1, step / 1000), logits__held_out=-step / 500)

    only(run(Watch(WatchConfig()), 0, 4000, change, overfitting), "overfits")


def test_mode_collapse():
    stuck = run(Watch(WatchConfig()), 0, 3000, None, lambda _: evaluation(1.0, 0.15))
    assert only(stuck, "collapses", "15% of the variety") == 1000  # the first could still be on its way down
    total = run(Watch(WatchConfig()), 0, 1000, None, lambda step: evaluation(100 / step, 0.05))
    assert only(total, "collapses") == 650  # no excuse counts; the end of the warm-up
    blurry = run(Watch(WatchConfig()), 0, 4000, None, lambda step: evaluation(100 / step, 0.15))
    assert blurry == []  # an early generator gets better from there

    def falling(step):
        return evaluation(0.1 if step < 2000 else 0.14, 0.7 if step < 2000 else 0.4)

    assert only(run(Watch(WatchConfig()), 0, 4000, None, falling), "collapses", "40%", "best was 70%") == 2000
    early_noise = run(Watch(WatchConfig()), 0, 4000, None, lambda s: evaluation(100 / s, 0.9 if s < 1000 else 0.45))
    assert early_noise == []  # varied because it was noise, and getting better


def test_augmentation_at_its_end():
    said = run(Watch(WatchConfig()), 0, 6000, lambda step: {"ada__p": min(1.0, step / 1000) * 1.3})
    assert only(said, "augmentation probability stands at", "more data", "--init-from") < 2500


@pytest.mark.parametrize(("factor", "word"), [(100.0, "explodes"), (0.01, "vanishes")])
@pytest.mark.parametrize("name", ["gradient_norm/generator", "gradient_norm/discriminator", "path_length/mean"])
def test_norms_that_jump(name, factor, word):
    watch = Watch(WatchConfig())
    usual = {name.replace("/", "__"): HEALTHY[name]}
    assert run(watch, 0, 4000, lambda _: usual) == []
    jumped = {name.replace("/", "__"): HEALTHY[name] * factor}
    assert 4050 < only(run(watch, 4000, 4500, lambda _: jumped), word, "Try:") <= 4300


def test_one_spike_is_no_explosion():
    watch = Watch(WatchConfig())
    spike = {3000: 50.0}
    assert run(watch, 0, 4000, lambda step: {"gradient_norm__generator": 10 * spike.get(step, 1.0)}) == []


def test_memorisation():
    copied = {"memorised__pixels": 0.08, "memorised_p__pixels": 1e-9}
    said = run(Watch(WatchConfig()), 0, 3000, None, lambda _: evaluation(0.1, **copied))
    assert only(said, "copies training images", "8% of the samples", "neighbours.png") == 1000
    once = run(Watch(WatchConfig()), 0, 5000, None, lambda step: evaluation(0.1, **copied if step == 2000 else {
        "memorised__pixels": 0.01, "memorised_p__pixels": 0.5}))  # fmt: skip
    assert once == []


def test_evaluations_must_agree_in_a_row():
    def now_and_then(step):
        bad = step % 1000 == 0
        return evaluation(0.1, memorised__pixels=0.05, memorised_p__pixels=1e-4 if bad else 0.02,
                          logits__real=1.0, logits__fake=-1.0, logits__held_out=-0.5 if bad else 0.2)  # fmt: skip

    assert run(Watch(WatchConfig()), 0, 8000, None, now_and_then) == []


def test_a_warning_comes_again_only_after_recovery():
    watch = Watch(WatchConfig())

    def margin(value):
        return lambda _: {"logits__real": value, "logits__fake": 0.0, "gradient_norm__generator": 10.0}

    only(run(watch, 0, 2000, margin(9.0)), "runs away")
    assert run(watch, 2000, 4000, margin(6.5)) == []  # between the thresholds
    assert run(watch, 4000, 6000, margin(9.0)) == []
    assert run(watch, 6000, 9000, margin(2.0)) == []
    assert watch.said == []
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
        assert second.said is not first.said


def test_values_that_are_not_numbers_are_passed_over():
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


def test_switched_off_it_is_silent():
    assert run(Watch(WatchConfig(on=False)), 0, 3000, failing, worsening) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"warmup_kimg": -1.0}, "warmup_kimg"),
        ({"memory": 0.0}, "memory"),
        ({"patience": 0}, "patience"),
        ({"worse": 1.0}, "worse"),
        ({"norm_factor": 0.5}, "norm_factor"),
        ({"diversity_fall": 1.0}, "diversity_fall"),
        ({"margin_low": (0.2, 0.1)}, "^margin_low 0.2, 0.1"),
        ({"margin_high": (1.0, 2.0)}, "^margin_high 1.0, 2.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, told):
    with pytest.raises(UserError, match=told):
        WatchConfig(**changes)
