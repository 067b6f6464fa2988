import copy
import math
from typing import Any

import pytest
import schedulefree  # type: ignore[import-untyped]
import torch
from torch import nn

from training.optim.config import OptimizerConfig
from training.optim.ema import EMA
from training.optim.updater import Precision, Updater
from utils.errors import UserError
from utils.seeding import forked, generator

CPU = torch.device("cpu")
OPTIONS: list[dict[str, Any]] = [
    {"name": "schedulefree-sgd", "lr": 0.1},
    {"name": "schedulefree-sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "warmup_steps": 3},
    {"name": "schedulefree-adamw", "lr": 0.01},
    {"name": "schedulefree-adamw", "lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "warmup_steps": 3},
]


def build(**options):
    with forked(0, "init", "schedule free"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    return model, Updater(model, OptimizerConfig(**options), Precision("fp32", CPU), 100)


def set_gradients(model, step, bad=False):
    for index, parameter in enumerate(model.parameters()):
        keyed = generator(0, "gradient", step, index)
        parameter.grad = torch.randn(parameter.shape, generator=keyed, dtype=torch.float64)
    if bad:
        model[0].bias.grad[0] = math.nan


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


@pytest.mark.parametrize("options", OPTIONS)
def test_both_points_are_the_packages(options):
    model, updater = build(**options)
    other, _ = build(**options)
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


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_masked_step_changes_nothing(options, good_steps):
    model, updater = build(**options)
    untouched, other = build(**options)
    for step in range(good_steps):
        for m, u in ((model, updater), (untouched, other)):
            set_gradients(m, step)
            u.step(step)
    set_gradients(model, 50, bad=True)
    assert updater.step(good_steps).skipped == 1
    torch.testing.assert_close(dict(model.state_dict()), dict(untouched.state_dict()), rtol=0, atol=0)
    for step in range(good_steps, good_steps + 2):
        for m, u in ((model, updater), (untouched, other)):
            set_gradients(m, step)
            u.step(step)
    torch.testing.assert_close(dict(model.state_dict()), dict(untouched.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(updater.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_restored_one_goes_on_to_the_bit(options, tmp_path):
    model, updater = build(**options)
    for step in range(3):
        set_gradients(model, step)
        updater.step(step)
    torch.save({"model": model.state_dict(), "updater": updater.state_dict()}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    other, restored = build(**options)
    other.load_state_dict(saved["model"])
    restored.load_state_dict(saved["updater"])
    for step in range(3, 6):
        for m, u in ((model, updater), (other, restored)):
            set_gradients(m, step)
            u.step(step)
    averages = restored.average(other.parameters()), updater.average(model.parameters())
    torch.testing.assert_close(*averages, rtol=0, atol=0)
    torch.testing.assert_close(restored.state_dict(), updater.state_dict(), rtol=0, atol=0)


def test_the_networks_average_is_the_optimizers():
    model, updater = build(**OPTIONS[3])
    ema = EMA(model, buffers="average")
    start = copy.deepcopy(model)
    for step in range(3):
        set_gradients(model, step, bad=step == 2)
        update = updater.step(step)
        ema.update(model, 0.9, update.skipped, updater.average(model.parameters()))
    expected = updater.average(model.parameters())
    torch.testing.assert_close([p.detach() for p in ema.model.parameters()], expected, rtol=0, atol=0)
    assert all(p.isfinite().all() for p in ema.model.parameters())
    assert not torch.equal(ema.model[0].weight, start[0].weight)
    assert not torch.equal(ema.model[0].weight, model[0].weight)


def test_what_is_frozen_is_its_own_average():
    with forked(0, "init", "schedule free"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    updater = Updater(model, OptimizerConfig(**OPTIONS[0]), Precision("fp32", CPU), 100)
    for step in range(2):  # after one step both points are the same
        set_gradients(model[1], step)
        updater.step(step)
    found, frozen = updater.average(model.parameters()), next(model.parameters())
    assert found is not None
    assert torch.equal(found[0], frozen)
    assert not torch.equal(found[2], list(model.parameters())[2])
    other, plain = build(name="sgd", lr=0.1)
    assert plain.average(other.parameters()) is None


def test_the_scaler_of_fp16_masks_it_too():
    model = nn.Linear(3, 1)
    mixed = Precision("fp16", CPU)
    updater = Updater(model, OptimizerConfig(**OPTIONS[2]), mixed, 100)
    before = model.weight.detach().clone()
    for factor, moved in ((math.inf, False), (1.0, True)):
        updater.zero_grad()
        mixed.backward(model(torch.ones(2, 3)).mean() * factor)
        assert updater.step(0).skipped == float(not moved)
        mixed.update_scale()
        assert torch.equal(model.weight, before) == (not moved)
    assert updater.optimizer.param_groups[0]["counters"][0] == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"schedule": "cosine"}, "set schedule constant"),
        ({"beta2_final": 0.99}, "beta2_final is adam's"),
        ({"betas": [0.0, 0.99]}, "the first of betas above 0"),
        ({"name": "schedulefree-sgd", "momentum": 0.0}, "needs momentum above 0"),
    ],
)
def test_settings_that_contradict_it(wrong, told):
    with pytest.raises(UserError, match=told):
        OptimizerConfig(**({"name": "schedulefree-adamw"} | wrong))
