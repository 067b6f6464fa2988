"""Muon against torch's own optimizers on reshaped weights, schedule-free ones against their package."""

import math
from typing import Any

import pytest
import schedulefree  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.optim import lr_scheduler

from duetgan.training.engine.preflight import schedule_text
from duetgan.training.optim.config import OptimizerConfig, cosine
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.optimizers import Muon
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.seeding import forked, generator

CPU = torch.device("cpu")
MUON: dict[str, Any] = {"name": "muon", "lr": 0.1, "weight_decay": 0.02}
MUON |= {"momentum": 0.6, "sgd_momentum": 0.8, "ns_steps": 3}
FREE: list[dict[str, Any]] = [
    {"name": "schedulefree-sgd", "lr": 0.1},
    {"name": "schedulefree-sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "warmup_steps": 3},
    {"name": "schedulefree-adamw", "lr": 0.01},
    {"name": "schedulefree-adamw", "lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "warmup_steps": 3},
    {"name": "schedulefree-adamw", "lr": 0.01, "eps": 0.1},
]


def build_muon(layout=torch.contiguous_format, precision="fp32", **options):
    with forked(0, "init", "test muon"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)).double()
    model = model.to(memory_format=layout)
    config = OptimizerConfig(**(MUON | options))
    return model, Updater(model, config, Precision(precision, CPU), 100, head=model[3].parameters())


def set_gradients(model, step, bad=False):
    for index, parameter in enumerate(model.parameters()):
        keyed = generator(0, "gradient", step, index)
        grad = torch.randn(parameter.shape, generator=keyed, dtype=torch.float64)
        parameter.grad = torch.empty_like(parameter).copy_(grad)  # in the parameter's memory format, as backward gives
    if bad:
        model[0].weight.grad.fill_(math.nan)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("unit", [False, True])
def test_a_step_is_torchs_own_on_the_reshaped_weights(layout, unit):
    model, updater = build_muon(layout, unit_filters=unit)
    assert isinstance(updater.optimizer, Muon)
    other, _ = build_muon()
    matrix = other[0].weight.detach().flatten(1).clone()
    muon = torch.optim.Muon([matrix], lr=0.1, momentum=0.6, weight_decay=0.02, ns_steps=3)
    norms = [other[0].bias, other[1].weight, other[1].bias, other[3].bias]
    groups = [{"params": [other[3].weight], "weight_decay": 0.02}, {"params": norms, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.8, nesterov=True)
    for step in range(4):
        for m in (model, other):
            set_gradients(m, step)
        matrix.grad = other[0].weight.grad.flatten(1)
        if unit:
            matrix.mul_(2 / matrix.norm())  # the root of four outputs
        updater.step(step)
        muon.step()
        sgd.step()
        torch.testing.assert_close(model[0].weight.detach().flatten(1), matrix, rtol=1e-12, atol=0)
        for index, name in ((0, "bias"), (1, "weight"), (1, "bias"), (3, "weight"), (3, "bias")):
            pair = getattr(model[index], name), getattr(other[index], name)
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_filters_go_by_muon_and_the_rest_by_adam(layout, decay):
    """muon-adam is torch's Muon of the filters larger than 1x1, its updates of a given size, and torch's AdamW."""

    def build():
        with forked(0, "init", "test muon"):
            layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1), nn.Conv2d(5, 1, 3), nn.Linear(16, 5)
            return nn.Sequential(*layers).double()

    model, other = build().to(memory_format=layout), build()
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.5, "muon_rms": 2.0, "betas": [0.0, 0.9], "beta2_final": 0.99}
    options |= {"eps": 0.1, "schedule": "one-cycle", "cycle_start": 0.5, "cycle_momentum": [0.9, 0.4]}
    config = OptimizerConfig(name="muon-adam", weight_decay=decay, **options)
    updater = Updater(model, config, Precision("fp32", CPU), 100)
    matrix = other[0].weight.detach().flatten(1).clone()
    muon = torch.optim.Muon([matrix], lr=0.1, momentum=0.5, weight_decay=decay / 10, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [layer.weight for layer in other[1:]], "weight_decay": decay}]
    groups += [{"params": [layer.bias for layer in other], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.01, eps=0.1)
    for step in range(4):
        for m in (model, other):
            set_gradients(m, step)
        before = matrix.clone()
        matrix.grad = other[0].weight.grad.flatten(1)
        rate = config.lr_at(step, 100)
        for group in adam.param_groups:
            group.update(betas=config.betas_at(step, 100), lr=rate)
        muon.param_groups[0].update(lr=10 * rate, momentum=config.momentum_at(step, 100))
        updater.step(step)
        muon.step()
        adam.step()
        moved = matrix - before + rate * decay * before  # by a matrix near orthogonal
        assert moved.square().mean().sqrt() == pytest.approx(2 * rate, rel=0.3)
        torch.testing.assert_close(model[0].weight.detach().flatten(1), matrix, rtol=1e-12, atol=0)
        for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            if name != "0.weight":
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_a_restored_muon_adam_counts_steps_where_its_parameters_are():
    """Checkpoints are read on the CPU, and CUDA's kernel takes no counts from there."""
    here, there = (nn.Conv2d(3, 4, 3, device=device) for device in ("cpu", "meta"))
    config = OptimizerConfig(name="muon-adam")
    saved, restored = (Updater(model, config, Precision("fp32", CPU), 100) for model in (here, there))
    restored.load_state_dict(saved.state_dict())
    kept = [value for moments in restored.optimizer.state.values() for value in moments.values()]
    assert len(kept) == 4
    assert {value.device.type for value in kept} == {"meta"}


def test_scales_are_no_matrices():
    """ConvNeXt's layer_scale [C, 1, 1]: orthogonalised, it would be 1 instead of 1e-6."""
    with forked(0, "init", "test muon"):
        model = torch.nn.ParameterDict({"scale": torch.full((6, 1, 1), 1e-6), "place": torch.zeros(1, 6)})
    updater = Updater(model, OptimizerConfig(**MUON), Precision("fp32", CPU), 100)
    sgd = torch.optim.SGD([p.detach().clone() for p in model.values()], lr=0.1, momentum=0.8, nesterov=True)
    for mine, theirs in zip(model.values(), sgd.param_groups[0]["params"], strict=True):
        mine.grad = torch.full_like(mine, 1e-6)
        theirs.grad = mine.grad.clone() + 0.02 * theirs * (theirs.ndim > 1)
    updater.step(0)
    sgd.step()
    for mine, theirs in zip(model.values(), sgd.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(mine.detach(), theirs)


def build_free(**options):
    with forked(0, "init", "schedule free"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    return model, Updater(model, OptimizerConfig(**options), Precision("fp32", CPU), 100)


def library(model, config):
    """The package's optimizer over the same groups."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    common = {"lr": config.lr, "warmup_steps": config.warmup_steps}
    if config.name == "schedulefree-sgd":
        return schedulefree.SGDScheduleFree(groups, momentum=config.momentum, **common)
    return schedulefree.AdamWScheduleFree(groups, betas=tuple(config.betas), eps=config.eps, **common)


@pytest.mark.parametrize("options", FREE)
def test_both_points_are_the_packages(options):
    model, updater = build_free(**options)
    other, _ = build_free(**options)
    reference = library(other, updater.config)
    reference.train()
    for step in range(8):
        for m in (model, other):
            set_gradients(m, step)
        updater.step(step)
        reference.step()
        torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-10, atol=1e-12)
        reference.eval()
        found = updater.average(model.parameters())
        torch.testing.assert_close(found, [p.detach() for p in other.parameters()], rtol=1e-9, atol=1e-11)
        reference.train()


def test_what_is_frozen_is_its_own_average():
    model, _ = build_free(**FREE[0])
    model[0].requires_grad_(False)
    updater = Updater(model, OptimizerConfig(**FREE[0]), Precision("fp32", CPU), 100)
    for step in range(2):  # after one step both points are the same
        set_gradients(model[1], step)
        updater.step(step)
    found, frozen = updater.average(model.parameters()), next(model.parameters())
    assert torch.equal(found[0], frozen)
    assert not torch.equal(found[2], list(model.parameters())[2])
    other, plain = build_free(name="sgd", lr=0.1)
    assert plain.average(other.parameters()) is None


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_the_average_moves_unless_the_step_was_masked(skipped):
    model, ema = nn.Linear(2, 2), EMA(nn.Linear(2, 2), buffers="copy")
    before = ema.model.weight.clone()
    ema.update(model, 0.75, torch.tensor(skipped))
    expected = before if skipped else 0.75 * before + 0.25 * model.weight
    torch.testing.assert_close(ema.model.weight, expected, rtol=0, atol=0 if skipped else 1e-7)


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


def test_a_constant_stays_no_length_is_the_end_and_a_long_warm_up_is_told():
    """J11."""
    assert {cosine(0.3, 0.3, images, 50) for images in range(60)} == {0.3}
    for over in (0, -1):
        assert cosine(1.0, 2.0, 0, over) == 2.0
    config = OptimizerConfig(warmup_steps=100)
    assert "; warning: the run ends within the warm-up" in schedule_text(config, 100, 8)
    assert "warning" not in schedule_text(config, 101, 8)


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


def test_one_cycle_at_its_borders_and_the_rate_by_the_batch():
    config = OptimizerConfig(lr=1.0, schedule="one-cycle", cycle_start=0.1)
    assert config.lr_at(0, 1) == pytest.approx(0.0)  # the end: there is no room for more
    assert config.momentum_at(0, 10) is None
    config = OptimizerConfig(lr=1.0, schedule="one-cycle", pct_start=0.5, cycle_start=0.1)
    assert config.lr_at(0, 2) == pytest.approx(1.0)  # the first of two updates is the peak
    config = OptimizerConfig(lr=0.1, lr_batch_size=256, warmup_steps=2)
    scaled = config.for_batch(1024)
    assert [scaled.lr_at(step, 10) for step in range(3)] == pytest.approx([0.2, 0.4, 0.4])
    assert scaled.for_batch(64) == scaled  # once
    assert config.lr == 0.1
    assert OptimizerConfig(lr=0.1).for_batch(1024).lr == 0.1
    assert schedule_text(config, 10, 1024).startswith("adam, lr 0.4 (= 0.1 x batch 1024 / 256) after 2 warm-up steps")
    assert "x batch" not in schedule_text(OptimizerConfig(), 10, 1024)


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
