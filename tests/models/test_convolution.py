import pytest
import torch
import torch.nn.functional as F

from duetgan.models.layers.convolution import Geometry, convolve, penalised
from tests.models.helpers import draw

# geometry, channels before and after, side of the filters
CONVOLUTIONS = [
    (Geometry(), 3, 2, 1),
    (Geometry(padding=1), 2, 3, 3),
    (Geometry(padding=1, groups=2), 4, 6, 3),
    (Geometry(padding=1, groups=3), 3, 3, 3),
    (Geometry(padding=2, groups=2), 2, 2, 5),
    (Geometry(stride=2), 2, 3, 3),
    (Geometry(stride=2, transposed=True), 3, 2, 3),
    (Geometry(stride=2, padding=1, groups=2, transposed=True), 2, 4, 3),
]


def torchs(x, weight, bias, geometry):
    run = F.conv_transpose2d if geometry.transposed else F.conv2d
    return run(x, weight, bias, geometry.stride, geometry.padding, groups=geometry.groups)


def drawn(geometry, inputs, outputs, size):
    """An image, filters and a bias."""
    shape = (inputs, outputs) if geometry.transposed else (outputs, inputs)
    weight = draw(shape[0], shape[1] // geometry.groups, size, size, key="weight")
    return {"x": draw(2, inputs, 3, 5), "weight": weight, "bias": draw(outputs, key="bias")}


@pytest.mark.parametrize(("geometry", "inputs", "outputs", "size"), CONVOLUTIONS)
def test_derivatives_to_the_third_are_torchs(geometry, inputs, outputs, size):
    """Of everything; the sines put a graph before and after each."""
    tensors = [tensor.requires_grad_() for tensor in drawn(geometry, inputs, outputs, size).values()]

    def derivatives(function):
        found, y = [], function(*(tensor.sin() for tensor in tensors), geometry)
        for _ in range(3):
            found.append(torch.autograd.grad(y.sin().sum(), tensors, create_graph=True))
            y = torch.cat([gradient.flatten() for gradient in found[-1]])
        return found

    with penalised():
        found = derivatives(convolve)
    torch.testing.assert_close(found, derivatives(torchs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize(("geometry", "inputs", "outputs", "size"), CONVOLUTIONS)
@pytest.mark.parametrize("trained", [(), ("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias")])
def test_values_and_gradients_equal_torchs_and_go_where_they_are_wanted(
    geometry, inputs, outputs, size, trained, penalty
):
    tensors = drawn(geometry, inputs, outputs, size)
    x, weight, bias = tensors.values()
    wanted = [tensors[name].requires_grad_() for name in trained]
    with penalised(penalty):
        found = convolve(x, weight, bias, geometry)
    expected = torchs(x, weight, bias, geometry)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.requires_grad == bool(trained)
    if trained:
        grad = draw(*found.shape, key="grad")
        gradients = [torch.autograd.grad(y, wanted, grad) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_in_autocasts_precision_too():
    x, weight, bias = (t.float().requires_grad_() for t in drawn(*CONVOLUTIONS[1]).values())
    found = {}
    for penalty in (False, True):
        with torch.autocast("cpu", torch.bfloat16), penalised(penalty):
            y = convolve(x, weight, bias, CONVOLUTIONS[1][0])
        assert y.dtype == torch.bfloat16
        found[penalty] = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
    assert [gradient.dtype for gradient in found[True]] == [torch.float32] * 3
    torch.testing.assert_close(found[True], found[False], rtol=0.02, atol=0.02)


def test_the_penalties_phase_ends_with_its_block():
    x = draw(1, 1, 3, 3).requires_grad_()
    weight, geometry = draw(1, 1, 3, 3, key="weight"), Geometry(padding=1)
    own = "_InputPathBackward"

    def kind():
        return type(convolve(x, weight, None, geometry).grad_fn).__name__

    @penalised()
    def fails():
        assert kind() == own
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert kind() == "ConvolutionBackward0"
