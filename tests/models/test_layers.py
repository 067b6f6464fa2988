import math

import numpy as np
import pytest
import torch

from duetgan.models.layers import (
    LEAKY_SLOPE,
    EqualizedConv2d,
    EqualizedLinear,
    compute_dtype,
    normalize_second_moment,
    pointwise,
    scaled_activation,
)
from duetgan.utils.seeding import forked, generator
from tests.models import reference
from tests.models.helpers import close, draw, randomised


def test_second_moment_of_each_row_becomes_one():
    x = draw(3, 5) * torch.tensor([[1.0], [100.0], [0.01]])
    close(normalize_second_moment(x), reference.normalised(x.numpy()))
    zeros = normalize_second_moment(torch.zeros(1, 4))
    assert zeros.eq(0).all()  # eps keeps a row of zeros from becoming NaN


@pytest.mark.parametrize("lr_multiplier", [1.0, 0.01])
@pytest.mark.parametrize("activation", [False, True])
def test_equalised_linear(lr_multiplier, activation):
    layer = randomised(EqualizedLinear(5, 4, bias_init=0.3, lr_multiplier=lr_multiplier, activation=activation))
    x = draw(6, 5)
    expected = reference.linear(layer, x.numpy(), lr_multiplier=lr_multiplier, activation=activation)
    close(layer(x), expected)


@pytest.mark.parametrize("lr_multiplier", [1.0, 0.01])
def test_equalised_linear_starts_with_unit_scale_and_the_given_bias(lr_multiplier):
    with forked(0, "init", "linear"):
        layer = EqualizedLinear(400, 300, bias_init=1.0, lr_multiplier=lr_multiplier)
    assert layer.weight.std().item() * lr_multiplier == pytest.approx(1.0, rel=0.02)
    outputs = layer(torch.randn(200, 400, generator=generator(0, "test")))
    assert outputs.mean().item() == pytest.approx(1.0, abs=0.03)  # the bias reaches the output whatever the multiplier
    assert outputs.std().item() == pytest.approx(1.0, rel=0.05)


def test_equalised_convolution_starts_with_unit_variance():
    with forked(0, "init", "conv"):
        layer = EqualizedConv2d(64, 64, 3)
    assert layer.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert layer.bias is not None
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("downsample", [False, True])
@pytest.mark.parametrize(("bias", "activation", "gain"), [(True, True, 1.0), (False, False, math.sqrt(0.5))])
def test_equalised_convolution(size, downsample, bias, activation, gain):
    layer = randomised(EqualizedConv2d(3, 4, size, downsample=downsample, bias=bias, activation=activation, gain=gain))
    x = draw(2, 3, 6, 8)
    found = layer(x)
    expected = [
        reference.conv(layer, image, downsample=downsample, activation=activation, gain=gain) for image in x.numpy()
    ]
    assert found.shape == (2, 4, 3, 4) if downsample else (2, 4, 6, 8)
    close(found, np.stack(expected))


def test_compute_dtype_follows_autocast():
    x = torch.zeros(1, dtype=torch.float64)
    assert compute_dtype(x) == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert compute_dtype(x) == torch.float64


def activation_inputs(*, noise, dtype=torch.float64):
    """x, scale, bias and noise (or None) for `scaled_activation`, wanting gradients."""
    shapes = {"x": (2, 3, 4, 5), "scale": (2, 3, 1, 1), "bias": (1, 3, 1, 1), "noise": (2, 1, 4, 5)}
    found = [draw(*shape, key=name).to(dtype).requires_grad_() for name, shape in shapes.items()]
    return found if noise else [*found[:3], None]


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_scaled_activation(noise, layout):
    x, scale, bias, extra = activation_inputs(noise=noise)
    arrays = [t.detach().numpy() for t in (x, scale, bias)]
    sums = arrays[0] * arrays[1] + arrays[2] + (extra.detach().numpy() if noise else 0)
    found = scaled_activation(x.to(memory_format=layout), scale, bias, extra)
    close(found, np.where(sums > 0, sums, LEAKY_SLOPE * sums))
    assert found.is_contiguous(memory_format=layout)


def test_scaled_activation_makes_only_the_gradients_that_are_wanted():
    x, scale, bias, _ = activation_inputs(noise=False)
    y = scaled_activation(x, scale.detach(), bias.detach(), None)
    y.sum().backward()
    assert x.grad is not None
    assert scale.grad is None
    x, scale, bias, _ = activation_inputs(noise=False)
    scaled_activation(x.detach(), scale, bias.detach(), None).sum().backward()
    assert x.grad is None
    assert scale.grad is not None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pointwise_is_a_convolution_with_each_samples_filters(layout):
    x, filters = draw(3, 4, 2, 5), draw(3, 2, 4, key="filters")
    expected = np.einsum("noi,nihw->nohw", filters.numpy(), x.numpy())
    x = x.to(memory_format=layout).requires_grad_()
    found = pointwise(x, filters)
    close(found, expected)
    assert found.is_contiguous(memory_format=layout)
    found.square().sum().backward()
    assert x.grad.is_contiguous(memory_format=layout)
    assert torch.autograd.gradcheck(pointwise, (x.detach().requires_grad_(), filters.requires_grad_()))
