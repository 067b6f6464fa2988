import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.training.classifier.loss import (
    ClassifierLossConfig,
    Targets,
    class_weight_list,
    classifier_loss,
    sample_weights,
)
from duetgan.training.classifier.network import widen_narrow_maps
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator

CLASSES, N = 5, 6


def batch():
    keyed = generator(0, "loss")
    logits = 3 * torch.randn(N, CLASSES, generator=keyed, dtype=torch.float64)
    labels, others = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 1, 0, 4, 2, 3])
    own = torch.tensor([1.0, 0.3, 0.0, 0.5, 0.9, 0.25])
    return logits, labels, others, own


def slow_loss(logits, labels, others, own, kind, smoothing, weights, counts):
    """Sample by sample and class by class, in Python's floats; sample i counts `counts[i]` times."""
    total = 0.0
    for i in range(len(logits)):
        z = logits[i].tolist()
        raw = [own[i] * (labels[i] == c) + (1 - own[i]) * (others[i] == c) for c in range(len(z))]
        target = [float(t) * (1 - smoothing) + smoothing / len(z) for t in raw]
        if kind == "cross-entropy":
            log_sum = math.log(sum(math.exp(v) for v in z))
            total -= counts[i] * sum(w * t * (v - log_sum) for w, t, v in zip(weights, target, z, strict=True))
        else:
            weight = sum(w * float(t) for w, t in zip(weights, raw, strict=True))
            total += counts[i] * weight * sum((v - t) ** 2 for t, v in zip(target, z, strict=True)) / len(z)
    return total


@pytest.mark.parametrize("kind", ["cross-entropy", "squared-error"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 0.0, 1.0, 3.0]])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("weight", [None, 0.0, 0.3, 1.0, 4.0])  # of synthetic images
def test_losses_against_loops(kind, smoothing, weights, mixed, weight):
    logits, labels, others, own = batch()
    synthetic, partners = [True, False, True, False, False, True], [False, True, True, False, True, False]
    share = own.double() if mixed else torch.ones(N, dtype=torch.float64)
    of_synthetic, found_weights = 1.0 if weight is None else weight, None
    counts = [
        s * (of_synthetic if first else 1.0) + (1 - s) * (of_synthetic if second else 1.0)
        for s, first, second in zip(share.tolist(), synthetic, partners, strict=True)
    ]
    if weight is not None:
        pair = (torch.tensor(partners), share) if mixed else (None, None)
        found_weights = sample_weights(torch.tensor(synthetic), weight, *pair).double()
    targets = Targets(labels, others, own, found_weights) if mixed else Targets(labels, weights=found_weights)
    config = ClassifierLossConfig(kind=kind, label_smoothing=smoothing)
    found = classifier_loss(logits, targets, config, None if weights is None else torch.tensor(weights).double())
    expected = slow_loss(logits, labels, others, share, kind, smoothing, weights or [1.0] * CLASSES, counts)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def slow_label_loss(logits, shown, config, weights):
    """Image by image and label by label, in Python's floats."""
    total = 0.0
    for z, targets in zip(logits.tolist(), shown.tolist(), strict=True):
        for place, (value, told) in enumerate(zip(z, targets, strict=True)):
            t = told * (1 - config.label_smoothing) + config.label_smoothing / 2
            p = 1 / (1 + math.exp(-value))
            focus, q = (0, p) if config.kind == "bce" else (4, max(p - 0.05, 0.0))
            total -= weights[place] * t * math.log(p) / len(z)
            total -= (1 - t) * q**focus * math.log(1 - q) / len(z)
    return total


@pytest.mark.parametrize("kind", ["bce", "asymmetric"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 0.0, 1.0, 3.0]])
@pytest.mark.parametrize("mixed", [False, True])
def test_losses_of_several_labels_against_loops_and_by_their_gradients(kind, smoothing, weights, mixed):
    logits, _, _, own = batch()
    shown = (torch.rand(N, CLASSES, generator=generator(0, "shown")) < 0.4).float()
    others, config = shown.flip(0), ClassifierLossConfig(kind=kind, label_smoothing=smoothing)
    targets = Targets(shown, others, own) if mixed else Targets(shown)
    both = own[:, None] * shown + (1 - own[:, None]) * others if mixed else shown
    given = None if weights is None else torch.tensor(weights).double()
    found = classifier_loss(logits, targets, config, given)
    assert found.item() == pytest.approx(slow_label_loss(logits, both, config, weights or [1.0] * CLASSES), rel=1e-6)
    counted = targets._replace(weights=torch.tensor([2.0, 0, 0, 0, 0, 0]).double())
    alone = classifier_loss(logits[:1], targets.rows(slice(0, 1)), config, given)
    assert classifier_loss(logits, counted, config, given).item() == pytest.approx(2 * alone.item())
    assert torch.autograd.gradcheck(
        lambda z: classifier_loss(z, targets, config, given), logits.clone().requires_grad_(True)
    )


