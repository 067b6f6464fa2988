import math

import pytest
import torch

from training.engine.preflight import schedule_text
from training.optim.config import cosine
from training.optim.updater import OptimizerConfig
from utils.errors import UserError

PAPER = [(2e-4, 5e-5), (0.9, 0.99), (0.05, 0.005), (150.0, 15.0), (0.0, 0.55), (0.0, 5e6)]  # start, end


@pytest.mark.parametrize(("start", "end"), PAPER)
def test_ends_are_met_exactly(start, end):
    for images in (-5, 0):
        assert cosine(start, end, images, 20_000_000) == start
    for images in (20_000_000, 20_000_001, 250_000_000):
        assert cosine(start, end, images, 20_000_000) == end


@pytest.mark.parametrize(("start", "end"), PAPER)
@pytest.mark.parametrize(
    ("progress", "left"),
    [(1 / 4, (2 + math.sqrt(2)) / 4), (1 / 3, 3 / 4), (1 / 2, 1 / 2), (2 / 3, 1 / 4), (3 / 4, (2 - math.sqrt(2)) / 4)],
)
def test_half_a_cosine_between(start, end, progress, left):
    images = round(12_000_000 * progress)
    assert cosine(start, end, images, 12_000_000) == pytest.approx(left * start + (1 - left) * end, rel=1e-12)


def test_a_constant_stays_and_no_length_is_the_end_at_once():
    assert {cosine(0.3, 0.3, images, 50) for images in range(60)} == {0.3}
    for over in (0, -1):
        assert cosine(1.0, 2.0, 0, over) == 2.0


# --- a whole training's rates against torch's schedulers


def torch_rates(make, steps, *, lr=0.4, momentum=0.9):
    """(rate, momentum) of every update as a scheduler of torch sets them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=momentum)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("steps", "rise"), [(100, 0.3), (37, 0.25), (10, 0.5)])
def test_one_cycle_is_torchs(steps, rise):
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            0.4,
            total_steps=steps + 1,  # torch's raises when asked for one more than there are
            pct_start=rise * steps / (steps + 1),
            div_factor=20,
            final_div_factor=50,
            base_momentum=0.8,
            max_momentum=0.97,
        ),
        steps,
    )
    config = OptimizerConfig(
        lr=0.4,
        schedule="one-cycle",
        pct_start=rise * steps / (steps + 1),
        cycle_start=1 / 20,
        final_lr=1 / 1000,
        cycle_momentum=[0.97, 0.8],
    )
    for step, (rate, momentum) in enumerate(expected):
        assert config.lr_at(step, steps + 1) == pytest.approx(rate, rel=1e-9)
        assert config.momentum_at(step, steps + 1) == pytest.approx(momentum, rel=1e-9)
    assert config.lr_at(steps, steps + 1) == pytest.approx(0.4 / 1000)
    assert config.lr_at(steps + 20, steps + 1) == pytest.approx(0.4 / 1000)  # never up again


def test_one_cycle_of_a_training_of_one_step_and_under_warm_up():
    config = OptimizerConfig(lr=1.0, schedule="one-cycle", cycle_start=0.1)
    assert config.lr_at(0, 1) == pytest.approx(0.0)  # the end: there is no room for more
    assert config.momentum_at(0, 10) is None
    warmed = OptimizerConfig(lr=1.0, schedule="one-cycle", cycle_start=0.1, warmup_steps=4)
    for step in range(20):
        assert warmed.lr_at(step, 20) == pytest.approx(config.lr_at(step, 20) * min(1, (step + 1) / 4))


def test_step_is_torchs_multi_step():
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9, 10], gamma=0.2), 20)
    config = OptimizerConfig(lr=0.4, schedule="step", milestones=[5, 9, 10], gamma=0.2)
    assert [config.lr_at(step, 20) for step in range(20)] == pytest.approx([rate for rate, _ in expected], rel=1e-12)
    warmed = OptimizerConfig(lr=0.4, schedule="step", milestones=[5], gamma=0.2, warmup_steps=4)
    assert [warmed.lr_at(step, 20) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.08])


@pytest.mark.parametrize(("every", "steps"), [(1, 12), (4, 20), (7, 20), (30, 20)])
def test_step_every_is_torchs_step(every, steps):
    """N10."""
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.2), steps)
    config = OptimizerConfig(lr=0.4, schedule="step", step_every=every, gamma=0.2)
    rates = [config.lr_at(step, steps) for step in range(steps)]
    assert rates == pytest.approx([rate for rate, _ in expected], rel=1e-12)


def test_linear_is_torchs():
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20), 20)
    config = OptimizerConfig(lr=0.4, schedule="linear", final_lr=0.1)
    assert [config.lr_at(step, 20) for step in range(20)] == pytest.approx([rate for rate, _ in expected], rel=1e-12)


def test_the_rate_is_scaled_with_the_global_batch():
    config = OptimizerConfig(lr=0.1, lr_batch_size=256, warmup_steps=2)
    scaled = config.for_batch(1024)
    assert [scaled.lr_at(step, 10) for step in range(3)] == pytest.approx([0.2, 0.4, 0.4])
    assert scaled.for_batch(64) == scaled  # once
    assert config.lr == 0.1
    assert OptimizerConfig(lr=0.1).for_batch(1024).lr == 0.1
    assert schedule_text(config, 10, 1024).startswith("adam, lr 0.4 (= 0.1 x batch 1024 / 256) after 2 warm-up steps")
    assert "x batch" not in schedule_text(OptimizerConfig(), 10, 1024)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"schedule": "step"}, "needs milestones, .*, or step_every"),
        ({"schedule": "step", "milestones": [3], "step_every": 2}, "needs milestones, .*, or step_every"),
        ({"milestones": [3, 2]}, "rising"),
        ({"milestones": [0]}, r"milestones\[0\] 0: must be a whole number above 0"),
        ({"gamma": 0.0}, "gamma"),
        ({"pct_start": 1.0}, "pct_start"),
        ({"cycle_start": 0.0}, "cycle_start"),
        ({"cycle_momentum": [0.9]}, "cycle_momentum"),
        ({"cycle_momentum": [0.9, 1.0]}, "cycle_momentum"),
        ({"name": "sgd", "momentum": 0.0, "cycle_momentum": [0.9, 0.8]}, "momentum is 0"),
        ({"name": "sgd", "beta2_final": 0.99}, "beta2_final is adam's and adamw's; leave it out with sgd"),
        ({"lr_batch_size": 0}, "lr_batch_size"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value"),
        ({"clip_adaptive": 0.0}, "clip_adaptive 0.0: must be a number above 0, or null"),
        ({"clip_value": -1.0}, "clip_value -1.0: must be a number above 0, or null"),
    ],
)
def test_settings_that_make_no_sense(wrong, told):
    with pytest.raises(UserError, match=told):
        OptimizerConfig(**wrong)
