import copy
import math
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from duetgan.training.optim.config import MOMENTA
from duetgan.training.optim.optimizers import parameter_groups
from duetgan.training.optim.updater import STATE, OptimizerConfig, Precision, Updater
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator

CPU = torch.device("cpu")
OPTIMIZERS = [
    {"name": "adam"},
    {"name": "adam", "betas": [0.0, 0.99]},
    {"name": "adam", "weight_decay": 0.1},
    {"name": "adamw", "weight_decay": 0.1},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.0},
    {"name": "sgd", "weight_decay": 0.1},
]
CLIPPED = [{"name": name, "clip_norm": 1.0} for name in ("adam", "sgd")]
OURS = [
    {"name": "muon", "weight_decay": 0.02, "momentum": 0.6, "sgd_momentum": 0.8, "unit_filters": True},
    {"name": "muon-adam", "momentum": 0.5, "betas": [0.0, 0.9], "beta2_final": 0.99, "weight_decay": 0.1},
    {"name": "schedulefree-sgd", "momentum": 0.5, "weight_decay": 0.1, "warmup_steps": 3},
    {"name": "schedulefree-adamw", "betas": [0.8, 0.95], "weight_decay": 0.1, "warmup_steps": 3},
]


def test_frozen_parameters_are_left_out_and_empty_groups_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert [id(p) for p in group["params"]] == [id(model[1].weight)]


def build(precision="fp32", **config):
    """A small model with its updater, in float64 but for fp16."""
    with forked(0, "init", "test optim"):
        model = nn.Conv2d(3, 2, 2) if config.get("name") == "muon-adam" else nn.Linear(3, 2)
        model = model.to(torch.float32 if precision == "fp16" else torch.float64)
    return model, Updater(model, OptimizerConfig(**({"lr": 0.1} | config)), Precision(precision, CPU), 100)


def set_gradients(model, step, scale=1.0):
    for index, parameter in enumerate(model.parameters()):
        keyed = generator(0, "gradient", step, index)
        parameter.grad = scale * torch.randn(parameter.shape, generator=keyed, dtype=parameter.dtype)


def steps(model, updater, numbers):
    for step in numbers:
        set_gradients(model, step)
        updater.step(step)


def snapshot(model, updater):
    return copy.deepcopy((dict(model.state_dict()), updater.state_dict()))