def test_several_labels_that_are_right_and_balanced():
    logits, shown = torch.tensor([[2.0, -1.0], [-3.0, -1.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert Targets(shown).correct(logits) == 0.5 + 1
    assert Targets(shown, shown.flip(0), torch.tensor([0.75, 1.0])).correct(logits) == (0.75 + 0.25) / 2 + 1
    config: Any = ClassifierLossConfig(kind="bce", class_weights="balanced")
    assert class_weight_list(config, "abc", [0.5, 0.1, 0.0]) == pytest.approx([1.0, 9.0, 0.0])
    named: Any = ClassifierLossConfig(kind="bce", class_weights={"b": 3.0})
    assert class_weight_list(named, "abc", [0.5, 0.1, 0.0]) == [1.0, 3.0, 1.0]


def test_what_counts_as_right():
    logits = torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    labels, others, own = torch.tensor([0, 0, 2, 1]), torch.tensor([1, 1, 2, 2]), torch.tensor([0.75, 0.75, 0.5, 0.5])
    assert Targets(labels).correct(logits) == 2
    assert Targets(labels, others, own).correct(logits) == 0.75 + 0.25 + 1 + 0


def test_balanced_weights_are_equal_shares_and_named_ones_have_mean_one():
    shares = [10.0, 30.0, 60.0]
    weights: Any = class_weight_list(ClassifierLossConfig(class_weights="balanced"), "abc", shares)
    products = [w * share for w, share in zip(weights, shares, strict=True)]
    assert products == pytest.approx([100 / 3] * 3)  # and the mean over the images is 1
    alike = class_weight_list(ClassifierLossConfig(class_weights="balanced"), "abc", [5.0] * 3)
    assert alike == pytest.approx([1.0] * 3)
    weights = class_weight_list(ClassifierLossConfig(class_weights={"b": 3.0}), ["a", "b"], [90.0, 10.0])
    assert weights[1] / weights[0] == pytest.approx(3.0)
    assert 0.9 * weights[0] + 0.1 * weights[1] == pytest.approx(1.0)
    assert class_weight_list(ClassifierLossConfig(), ["a", "b"], [1.0, 1.0]) is None


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"shirts": 2.0}, r"no class 'shirts' in the data \(did you mean 'shirt'\?\)"),
        ({"shirt": 0.0, "coat": 0.0}, "all classes in the data have weight 0"),
    ],
)
def test_weights_that_do_not_fit(weights, told):
    with pytest.raises(UserError, match=told):
        class_weight_list(ClassifierLossConfig(class_weights=weights), ["shirt", "coat"], [1.0, 1.0])


@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 2, 1), (5, 2, 1), (7, 2, 1), (3, 3, 2), (3, 2, 2)])
def test_gradients_are_those_of_fp32_whatever_the_memory_held(kernel, stride, side):
    """As in layer4 of a ResNet with images of 16 px."""
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
    x, own = torch.randn(6, 64, side, side), copy.deepcopy(conv)
    expected = own(x)
    expected.square().sum().backward()
    widen_narrow_maps(conv)
    assert own.weight.grad is not None
    for _ in range(4):
        junk = [torch.full((128, 64, kernel, kernel), float("nan"), dtype=d) for d in (torch.bfloat16, torch.float32)]
        del junk
        conv.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = conv(x)
        assert found.shape == expected.shape
        found.float().square().sum().backward()
        assert conv.weight.grad is not None
        assert (conv.weight.grad - own.weight.grad).norm() < 0.02 * own.weight.grad.norm()
    assert torch.equal(conv(x), own(x))  # in fp32 nothing changes


def test_other_convolutions_stay_as_they_are():
    others = [nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 4, stride=2, padding=1)]
    widen_narrow_maps(nn.ModuleList(others))
    assert not any(conv._forward_pre_hooks for conv in others)
