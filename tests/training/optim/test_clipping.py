import math

import pytest
import torch
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from models.classifier import Classifier, ModelConfig
from training.optim.config import OptimizerConfig
from training.optim.updater import Precision, Updater, clip_adaptively_
from utils.seeding import forked, generator

CPU = torch.device("cpu")


def build():
    with forked(0, "init", "clipping"):
        conv = nn.Conv2d(2, 3, 3)
        model = nn.Sequential(conv, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4)).double()
    with torch.no_grad():
        conv.weight[1] = 0  # a unit whose weights are all zero
    return model


def set_gradients(model, scale=1.0):
    for index, parameter in enumerate(model.parameters()):
        keyed = generator(0, "gradient", index)
        parameter.grad = scale * torch.randn(parameter.shape, generator=keyed, dtype=parameter.dtype)


@pytest.mark.parametrize("factor", [0.01, 0.3])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0])
def test_adaptive_clipping_is_timms(factor, scale):
    ours, theirs = build(), build()
    for model in (ours, theirs):
        set_gradients(model, scale)
    clip_adaptively_(ours.parameters(), factor)
    adaptive_clip_grad(list(theirs.parameters()), clip_factor=factor)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=0)


def test_no_unit_keeps_more_than_its_share():
    model = build()
    set_gradients(model)
    clip_adaptively_([*model.parameters(), nn.Parameter(torch.zeros(1))], 0.01)
    weight = model[0].weight
    ratios = weight.grad.flatten(1).norm(dim=1) / weight.flatten(1).norm(dim=1).clamp(min=1e-3)
    assert ratios.tolist() == pytest.approx([0.01] * 3)


def classifier_update(**clip):
    """The changes of the weights by an update of a classifier at rate 1 without momentum, and its gradients."""
    with forked(0, "init", "clipping"):
        model = Classifier(ModelConfig(stem="small-stride2"), channels=1, classes=3, resolution=8)
    config = OptimizerConfig(name="sgd", lr=1.0, momentum=0.0, **clip)
    updater = Updater(model, config, Precision("fp32", CPU), 10, head=model.network.fc.parameters())
    set_gradients(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    update = updater.step(0)
    total = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
    assert update.norm.item() == pytest.approx(total, rel=1e-4)  # before clipping
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, gradients


def test_the_head_is_not_clipped_adaptively():
    changes, gradients = classifier_update(clip_adaptive=0.01)
    for name, change in changes.items():
        same = torch.allclose(change, gradients[name], atol=1e-6)
        assert same == name.startswith("network.fc."), name


def test_clipping_by_value():
    changes, gradients = classifier_update(clip_value=0.5)
    for name, change in changes.items():
        torch.testing.assert_close(change, gradients[name].clamp(-0.5, 0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip", [{"clip_value": 1.0}, {"clip_adaptive": 0.1}])
def test_clipping_does_not_hide_what_is_not_finite(clip):
    model = build()
    updater = Updater(model, OptimizerConfig(name="sgd", **clip), Precision("fp32", CPU), 10)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model)
    model[0].weight.grad[0, 0, 0, 0] = math.inf
    assert updater.step(0).skipped == 1
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)
