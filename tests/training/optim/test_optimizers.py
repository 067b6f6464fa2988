"""Muon against torch's own optimizers on reshaped weights, schedule-free ones against their package."""

import copy
import math
from typing import Any

import pytest
import schedulefree  # type: ignore[import-untyped]
import torch
from torch import nn

from duetgan.training.optim.config import OptimizerConfig
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


# --- schedule-free


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


def test_the_networks_average_is_the_optimizers():
    model, updater = build_free(**FREE[3])
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
    updater = Updater(model, OptimizerConfig(**FREE[0]), Precision("fp32", CPU), 100)
    for step in range(2):  # after one step both points are the same
        set_gradients(model[1], step)
        updater.step(step)
    found, frozen = updater.average(model.parameters()), next(model.parameters())
    assert found is not None
    assert torch.equal(found[0], frozen)
    assert not torch.equal(found[2], list(model.parameters())[2])
    other, plain = build_free(name="sgd", lr=0.1)
    assert plain.average(other.parameters()) is None
