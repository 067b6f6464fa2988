"""The layers of both models: equalised, modulated, resampling, and BatchNorm in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from duetgan.models import batchnorm, layers
from duetgan.models.batchnorm import CPUSyncBatchNorm2d, SyncBatchNorm2d, synchronise_batchnorm
from duetgan.models.layers import (
    LEAKY_SLOPE,
    EqualizedConv2d,
    EqualizedLinear,
    blur_fir,
    downsample_fir,
    normalize_second_moment,
    pointwise,
    scaled_activation,
    scaled_together,
    upsample_fir,
)
from duetgan.models.stylegan2 import ModulatedConv2d, StyledLayer, modulate
from duetgan.utils.seeding import forked, generator
from tests.models import reference
from tests.models.helpers import close, draw, randomised, same, styled


def test_second_moments_of_zeros_and_convolutions_start_with_unit_variance():
    zeros = normalize_second_moment(torch.zeros(1, 4))
    assert zeros.eq(0).all()  # eps keeps a row of zeros from becoming NaN
    with forked(0, "init", "conv"):
        layer = EqualizedConv2d(64, 64, 3)
    assert layer.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize("lr_multiplier", [1.0, 0.01])
def test_equalised_linear_starts_with_unit_scale_and_the_given_bias(lr_multiplier):
    with forked(0, "init", "linear"):
        layer = EqualizedLinear(400, 300, bias_init=1.0, lr_multiplier=lr_multiplier)
    assert layer.weight.std().item() * lr_multiplier == pytest.approx(1.0, rel=0.02)
    outputs = layer(torch.randn(200, 400, generator=generator(0, "test")))
    assert outputs.mean().item() == pytest.approx(1.0, abs=0.03)  # the bias reaches the output whatever the multiplier
    assert outputs.std().item() == pytest.approx(1.0, rel=0.05)


def test_no_products_remain_after_an_error(monkeypatch):
    """A step whose capture or measurement is broken off is followed by others with the same networks."""
    network = nn.Sequential(EqualizedLinear(2, 2), EqualizedLinear(2, 2).requires_grad_(False))
    monkeypatch.setattr(layers, "twice", Mock(side_effect=[layers.twice(list(network[0].parameters())), KeyError]))
    with pytest.raises(KeyError), scaled_together(network):
        pytest.fail("the block ran")
    assert [layer.ready for layer in network] == [None, None]


def activation_inputs(*, noise, dtype=torch.float64):
    """x, scale, bias and noise (or None) for `scaled_activation`, wanting gradients."""
    shapes = {"x": (2, 3, 4, 5), "scale": (2, 3, 1, 1), "bias": (3,), "noise": (2, 1, 4, 5)}
    found = [draw(*shape, key=name).to(dtype).requires_grad_() for name, shape in shapes.items()]
    return found if noise else [*found[:3], None]


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_scaled_activation(noise, layout):
    x, scale, bias, extra = activation_inputs(noise=noise)
    arrays = [t.detach().numpy() for t in (x, scale, bias)]
    sums = arrays[0] * arrays[1] + arrays[2][:, None, None] + (extra.detach().numpy() if noise else 0)
    found = scaled_activation(x.to(memory_format=layout), scale, bias, extra, limit=None)
    close(found, np.where(sums > 0, sums, LEAKY_SLOPE * sums))
    assert found.is_contiguous(memory_format=layout)
    function = partial(scaled_activation, limit=None)
    assert torch.autograd.gradcheck(function, (x, scale, bias, extra))
    assert torch.autograd.gradgradcheck(function, (x, scale, bias, extra))


def test_scaled_activation_makes_only_the_gradients_that_are_wanted():
    x, scale, bias, _ = activation_inputs(noise=False)
    y = scaled_activation(x, scale.detach(), bias.detach(), None, limit=None)
    y.sum().backward()
    assert x.grad is not None
    assert scale.grad is None
    x, scale, bias, _ = activation_inputs(noise=False)
    scaled_activation(x.detach(), scale, bias.detach(), None, limit=None).sum().backward()
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


FORMS = [(3, True, False), (3, True, True), (1, True, False), (1, False, False), (3, False, False), (3, False, True)]


def whole(layer, x, w, gain=1.0):
    """The convolution's output with the demodulation applied."""
    modulation = modulate([layer], [w], [x.dtype], gain)[0]
    out = layer(x, modulation)
    return out if modulation.scale is None else out * modulation.scale


