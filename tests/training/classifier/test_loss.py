import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from duetgan.training.classifier.loss import (
    CLASSIFIER_LOSSES,
    ClassifierLoss,
    ClassifierLossConfig,
    Criterion,
    Targets,
    class_weight_list,
    classifier_loss,
)
from duetgan.training.classifier.network import widen_narrow_maps
from duetgan.training.optim.updater import Precision
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator

CLASSES, N, CPU = 5, 6, torch.device("cpu")


def batch():
    keyed = generator(0, "loss")
    logits = 3 * torch.randn(N, CLASSES, generator=keyed, dtype=torch.float64)
    labels, others = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 1, 0, 4, 2, 3])
    own = torch.tensor([1.0, 0.3, 0.0, 0.5, 0.9, 0.25])
    return logits, labels, others, own


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "focal", "focal_gamma": 0.0}, lambda p: -p.log()),
        ({"kind": "focal", "focal_gamma": 2.5}, lambda p: -((1 - p) ** 2.5) * p.log()),
        ({"kind": "generalised-cross-entropy", "gce_q": 1.0}, lambda p: 1 - p),
        ({"kind": "generalised-cross-entropy", "gce_q": 0.3}, lambda p: (1 - p**0.3) / 0.3),
        ({"kind": "generalised-cross-entropy", "gce_q": 1e-6}, lambda p: -p.log()),
    ],
)
def test_losses_of_the_probability_of_the_label(settings, expected):
    logits, labels, others, own = batch()
    config = ClassifierLossConfig(label_smoothing=0.0, **settings)
    loss = classifier_loss(logits, Targets(labels), config, weights=None, prior=None, smoothing=None)
    p = logits.softmax(1)[range(N), labels]
    torch.testing.assert_close(loss, expected(p).sum(), rtol=1e-5, atol=0)
    mixed = Targets(labels, others, own)
    assert torch.autograd.gradcheck(
        lambda z: classifier_loss(z, mixed, config, weights=None, prior=None, smoothing=None), logits.requires_grad_()
    )


@pytest.mark.parametrize("kind", ["focal", "binary-focal", "generalised-cross-entropy"])
@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
def test_gradients_of_certain_predictions_are_finite(kind, power):
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    config = ClassifierLossConfig(kind=kind, focal_gamma=power, gce_q=max(0.1, power / 2))
    labels = torch.eye(2) if config.several else torch.tensor([0, 0])
    classifier_loss(logits, Targets(labels), config, weights=None, prior=None, smoothing=None).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        *(
            ({"kind": kind, "logit_adjustment": 1.0}, "logit_adjustment is for one class an image by a softmax")
            for kind in CLASSIFIER_LOSSES
            if kind != "cross-entropy"
        ),
        ({"kind": "binary-focal", "teacher": "a run"}, "teacher is for one class an image"),
        ({"kind": "focl"}, r"did you mean 'focal'\?"),
    ],
)
def test_settings_that_a_loss_has_not(settings, told):
    with pytest.raises(UserError, match=told):
        ClassifierLossConfig(**settings)


def test_a_loss_gives_a_value_per_sample_and_gets_its_settings():
    with pytest.raises(UserError, match=r"gives \[\] of logits \[3, 2\]; give \[3\], no mean"):
        ClassifierLoss(errors=lambda logits, targets, _: F.cross_entropy(logits, targets))
    seen: list[Any] = []

    def errors(logits, targets, config):
        seen.append(config)
        return logits.sum(1)

    loss, config = ClassifierLoss(errors=errors), ClassifierLossConfig(kind="squared-error", focal_gamma=3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CLASSIFIER_LOSSES, "squared-error", loss)
        classifier_loss(torch.zeros(1, 2), Targets(torch.tensor([0])), config, weights=None, prior=None, smoothing=None)
    assert seen[-1] is config


def slow_label_loss(logits, shown, config, weights):
    """Image by image and label by label, in Python's floats."""
    total, spread = 0.0, config.label_smoothing / 2
    for z, targets in zip(logits.tolist(), shown.tolist(), strict=True):
        for place, (value, told) in enumerate(zip(z, targets, strict=True)):
            p = 1 / (1 + math.exp(-value))
            focus, q = {"bce": (0, p), "asymmetric": (4, max(p - 0.05, 0.0)), "binary-focal": (2, p)}[config.kind]
            yes, no = -math.log(p), -(q**focus) * math.log(1 - q)
            if config.kind == "binary-focal":
                yes *= (1 - p) ** focus
            total += told * weights[place] * ((1 - spread) * yes + spread * no) / len(z)
            total += (1 - told) * (spread * yes + (1 - spread) * no) / len(z)
    return total


