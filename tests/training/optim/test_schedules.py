import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from duetgan.training.engine.preflight import schedule_text
from duetgan.training.optim.config import cosine
from duetgan.training.optim.updater import OptimizerConfig

PAPER = [(2e-4, 5e-5), (0.9, 0.99), (0.05, 0.005), (150.0, 15.0), (0.0, 0.55), (0.0, 5e6)]  # start, end


@pytest.mark.parametrize(("start", "end"), PAPER)
def test_half_a_cosine_whose_ends_are_met_exactly(start, end):
    for images in (-5, 0):
        assert cosine(start, end, images, 12_000_000) == start
    for images in (12_000_000, 12_000_001, 250_000_000):
        assert cosine(start, end, images, 12_000_000) == end
    for progress, left in ((1 / 4, (2 + math.sqrt(2)) / 4), (1 / 3, 3 / 4), (1 / 2, 1 / 2), (2 / 3, 1 / 4)):
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
    share = rise * steps / (steps + 1)  # torch's raises when asked for one step more than there are
    factors: dict[str, Any] = {"div_factor": 20, "final_div_factor": 50, "base_momentum": 0.8, "max_momentum": 0.97}
    expected = torch_rates(lambda sgd: lr_scheduler.OneCycleLR(sgd, 0.4, steps + 1, pct_start=share, **factors), steps)
    cycle: dict[str, Any] = {"cycle_start": 1 / 20, "final_lr": 1 / 1000, "cycle_momentum": [0.97, 0.8]}
    config = OptimizerConfig(lr=0.4, schedule="one-cycle", pct_start=share, **cycle)
    for step, (rate, momentum) in enumerate(expected):
        assert config.lr_at(step, steps + 1) == pytest.approx(rate, rel=1e-9)
        assert config.momentum_at(step, steps + 1) == pytest.approx(momentum, rel=1e-9)
    for step in (steps, steps + 20):  # never up again
        assert config.lr_at(step, steps + 1) == pytest.approx(0.4 / 1000)


def test_one_cycle_of_a_training_of_one_step_and_under_warm_up():
    config = OptimizerConfig(lr=1.0, schedule="one-cycle", cycle_start=0.1)
    assert config.lr_at(0, 1) == pytest.approx(0.0)  # the end: there is no room for more
    assert config.momentum_at(0, 10) is None
    warmed = OptimizerConfig(lr=1.0, schedule="one-cycle", cycle_start=0.1, warmup_steps=4)
    for step in range(20):
        assert warmed.lr_at(step, 20) == pytest.approx(config.lr_at(step, 20) * min(1, (step + 1) / 4))


SCHEDULERS: list[tuple[dict[str, Any], Any]] = [
    ({"schedule": "step", "milestones": [5, 9, 10]}, lambda sgd: lr_scheduler.MultiStepLR(sgd, [5, 9, 10], gamma=0.2)),
    ({"schedule": "step", "step_every": 1}, lambda sgd: lr_scheduler.StepLR(sgd, 1, gamma=0.2)),
    ({"schedule": "step", "step_every": 7}, lambda sgd: lr_scheduler.StepLR(sgd, 7, gamma=0.2)),
    ({"schedule": "step", "step_every": 30}, lambda sgd: lr_scheduler.StepLR(sgd, 30, gamma=0.2)),
    ({"schedule": "linear", "final_lr": 0.1}, lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.1, total_iters=20)),
    ({"schedule": "cosine", "final_lr": 0.1}, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 20, eta_min=0.04)),
]


@pytest.mark.parametrize(("options", "scheduler"), SCHEDULERS)
def test_others_are_torchs_behind_a_linear_warm_up(options, scheduler):
    """N10."""
    expected = [rate for rate, _ in torch_rates(scheduler, 20)]
    config = OptimizerConfig(lr=0.4, gamma=0.2, **options)
    assert [config.lr_at(step, 20) for step in range(20)] == pytest.approx(expected, rel=1e-12)
    warmed = config.changed(warmup_steps=4)
    assert [warmed.lr_at(step, 20) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    if options["schedule"] == "step":
        assert warmed.lr_at(11, 20) == config.lr_at(11, 20)
    else:  # what is left after the warm-up is the decay's
        assert warmed.lr_at(12, 20) == pytest.approx(config.lr_at(10, 20))
        assert warmed.lr_at(30, 20) == pytest.approx(0.04)  # never up again


def test_the_rate_is_scaled_with_the_global_batch():
    config = OptimizerConfig(lr=0.1, lr_batch_size=256, warmup_steps=2)
    scaled = config.for_batch(1024)
    assert [scaled.lr_at(step, 10) for step in range(3)] == pytest.approx([0.2, 0.4, 0.4])
    assert scaled.for_batch(64) == scaled  # once
    assert config.lr == 0.1
    assert OptimizerConfig(lr=0.1).for_batch(1024).lr == 0.1
    assert schedule_text(config, 10, 1024).startswith("adam, lr 0.4 (= 0.1 x batch 1024 / 256) after 2 warm-up steps")
    assert "x batch" not in schedule_text(OptimizerConfig(), 10, 1024)


def test_a_warm_up_longer_than_the_run_is_told():
    """J11."""
    config = OptimizerConfig(warmup_steps=100)
    assert "; warning: the run of 50 steps ends within the warm-up: make" in schedule_text(config, 50, 8)
    assert "warning" not in schedule_text(config, 101, 8)