@pytest.mark.parametrize("style", [1.0, 1e-4])  # so small that 1e-8 decides: one on unscaled weights would be seen
@pytest.mark.parametrize(("size", "demodulate", "upsample"), FORMS)
def test_modulated_convolution_equals_the_fused_form_sample_by_sample(size, demodulate, upsample, style):
    layer = randomised(ModulatedConv2d(3, 5, size, 6, demodulate=demodulate, upsample=upsample))
    with torch.no_grad():
        layer.affine.weight.mul_(style)
        layer.affine.bias.mul_(style)
    x, w = draw(4, 3, 5, 4), draw(4, 6, key="w")
    expected = reference.modulated(layer, x.numpy(), w.numpy(), demodulate=demodulate, upsample=upsample)
    close(whole(layer, x, w), expected, 1e-10)


def test_style_starts_at_one_and_demodulated_output_has_the_gain_as_its_scale():
    layer = randomised(ModulatedConv2d(3, 5, 3, 6))
    x, w = draw(2, 3, 4, 4), draw(2, 6, key="w")
    torch.testing.assert_close(whole(layer, x, w, 1.7), 1.7 * whole(layer, x, w), rtol=1e-12, atol=1e-12)
    with forked(0, "init", "modulated"):
        layer = ModulatedConv2d(64, 64, 3, 16).double()
    assert layer.affine(torch.zeros(1, 16).double()).eq(1).all()
    x = draw(2, 64, 16, 16)
    for factor in (1.0, 50.0):
        out = whole(layer, x, factor * draw(2, 16, key="w"))
        assert out[:, :, 1:-1, 1:-1].std().item() == pytest.approx(1.0, rel=0.05)


def test_noise_has_no_effect_at_the_start():
    layer = StyledLayer(3, 4, 5, 8).double()
    x, w, noise = draw(2, 3, 8, 8), draw(2, 5, key="w"), draw(2, 1, 8, 8, key="noise")
    torch.testing.assert_close(styled(layer, x, w, noise), styled(layer, x, w, None), rtol=0, atol=0)
    styled(layer, x, w, noise).sum().backward()
    assert layer.noise_strength.grad is not None
    assert layer.noise_strength.grad != 0


def test_under_autocast_the_style_and_demodulation_stay_in_single_precision():
    with forked(0, "init", "autocast"):
        layer = StyledLayer(16, 16, 8, 8)
    x, w = draw(2, 16, 8, 8).float(), draw(2, 8, key="w").float()
    expected = styled(layer, x, w, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = styled(layer, x, w, None)
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 0.01
    # a huge style overflows no square: energies are not summed in reduced precision
    with torch.autocast("cpu", dtype=torch.float16):
        scale = modulate([layer.conv], [w * 1e3], [torch.float16], gain=1.0)[0].scale
    assert scale is not None
    assert torch.isfinite(scale).all()
    assert scale.min() > 0


CASES = {
    "blur 0": (lambda x: blur_fir(x, padding=0), lambda x: reference.blur(x, pad=0)),
    "blur 1": (lambda x: blur_fir(x, padding=1, gain=4.0), lambda x: reference.blur(x, pad=1, gain=4.0)),
    "blur 2": (lambda x: blur_fir(x, padding=2), lambda x: reference.blur(x, pad=2)),
    "blur 3": (lambda x: blur_fir(x, padding=3, gain=0.5), lambda x: reference.blur(x, pad=3, gain=0.5)),
    "down": (downsample_fir, reference.down),
    "up": (upsample_fir, reference.up),
}
each_case = pytest.mark.parametrize("name", CASES)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def matrix(oracle, shape):
    """The oracle as a matrix: its answers to the unit images [C, H, W] in the columns."""
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    return np.stack([oracle(unit).reshape(-1) for unit in units], axis=1)


@pytest.fixture(params=["convolution", "sums"])
def low_pass(request, monkeypatch):
    """As on the CPU, and as on GPUs without Triton."""
    monkeypatch.setattr(layers, "uses_sums", lambda _: request.param == "sums")


@pytest.mark.usefixtures("low_pass")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in CASES for size in ((4, 6), (8, 4))),
        *((name, (5, 7)) for name in CASES if name != "down"),  # odd sides cannot be halved
        *(("down", (2, 2)), ("up", (1, 1)), ("up", (1, 3))),
    ],
)
def test_values_up_to_the_borders(name, size, layout):
    function, oracle = CASES[name]
    x = draw(2, 3, *size)
    expected = np.stack([oracle(image) for image in x.numpy()])
    x = x.to(memory_format=layout)
    found = function(x)
    close(found, expected)
    close(function(x.clone().requires_grad_()), expected)  # with a graph
    assert found.shape == expected.shape
    assert found.is_contiguous(memory_format=layout)


