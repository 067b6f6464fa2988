"""Muon's step against torch's own optimizers on reshaped weights, its mask, and its way into a checkpoint and back."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from training.classifier.config import ClassifierConfig
from training.gan.config import GanConfig
from training.optim.config import OptimizerConfig
from training.optim.optimizers import Muon
from training.optim.updater import Precision, Updater
from utils.errors import UserError
from utils.seeding import forked, generator

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"name": "muon", "lr": 0.1, "weight_decay": 0.02}
OPTIONS |= {"momentum": 0.6, "sgd_momentum": 0.8, "ns_steps": 3}


def build(layout=torch.contiguous_format, precision="fp32", **options):
    with forked(0, "init", "test muon"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)).double()
    model = model.to(memory_format=layout)
    config = OptimizerConfig(**(OPTIONS | options))
    return model, Updater(model, config, Precision(precision, CPU), 100, head=model[3].parameters())


def set_gradients(model, step, bad=False):
    for index, parameter in enumerate(model.parameters()):
        keyed = generator(0, "gradient", step, index)
        grad = torch.randn(parameter.shape, generator=keyed, dtype=torch.float64)
        parameter.grad = torch.empty_like(parameter).copy_(grad)  # in the parameter's memory format, as backward gives
    if bad:
        model[0].weight.grad[0, 0, 0, 0] = math.nan


def steps(model, updater, first, count):
    for step in range(first, first + count):
        set_gradients(model, step)
        updater.step(step)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("unit", [False, True])
def test_a_step_is_torchs_own_on_the_reshaped_weights(layout, unit):
    model, updater = build(layout, unit_filters=unit)
    assert isinstance(updater.optimizer, Muon)
    other, _ = build()
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


@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(good_steps):
    (model, updater), (untouched, other) = build(), build()
    for m, u in ((model, updater), (untouched, other)):
        steps(m, u, 0, good_steps)
    set_gradients(model, 50, bad=True)
    assert updater.step(good_steps).skipped == 1
    for m, u in ((model, updater), (untouched, other)):
        steps(m, u, good_steps, 2)
    torch.testing.assert_close(dict(model.state_dict()), dict(untouched.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(updater.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_the_loss_scalers_overflow_is_masked_too():
    model, updater = build(precision="fp16")
    before = copy.deepcopy(model.state_dict())
    updater.precision.scale()  # as a backward pass would
    set_gradients(model, 0, bad=True)
    assert updater.step(0).skipped == 1
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_restored_one_goes_on_to_the_bit(tmp_path):
    model, updater = build(torch.channels_last)
    steps(model, updater, 0, 3)
    torch.save({"model": model.state_dict(), "updater": updater.state_dict()}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    other, restored = build(torch.channels_last)
    other.load_state_dict(saved["model"])
    restored.load_state_dict(saved["updater"])
    for m, u in ((model, updater), (other, restored)):
        steps(m, u, 3, 3)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(restored.state_dict(), updater.state_dict(), rtol=0, atol=0)
    updater.reset()
    assert all(state["momentum_buffer"].eq(0).all() for state in updater.optimizer.state.values())
    assert isinstance(updater.optimizer, Muon)
    assert updater.optimizer.head == {id(p) for p in model[3].parameters()}


def test_what_is_refused():
    assert ClassifierConfig(optimizer=OptimizerConfig(name="muon")).optimizer.momentum == 0.9
    with pytest.raises(UserError, match="muon is for classifiers: take adam"):
        GanConfig(discriminator_optimizer=OptimizerConfig(name="muon"))
    with pytest.raises(UserError, match="cycle_momentum changes a momentum"):
        OptimizerConfig(name="muon", momentum=0.0, cycle_momentum=[0.9, 0.8])
    with pytest.raises(UserError, match=r"optimizer\.ns_steps 100"):
        OptimizerConfig(name="muon", ns_steps=100)


def test_scales_are_no_matrices():
    """ConvNeXt's layer_scale [C, 1, 1]: orthogonalised, it would be 1 instead of 1e-6."""
    with forked(0, "init", "test muon"):
        model = torch.nn.ParameterDict({"scale": torch.full((6, 1, 1), 1e-6), "place": torch.zeros(1, 6)})
    updater = Updater(model, OptimizerConfig(**OPTIONS), Precision("fp32", CPU), 100)
    sgd = torch.optim.SGD([p.detach().clone() for p in model.values()], lr=0.1, momentum=0.8, nesterov=True)
    for mine, theirs in zip(model.values(), sgd.param_groups[0]["params"], strict=True):
        mine.grad = torch.full_like(mine, 1e-6)
        theirs.grad = mine.grad.clone() + 0.02 * theirs * (theirs.ndim > 1)
    updater.step(0)
    sgd.step()
    for mine, theirs in zip(model.values(), sgd.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
