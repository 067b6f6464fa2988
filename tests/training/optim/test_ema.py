import torch
from torch import nn

from duetgan.training.optim.ema import EMA
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