@pytest.mark.parametrize("options", [*OPTIMIZERS, *OURS, *CLIPPED])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(options, value, good_steps):
    (model, updater), (untouched, other) = (build(**options), build(**options))
    for m, u in ((model, updater), (untouched, other)):
        steps(m, u, range(good_steps))
    set_gradients(model, 50)
    model.weight.grad[0, 0] = value
    norm, skipped, nonfinite, _ = updater.step(good_steps)
    assert not torch.isfinite(norm)
    assert (skipped.item(), nonfinite.item()) == (1.0, 1.0)
    for parameter, expected in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        if updater.config.name == "sgd" and updater.config.momentum and not good_steps:
            # the fused kernel leaves the buffer that it makes on a masked first step as that memory was
            assert updater.optimizer.state[parameter]["momentum_buffer"].eq(0).all()
    # moments and step counters too: the next update is the one that would have come without the bad one
    for m, u in ((model, updater), (untouched, other)):
        steps(m, u, range(good_steps, good_steps + 3))
    torch.testing.assert_close(snapshot(model, updater), snapshot(untouched, other), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["adam", "adamw", "sgd", "muon", "muon-adam", "schedulefree-sgd", "schedulefree-adamw"]
)
@pytest.mark.parametrize("other", ["gradients", "moments"])
def test_any_memory_order_of_gradients_and_moments_will_do(name, other):
    """torch's fused optimizers take weights, gradients and moments element by element as they lie in memory."""

    def train(change):
        with forked(0, "init", "test optim"):
            model = nn.Conv2d(3, 4, 2).double()
        updaters = [Updater(model, OptimizerConfig(name=name, lr=0.1), Precision("fp32", CPU), 100) for _ in range(2)]
        for step in range(4):
            if step == 2:
                state = copy.deepcopy(updaters[0].state_dict())
                for kept in state["state"].values():
                    for key, value in kept.items():
                        if change == "moments" and torch.is_tensor(value) and value.ndim == 4:
                            kept[key] = value.contiguous(memory_format=torch.channels_last)
                updaters[1].load_state_dict(state)
            set_gradients(model, step)
            if change == "gradients":
                model.weight.grad = model.weight.grad.contiguous(memory_format=torch.channels_last)
            updaters[step // 2].step(step)
        return model.weight.detach()

    torch.testing.assert_close(train(other), train(None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("adam", {"weight_decay": 0.5, "betas": [0.5, 0.9], "eps": 1e-3}),
        ("adamw", {"weight_decay": 0.5}),
        ("sgd", {"weight_decay": 0.5, "momentum": 0.1}),
        ("muon", {"weight_decay": 0.5, "momentum": 0.1}),
        ("muon-adam", {"betas": [0.5, 0.9], "eps": 1e-3}),
        ("muon-adam", {"weight_decay": 0.5, "momentum": 0.1, "muon_rms": 1.0}),
        ("schedulefree-adamw", {"weight_decay": 0.5, "betas": [0.9, 0.9], "eps": 1e-3}),
    ],
)
def test_settings_that_changed_since_the_checkpoint_are_taken(name, changed):
    """A resume says that it takes them."""
    model, updater = build(name=name)
    steps(model, updater, [0])
    other, restored = build(name=name, **changed)
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(updater.state_dict())
    fresh = build(name=name, **changed)[1].optimizer.param_groups
    for group, configured in zip(restored.optimizer.param_groups, fresh, strict=True):
        assert all(group[key] == configured[key] for key in group.keys() - STATE)
    for m, u in ((model, updater), (other, restored)):
        steps(m, u, [1])
    assert not model.weight.equal(other.weight)


@pytest.mark.parametrize("name", ["sgd", "muon", "muon-adam", "adam", "adamw"])
def test_a_cycle_moves_the_momentum_or_else_adams_beta1(name):
    has_momentum, has_betas = name in MOMENTA, "adam" in name
    options = {"betas": [0.5, 0.9], "beta2_final": 0.99} if has_betas else {}
    model, updater = build(name=name, schedule="one-cycle", cycle_momentum=(0.9, 0.4), **options)
    steps(model, updater, [40])
    momentum, (beta1, beta2) = updater.config.momentum_at(40, 100), updater.config.betas_at(40, 100)
    assert 0.4 < momentum < 0.5
    for group in updater.optimizer.param_groups:
        assert not has_momentum or group["momentum"] == momentum
        assert not has_betas or group["betas"] == (beta1 if has_momentum else momentum, beta2)


@pytest.mark.parametrize(("growing", "exchange"), [(False, True), (True, True), (False, False)])
def test_gradients_are_exchanged_as_the_network_needs(growing, exchange, monkeypatch):
    monkeypatch.setattr("duetgan.training.optim.updater.GradientExchange", made := MagicMock())
    model, precision = nn.Linear(3, 2), Precision("fp32", CPU)
    Updater(model, OptimizerConfig(), precision, 10, growing=growing, exchange=exchange, compress="bf16")
    parameters, options = made.call_args
    assert list(map(id, *parameters)) == [id(parameter) for parameter in model.parameters() if exchange]
    assert options == {"missing": "skip" if growing else "zeros", "compress": "bf16"}


def test_a_rate_for_another_batch_size_is_refused():
    with pytest.raises(UserError, match="lr_batch_size is for classifiers; give this network's own lr instead"):
        build(lr_batch_size=8)


def test_the_share_of_a_schedule_free_average_is_refused_if_it_changed():
    updater, other = (build(name="schedulefree-sgd", momentum=momentum)[1] for momentum in (0.9, 0.8))
    told = "a share of 0.9, which a resume cannot change; give the same optimizer.momentum"
    with pytest.raises(UserError, match=told):
        other.load_state_dict(updater.state_dict())


def run_scaled(bad_step=None, precision="fp16", name="sgd", **config):
    """Three updates; at `bad_step` the loss is infinite. Returns the model, its Precision, the norms and the flags."""
    model, updater = build(precision, name=name, **config)
    mixed, norms, flags = updater.precision, [], []
    x = torch.ones(2, *model.weight.shape[1:], dtype=model.weight.dtype)
    for step in range(3):
        updater.zero_grad()
        before = model.weight.detach().clone()
        mixed.backward(model(x).square().mean() * (math.inf if step == bad_step else 1.0))
        norm, skipped, nonfinite, _ = updater.step(step)
        assert nonfinite == 0  # the loss scale of 2^16 is the likely reason
        assert torch.equal(model.weight, before) == (step == bad_step)
        norms.append(norm.item())
        flags.append(skipped.item())
        mixed.update_scale()
    return model, mixed, norms, flags


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_with_the_scaler_norms_and_updates_are_those_without(clip_norm):
    model, mixed, norms, flags = run_scaled(clip_norm=clip_norm)
    plain, _, plain_norms, _ = run_scaled(precision="fp32", clip_norm=clip_norm)
    assert mixed.scaler.get_scale() == 2.0**16
    assert flags == [0, 0, 0]
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    torch.testing.assert_close(model.weight.double(), plain.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "muon", "muon-adam", "schedulefree-adamw"])
@pytest.mark.parametrize("bad_step", [0, 1])
def test_an_overflow_is_skipped_and_halves_the_scale(bad_step, name):
    model, mixed, _, flags = run_scaled(bad_step, name=name)
    assert flags == [float(step == bad_step) for step in range(3)]
    assert mixed.scaler.get_scale() == 2.0**15
    assert torch.isfinite(model.weight).all()
    other = Precision("fp16", CPU)
    other.load_state_dict(mixed.state_dict())
    assert other.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_of_each_precision(precision, dtype):
    x = torch.ones(2, 2)
    with Precision(precision, CPU).autocast():
        assert (x @ x).dtype == dtype


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("fp32", "fp16"), ("fp32", "fp32")])
def test_a_run_may_be_resumed_at_another_precision(before, after):
    mixed = Precision(after, CPU)
    fresh = mixed.state_dict()
    mixed.load_state_dict(Precision(before, CPU).state_dict())
    assert mixed.state_dict() == fresh


