import pytest
import torch
from torch import nn

from duetgan.training.optim.ema import EMA, half_life_beta
from duetgan.utils.seeding import forked, generator


def build():
    with forked(0, "init", "ema"):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2, bias=False)).double()
    model.register_buffer("w_avg", torch.zeros(3, dtype=torch.float64))
    return model


def move(model, step):
    """Change every parameter and buffer."""
    keyed = generator(0, "move", step)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=keyed, dtype=value.dtype))
            else:
                value.add_(1)


@pytest.mark.parametrize("buffers", ["average", "copy"])
def test_average_against_the_formula(buffers):
    model = build()
    ema = EMA(model, buffers=buffers)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters()}
    for step, beta in enumerate([0.9, 0.0, 0.5, 0.999]):
        move(model, step)
        ema.update(model, beta)
        for name, value in model.state_dict().items():
            averaged = name in parameters or (buffers == "average" and value.is_floating_point())
            expected[name] = beta * expected[name] + (1 - beta) * value if averaged else value.clone()
        for name, value in ema.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
    assert expected["1.num_batches_tracked"].item() == 4


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_skipped_update_leaves_the_average(flag):
    model = build()
    ema, unflagged = EMA(model, buffers="average"), EMA(model, buffers="average")
    before = {name: value.clone() for name, value in ema.model.named_parameters()}
    move(model, 0)
    ema.update(model, 0.5, torch.tensor(flag))
    unflagged.update(model, 0.5)
    for name, value in ema.model.named_parameters():
        expected = before[name] if flag else unflagged.model.get_parameter(name)
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
        assert torch.equal(value, before[name]) == bool(flag)


def test_it_is_a_copy_in_evaluation_mode_without_gradients():
    model = build()
    ema = EMA(model, buffers="copy")
    assert not ema.model.training
    assert model.training
    assert not any(p.requires_grad for p in ema.model.parameters())
    move(model, 0)
    assert not torch.equal(ema.model[0].weight, model[0].weight)
    ema.update(model, 0.5)
    assert ema.model[0].weight.grad_fn is None


@pytest.mark.parametrize(
    ("batch", "seen", "half_life", "ramp", "expected"),
    [
        (64, 10**9, 20_000, 0.05, 0.5 ** (64 / 20_000)),
        (64, 64_000, 20_000, 0.05, 0.5 ** (64 / 3_200)),
        (64, 64_000, 20_000, None, 0.5 ** (64 / 20_000)),
        (32, 32, 20_000, 0.05, 0.5**20),
        (32, 0, 20_000, 0.05, 0.0),
    ],
)
def test_half_life(batch, seen, half_life, ramp, expected):
    assert half_life_beta(batch, seen, half_life, ramp) == pytest.approx(expected, rel=1e-12)