@pytest.mark.usefixtures("low_pass")
@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_gradient_is_the_transposed_matrix_and_its_gradient_the_matrix(name, layout):
    function, oracle = CASES[name]
    x = draw(1, 2, 4, 6).to(memory_format=layout).requires_grad_()
    y = function(x)
    dense = matrix(oracle, (2, 4, 6))
    outer = draw(*y.shape, key="outer").to(memory_format=layout).requires_grad_()
    before = x.detach().clone(), outer.detach().clone()
    (grad,) = torch.autograd.grad(y, x, outer, create_graph=True)
    assert all(a.equal(b) for a, b in zip((x, outer), before, strict=True))
    assert all("Resample" in type(tensor.grad_fn).__name__ for tensor in (y, grad))  # a node of our own
    close(grad.reshape(-1), dense.T @ outer.detach().reshape(-1).numpy())
    assert grad.is_contiguous(memory_format=layout)
    again = draw(*x.shape, key="again")
    (second,) = torch.autograd.grad(grad, outer, again)
    close(second.reshape(-1), dense @ again.reshape(-1).numpy())


@pytest.mark.usefixtures("low_pass")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_lower_precisions_round_the_same_numbers(name, layout, dtype):
    function, _ = CASES[name]
    x = draw(2, 8, 8, 8).to(dtype).to(memory_format=layout).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, expected = function(x), function(exact)
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    outer = draw(*found.shape, key="outer").to(dtype)
    (grad,), (exact_grad,) = torch.autograd.grad(found, x, outer), torch.autograd.grad(expected, exact, outer.double())
    assert grad.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps * exact_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=tolerance)


@each_case
def test_cudas_autocast_leaves_the_type_as_it_is(name):
    torch.set_autocast_enabled("cuda", True)  # tensors without numbers ask it, no GPU is needed
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            assert CASES[name][0](torch.ones(1, 1, 4, 4, dtype=torch.bfloat16, device="cuda")).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)  # as it was


@each_case
def test_plain_operators_where_there_is_no_graph(name, monkeypatch):
    monkeypatch.setattr(layers, "_Resample", None)  # not looked at
    function, _ = CASES[name]
    function(torch.ones(1, 1, 4, 4))
    with torch.no_grad():
        function(torch.ones(1, 1, 4, 4, requires_grad=True))


CPU = torch.device("cpu")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_alone_it_is_batchnorm(momentum, affine, monkeypatch):
    layers = [kind(3, momentum=momentum, affine=affine).double() for kind in (CPUSyncBatchNorm2d, nn.BatchNorm2d)]
    found: list[list[torch.Tensor]] = [[], []]
    for layer, values in zip(layers, found, strict=True):
        for step in range(3):
            x = draw(4, 3, 2, 2, key=f"{step}").requires_grad_()
            output = layer(x)
            output.pow(3).sum().backward()
            values += [output, x.grad]
        values.append(layer.eval()(draw(2, 3, 2, 2, key="evaluation")))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    same(layers[0].state_dict(), layers[1].state_dict())
    monkeypatch.setattr(batchnorm, "perform", lambda _: None)  # a sum over one rank
    layer, values = CPUSyncBatchNorm2d(3, momentum=momentum, affine=affine).double(), []
    for step in range(3):
        x = draw(4, 3, 2, 2, key=f"{step}").requires_grad_()
        output = layer.synchronised(x)
        output.pow(3).sum().backward()
        values += [output, x.grad]
    torch.testing.assert_close(values, found[1][:-1])
    torch.testing.assert_close(dict(layer.state_dict()), dict(layers[1].state_dict()))


