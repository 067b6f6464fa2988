import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models import layers
from models.layers import (
    EqualizedConv2d,
    EqualizedLinear,
    blur_fir,
    compute_dtype,
    downsample_fir,
    fir_kernel,
    normalize_second_moment,
    upsample_fir,
)
from tests.models import reference
from utils.seeding import forked, generator


def draw(*shape, key="x"):
    """Normal numbers in float64."""
    return torch.randn(shape, generator=generator(0, "test", key), dtype=torch.float64)


def randomised(module, seed=0):
    """The module in float64 with every parameter away from its start, biases and strengths included."""
    module = module.double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            noise = torch.randn(parameter.shape, generator=generator(seed, "parameter", index), dtype=torch.float64)
            parameter.add_(0.5 * noise)
    return module


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


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
        reference.conv(layer, picture, downsample=downsample, activation=activation, gain=gain) for picture in x.numpy()
    ]
    assert found.shape == (2, 4, 3, 4) if downsample else (2, 4, 6, 8)
    close(found, np.stack(expected))


def test_fir_kernel_is_the_outer_product_of_1331():
    kernel = fir_kernel(2, 4.0, torch.zeros(1, dtype=torch.float64))
    assert kernel.shape == (2, 1, 4, 4)
    for channel in kernel:
        close(channel[0], np.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 16)


def test_fir_kernel_first_made_in_inference_mode_can_be_trained_with():
    layers._fir_taps.cache_clear()
    with torch.inference_mode():
        upsample_fir(torch.zeros(1, 1, 2, 2))
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    upsample_fir(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("gain", [1.0, 4.0])
def test_blur(padding, gain):
    x = draw(2, 3, 5, 7)
    expected = [reference.blur(picture, pad=padding, gain=gain) for picture in x.numpy()]
    close(blur_fir(x, padding=padding, gain=gain), np.stack(expected))


@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 6), (8, 8)])
def test_downsampling_up_to_the_borders(height, width):
    x = draw(2, 3, height, width)
    close(downsample_fir(x), np.stack([reference.down(picture) for picture in x.numpy()]))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 3), (8, 8)])
def test_upsampling_up_to_the_borders(height, width):
    x = draw(2, 3, height, width)
    found = upsample_fir(x)
    assert found.shape == (2, 3, 2 * height, 2 * width)
    close(found, np.stack([reference.up(picture) for picture in x.numpy()]))


def test_upsampling_is_bilinear_interpolation_inside():
    # (1, 3) / 4 and (3, 1) / 4 are the weights of half-pixel centres: no shift, gain 1 for a constant
    x = draw(1, 2, 6, 6)
    expected = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    close(upsample_fir(x)[:, :, 1:-1, 1:-1], expected[:, :, 1:-1, 1:-1].numpy())


def test_downsampling_keeps_a_ramp_and_a_constant_inside():
    ramp = torch.arange(12.0, dtype=torch.float64).expand(1, 1, 12, 12)
    expected = 2 * torch.arange(6.0, dtype=torch.float64) + 0.5
    close(downsample_fir(ramp)[0, 0, 1:-1, 1:-1], expected[1:-1].expand(4, 4).numpy())


@pytest.mark.parametrize("resample", [lambda x: blur_fir(x, padding=1), downsample_fir, upsample_fir])
def test_resampling_can_be_differentiated_twice(resample):
    x = draw(1, 2, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(resample, (x,))
    # linear in x: the second derivative of its square is not zero
    assert torch.autograd.gradgradcheck(lambda x: resample(x).square(), (x,))


@pytest.mark.parametrize("size", [1, 3])
def test_downsampling_convolution_can_be_differentiated_twice(size):
    layer = randomised(EqualizedConv2d(2, 2, size, downsample=True, activation=False))
    x = draw(1, 2, 4, 4).requires_grad_()

    def squared(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,)).square()

    inputs = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(squared, inputs)
    assert torch.autograd.gradgradcheck(squared, inputs)


def test_channels_last_gives_the_same_numbers():
    layer = randomised(EqualizedConv2d(3, 4, 3, downsample=True))
    x = draw(2, 3, 8, 8)
    expected = [function(x) for function in (layer, downsample_fir, upsample_fir)]
    layer = layer.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    for function, value in zip((layer, downsample_fir, upsample_fir), expected, strict=True):
        torch.testing.assert_close(function(x), value, rtol=1e-12, atol=1e-12)


def test_compute_dtype_follows_autocast():
    x = torch.zeros(1, dtype=torch.float64)
    assert compute_dtype(x) == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert compute_dtype(x) == torch.float64
