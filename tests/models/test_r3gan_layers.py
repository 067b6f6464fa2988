import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from duetgan.models import layers, r3gan
from duetgan.models.layers import downsample_fir, upsample_fir
from duetgan.models.r3gan import Block, Stage, convolve_twice, downsample, upsample
from duetgan.utils.seeding import forked, generator
from tests.models.helpers import draw, randomised

CONVOLUTIONS = [(1, 3, 2, 1), (1, 2, 3, 3), (2, 4, 6, 3), (3, 3, 3, 3), (2, 2, 2, 5)]


@pytest.mark.parametrize(("groups", "inputs", "outputs", "size"), CONVOLUTIONS)
def test_derivatives_to_the_third_are_torchs(groups, inputs, outputs, size):
    """Of everything; the sines put a graph before and after each."""
    tensors = [draw(2, inputs, 2, 3), draw(outputs, inputs // groups, size, size, key="weight"), draw(outputs, key="b")]
    tensors = [tensor.requires_grad_() for tensor in tensors]

    def derivatives(function):
        found, y = [], function(*(tensor.sin() for tensor in tensors))
        for _ in range(3):
            found.append(torch.autograd.grad(y.sin().sum(), tensors, create_graph=True))
            y = torch.cat([gradient.flatten() for gradient in found[-1]])
        return found

    found = derivatives(lambda x, w, b: convolve_twice(x, w, b, groups))
    expected = derivatives(lambda x, w, b: F.conv2d(x, w, b, padding=size // 2, groups=groups))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("groups", "inputs", "outputs", "size"), CONVOLUTIONS)
@pytest.mark.parametrize("trained", [(), ("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias")])
def test_values_and_gradients_equal_torchs_and_go_where_they_are_wanted(groups, inputs, outputs, size, trained):
    weight = draw(outputs, inputs // groups, size, size, key="weight")
    tensors = {"x": draw(2, inputs, 3, 4), "weight": weight, "bias": draw(outputs, key="bias")}
    wanted = [tensors[name].requires_grad_() for name in trained]
    x, weight, bias = tensors.values()
    found = convolve_twice(x, weight, bias, groups)
    expected = F.conv2d(x, weight, bias, padding=size // 2, groups=groups)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.requires_grad == bool(trained)
    if trained:
        grad = draw(*found.shape, key="grad")
        gradients = [torch.autograd.grad(y, wanted, grad) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def nodes(tensor):
    """Names of all nodes of a tensor's graph."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def test_a_penalty_takes_no_slow_second_derivative_and_its_inner_gradient_none_for_weights(monkeypatch):
    asked = []

    def count(*arguments):
        asked.append("input" if arguments[-1] else "weight")
        return original(*arguments)

    original = r3gan._Gradient.forward
    monkeypatch.setattr(r3gan._Gradient, "forward", staticmethod(count))
    with forked(0, "init", "penalty"):
        stage = Stage(4, 6, [Block(6, 12, 3, gain=1.0, twice=True)], "down")
    stage = randomised(stage)
    x = draw(2, 4, 8, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(stage(x).sin().sum(), x, create_graph=True)
    assert asked == ["input"] * 5  # three convolutions of the block, the change of width, the low-pass
    penalty = gradient.square().sum()
    assert not any(name.startswith("ConvolutionBackward") for name in nodes(penalty))
    penalty.backward()
    assert asked.count("weight") == 8  # once as the weight of a convolution, once as the weight of its gradient


def test_resampling_is_the_fir_of_1331_and_a_block_the_identity_at_the_start():
    for height, width in ((2, 2), (4, 6), (8, 8)):
        x = draw(3, 2, height, width)
        torch.testing.assert_close(downsample(x), downsample_fir(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(upsample(x), upsample_fir(x), rtol=1e-12, atol=1e-12)
    gain = r3gan.LEAKY_GAIN
    with forked(0, "init", "block"):
        layer = Block(64, 256, 16, gain=gain, twice=True)
    x = torch.randn(16, 64, 16, 16, generator=generator(0, "test"))
    assert layer(x).equal(x)
    assert layer.reduce.weight.eq(0).all()
    inside = layer.group(layer.expand(x))[:, :, 1:-1, 1:-1]
    assert inside.square().mean().item() == pytest.approx(1.0, rel=0.1)  # sqrt(2 / 1.04) undoes the leaky ReLU


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_low_pass_first_used_in_another_mode_can_be_trained_with(mode):
    layers._kept.clear()
    with mode():
        upsample(torch.zeros(1, 1, 2, 2))
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    upsample(x).sum().backward()
    assert x.grad is not None
    assert type(x.grad) is torch.Tensor
    assert len(layers._kept) == 1


@pytest.mark.parametrize(("resample", "change", "blocks"), [("up", 4, 8), ("down", 2, 2)])
def test_stages_change_the_width_where_the_maps_are_small(resample, change, blocks):
    """The change and resampling can be exchanged: no number shows it."""
    stage = Stage(6, 4, [Block(4, 8, 2, gain=1.0, twice=resample == "down")], resample)
    assert stage.change is not None
    heights = []
    for module in (stage.change, stage.blocks):
        module.register_forward_pre_hook(lambda _, inputs: heights.append(inputs[0].shape[2]))
    stage(draw(2, 6, 4, 6).float())
    assert heights == [change, blocks]