class Formulas:
    """torch's CUDA kernels of BatchNorm."""

    @staticmethod
    def batch_norm_stats(x, eps):
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(_x, means, deviations, running_mean, running_var, momentum, eps, counts):
        n, fractions = counts.sum(), (counts / counts.sum())[:, None]
        mean = (fractions * means).sum(0)
        variance = (fractions * (deviations**-2 - eps + means**2)).sum(0) - mean**2
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * n / (n - 1), momentum)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(x, weight, bias, mean, deviation, eps):
        return F.batch_norm(x, mean, deviation**-2 - eps, weight, bias, eps=eps)

    @staticmethod
    def batch_norm_backward_reduce(grad, x, mean, deviation, _weight, _for_x, for_weight, for_bias):
        total, products = grad.sum((0, 2, 3)), (grad * (x - mean[:, None, None])).sum((0, 2, 3))
        return total, products, products * deviation if for_weight else None, total if for_bias else None

    @staticmethod
    def batch_norm_backward_elemt(grad, x, mean, deviation, weight, total, products, counts):
        slope = products * deviation**2 / counts.sum()
        gain = deviation if weight is None else deviation * weight
        centred = grad - (total / counts.sum())[:, None, None] - (x - mean[:, None, None]) * slope[:, None, None]
        return centred * gain[:, None, None]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [CPUSyncBatchNorm2d, SyncBatchNorm2d])
def test_two_ranks_of_different_sizes_are_one(kind, affine, monkeypatch):
    """Threads in place of processes."""
    barrier, sent = threading.Barrier(2, timeout=10), {}

    def perform(operation: Any) -> None:
        sent[threading.get_ident()] = operation.args[-1].clone()
        barrier.wait()
        everyone = torch.stack(list(sent.values()))
        barrier.wait()
        operation.args[0].copy_(everyone.sum(0) if operation.func is dist.all_reduce else everyone.flatten())

    for name in (name for name in vars(Formulas) if name.startswith("batch_norm")):
        monkeypatch.setattr(torch, name, getattr(Formulas, name))
    monkeypatch.setattr(batchnorm, "perform", perform)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    whole, *ranks = (each(3, eps=0.1, momentum=0.3, affine=affine).double() for each in (nn.BatchNorm2d, kind, kind))
    randomised(whole)
    x, outer = draw(8, 3, 2, 2), draw(8, 3, 2, 2, key="outer")

    def train(layer: Any, rows: slice) -> list[torch.Tensor]:
        images = x[rows].clone().requires_grad_()
        output = layer(images)
        output.backward(outer[rows])
        return [output.detach(), images.grad]

    for layer in ranks:
        layer.load_state_dict(whole.state_dict())
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(train, ranks, [slice(0, 3), slice(3, 8)]))
    torch.testing.assert_close([torch.cat(parts) for parts in zip(*found, strict=True)], train(whole, slice(0, 8)))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sum(getattr(layer, name).grad for layer in ranks), parameter.grad)
    for layer in ranks:
        torch.testing.assert_close(dict(layer.named_buffers()), dict(whole.named_buffers()))
    torch.testing.assert_close(train(ranks[0].eval(), slice(0, 3)), train(whole.eval(), slice(0, 3)))  # alone


def test_accelerators_get_torchs_kernels():
    model = synchronise_batchnorm(nn.Sequential(nn.BatchNorm2d(2)), torch.device("cuda"))
    assert [type(child) for child in model.children()] == [SyncBatchNorm2d]


def test_a_synchronised_layer_after_frozen_ones_has_gradients_of_its_parameters_alone(monkeypatch):
    """Without a gradient for x there are no sums to exchange."""
    gradients = (torch.ones(2), torch.zeros(2))
    monkeypatch.setattr(torch, "batch_norm_backward_reduce", lambda *_: (None, None, *gradients))
    saved = (torch.zeros(3, 2, 4, 4), *torch.zeros(4, 2))
    context: Any = SimpleNamespace(saved_tensors=saved, needs_input_grad=(False, True, True, False))
    assert batchnorm._Synchronised.backward(context, torch.zeros(3, 2, 4, 4)) == (None, *gradients, None)