def test_below_a_loss_scale_of_one_an_overflow_is_a_fault():
    """fp16's own skips must not stop a run, but a NaN that no scale can cure must."""
    model, updater = build("fp16", name="sgd")
    mixed, flags = updater.precision, []
    for step in range(20):
        updater.zero_grad()
        mixed.backward(model(torch.ones(2, 3)).mean() * math.nan)
        update = updater.step(step)
        assert update.skipped == 1
        flags.append(update.nonfinite.item())
        mixed.update_scale()
    assert flags == [0.0] * 16 + [1.0] * 4


def test_a_step_that_was_interrupted_can_be_taken_again():
    model, updater = build("fp16", name="sgd")
    for _ in range(2):  # the first one never reaches the end of the step, where the scale is updated
        updater.zero_grad()
        updater.precision.backward(model(torch.ones(2, 3)).mean())
        assert float(updater.step(0).norm) == pytest.approx(1.414, abs=1e-3)


@pytest.mark.parametrize("clip", [{"clip_value": 1.0}, {"clip_adaptive": 0.1}])
def test_clipping_does_not_hide_what_is_not_finite(clip):
    model, updater = build(name="sgd", **clip)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model, 0)
    model.weight.grad[0, 0] = math.inf
    assert updater.step(0).skipped == 1
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)