def optimum(config, frequencies, posterior, mixed=False, teacher=None):
    """The logits with the least expected loss to labels of that posterior, found numerically in float64."""
    labels = torch.arange(len(posterior))
    labels, others = (each.flatten() for each in torch.meshgrid(labels, labels, indexing="ij"))
    targets = Targets(labels, others, torch.full((len(labels),), 0.7), posterior[labels] * posterior[others])
    if not mixed:
        targets = Targets(labels, weights=targets.weights)
    dataset: Any = SimpleNamespace(meta=SimpleNamespace(classes=[str(label) for label in range(len(posterior))]))
    criterion = Criterion(config.changed(teacher=None), dataset, frequencies.tolist(), Precision("fp32", CPU), steps=1)
    if teacher is not None:
        criterion.teacher = teacher.expand_as
    logits = torch.zeros(len(posterior), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([logits], max_iter=300, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        search.zero_grad()
        rows = logits.expand(len(labels), -1)
        value = criterion(rows, targets, rows)
        value.backward()
        return value

    search.step(loss)
    return logits.detach()


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        {"class_weights": "balanced"},
        {"class_weights": "balanced", "kind": "squared-error"},
        {"class_weights": "balanced", "kind": "focal"},
        {"class_weights": "balanced", "kind": "generalised-cross-entropy"},
        {"class_weights": "balanced", "teacher": "a run", "teacher_share": 0.5, "temperature": 1.0},
        {"class_weights": "balanced", "label_smoothing": 0.0},
        {"logit_adjustment": 1.0},
        {"logit_adjustment": 1.0, "label_smoothing": 0.5},
    ],
)
def test_the_optimum_names_the_class_that_is_most_frequent_for_its_frequency(loss, mixed, classes):
    """K1: label smoothing times a rare class's weight made that class the answer to every image."""
    frequencies = torch.tensor([1000.0, *[30.0] * (classes - 2), 1.0], dtype=torch.float64)
    config, named = ClassifierLossConfig(**loss), []
    for ratio in (0.0, 0.95, 1.05, 1e9):  # how much more the image looks like the rarest class than like the first
        posterior = frequencies * torch.tensor([1, *[0.5] * (classes - 2), ratio], dtype=torch.float64)
        posterior = posterior / posterior.sum()
        teacher = (posterior / frequencies).clamp(min=1e-6).log() if config.teacher else None
        named.append(int(optimum(config, frequencies, posterior, mixed, teacher).argmax()))
    assert named == [0, 0, classes - 1, classes - 1]


@pytest.mark.parametrize(
    ("kind", "ratios"),
    [("bce", [0.0, 0.95, 1.05, 100.0]), ("asymmetric", [0.0, 100.0]), ("binary-focal", [0.0, 0.9, 1.1, 100.0])],
)
def test_the_optimum_of_several_labels(kind, ratios):
    """K1: a label of one image in a hundred was named for every image."""
    config, named = ClassifierLossConfig(kind=kind, class_weights="balanced"), []
    (weight,) = class_weight_list(config, ["rare"], [0.01]) or []
    logits = torch.linspace(-8, 8, 32001, dtype=torch.float64)[:, None].requires_grad_()
    slopes = []
    for label in (1.0, 0.0):
        loss = classifier_loss(
            logits, Targets(torch.full((32001, 1), label)), config, torch.tensor([weight]), prior=None, smoothing=None
        )
        slopes.append(torch.autograd.grad(loss, logits)[0])
    for ratio in ratios:
        expected_slope = 0.01 * ratio * slopes[0] + (1 - 0.01 * ratio) * slopes[1]
        named.append(bool(logits[expected_slope.abs().argmin()] > 0))
    assert named == [ratio > 1 for ratio in ratios]


@pytest.mark.parametrize("kind", ["bce", "asymmetric", "binary-focal"])
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
    found = classifier_loss(logits, targets, config, given, prior=None, smoothing=None)
    assert found.item() == pytest.approx(slow_label_loss(logits, both, config, weights or [1.0] * CLASSES), rel=1e-6)
    counted = targets._replace(weights=torch.tensor([2.0, 0, 0, 0, 0, 0]).double())
    alone = classifier_loss(logits[:1], targets.rows(slice(0, 1)), config, given, prior=None, smoothing=None)
    assert classifier_loss(logits, counted, config, given, prior=None, smoothing=None).item() == pytest.approx(
        2 * alone.item()
    )
    assert torch.autograd.gradcheck(
        lambda z: classifier_loss(z, targets, config, given, prior=None, smoothing=None),
        logits.clone().requires_grad_(True),
    )


def test_several_labels_that_are_right_and_balanced():
    logits, shown = torch.tensor([[2.0, -1.0], [-3.0, -1.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert Targets(shown).correct(logits) == 0.5 + 1
    assert Targets(shown, shown.flip(0), torch.tensor([0.75, 1.0])).correct(logits) == (0.75 + 0.25) / 2 + 1
    config: Any = ClassifierLossConfig(kind="bce", class_weights="balanced")
    assert class_weight_list(config, "abc", [0.5, 0.1, 0.0]) == pytest.approx([1.0, 9.0, 0.0])
    named: Any = ClassifierLossConfig(kind="bce", class_weights={"b": 3.0})
    assert class_weight_list(named, "abc", [0.5, 0.1, 0.0]) == [1.0, 3.0, 1.0]


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


def test_a_class_that_is_never_seen_has_no_weight_and_the_least_prior():
    dataset: Any = SimpleNamespace(meta=SimpleNamespace(classes=[*"abc"]))
    config = ClassifierLossConfig(class_weights="balanced", logit_adjustment=0.5)
    criterion = Criterion(config, dataset, [6.0, 3.0, 0.0], Precision("fp32", CPU), steps=1)
    assert criterion.weights is not None
    assert criterion.prior is not None
    assert criterion.weights.tolist() == pytest.approx([0.75, 1.5, 0.0])
    assert criterion.prior.tolist() == pytest.approx([0.5 * math.log(f) for f in (1.0, 0.5, 1e-9)])


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
