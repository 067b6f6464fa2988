"""StyleGAN3's generators against the paper's formulas in float64, with loops over taps and zeros between samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.extras.stylegan3.architectures import RECIPE
from duetgan.extras.stylegan3.filters import Resampler, lowpass
from duetgan.extras.stylegan3.networks import GeneratorRConfig, GeneratorTConfig, Stylegan3Generator, signals
from duetgan.models.layers.convolution import penalised
from duetgan.models.registry import ARCHITECTURES
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.models import reference
from tests.models.helpers import close, draw, gradients, randomised

TINY: dict[str, Any] = {"z_dim": 5, "w_dim": 6, "layers": 4, "critical_layers": 1, "margin": 2}
TINY |= {"channel_base": 24, "channel_max": 4}
KINDS = {"T": GeneratorTConfig, "R": GeneratorRConfig}


def build(kind="T", resolution=16, classes=0, channels=2, **more):
    """A generator in float64 whose parameters are all away from their start."""
    with forked(0, "init", "stylegan3"):
        config = KINDS[kind](**{**TINY, **more})
        network = randomised(Stylegan3Generator(config, resolution=resolution, channels=channels, classes=classes))
    for number, layer in enumerate(network.layers):
        layer.magnitude_ema.fill_(0.5 + 0.2 * number)
    return network


def bessel(x):
    """J1 by its integral over a period, where the sum over equal steps converges exponentially."""
    angles = np.linspace(0, 2 * math.pi, 200, endpoint=False)
    return np.cos(angles - x[..., None] * np.sin(angles)).mean(-1)


def kaiser_filter(taps, cutoff, half_width, rate, radial):
    """A filter of Kaiser's design (1974) for a transition band of 2 half_width, by its formulas; [taps, taps]."""
    attenuation = 2.285 * (taps - 1) * math.pi * 2 * half_width / (rate / 2) + 7.95
    beta = 0.0
    if attenuation > 50:
        beta = 0.1102 * (attenuation - 8.7)
    elif attenuation > 21:
        beta = 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    n = np.arange(taps) - (taps - 1) / 2
    window = np.i0(beta * np.sqrt(1 - (2 * n / (taps - 1)) ** 2))
    x = n / rate
    if radial:
        r = np.sqrt(x[:, None] ** 2 + x**2)
        kernel = bessel(2 * math.pi * cutoff * r) / r * window[:, None] * window
    else:
        line = np.sin(2 * math.pi * cutoff * x) / x * window
        kernel = line[:, None] * line
    return kernel / kernel.sum()


@pytest.mark.parametrize("radial", [False, True])
def test_filters_are_kaisers(radial):
    for taps, cutoff, half_width, rate in ((12, 2.0, 6.0, 32), (24, 5.3, 4.1, 64), (12, 16.0, 3.7, 64)):
        found = lowpass(taps, cutoff, half_width, rate, radial=radial)
        expected = kaiser_filter(taps, cutoff, half_width, rate, radial)
        np.testing.assert_allclose(found if radial else np.outer(found, found), expected, atol=1e-4 / taps**2)


def features(module, w):
    """The first signal of one sample, pixel by pixel."""
    freqs, phases, weight = (reference.array(x) for x in (module.freqs, module.phases, module.weight))
    cosine, sine, *shift = reference.array(module.affine.weight) @ w / math.sqrt(len(w)) + reference.array(
        module.affine.bias
    )
    length = math.hypot(cosine, sine)
    rotation = np.array([[cosine, -sine], [sine, cosine]]) / length
    transform = reference.array(module.transform)
    linear, offset = transform[:2, :2], transform[:2, 2]
    signal = module.signal
    waves = np.zeros((signal.channels, signal.size, signal.size))
    turned = np.linalg.norm(freqs @ rotation @ linear, axis=1)
    fade = np.clip((signal.rate / 2 - turned) / (signal.rate / 2 - signal.cutoff), 0, 1)
    for row in range(signal.size):
        for column in range(signal.size):
            point = (np.array([column, row]) - (signal.size - 1) / 2) / signal.rate
            source = rotation @ (linear @ point + offset - np.array(shift) / length)
            waves[:, row, column] = np.sin(2 * math.pi * (freqs @ source + phases)) * fade
    return np.tensordot(weight / math.sqrt(signal.channels), waves, 1)


def spread(x, factor):
    """Zeros between the samples of x [C, H, W]."""
    result = np.zeros((len(x), (x.shape[1] - 1) * factor + 1, (x.shape[2] - 1) * factor + 1))
    result[:, ::factor, ::factor] = x
    return result


def modulated(layer, x, w, *, demodulate):
    """Input gain, modulated convolution with a full border, bias."""
    weight = reference.array(layer.weight)
    fan_in = weight[0].size
    style = reference.array(layer.affine.weight) @ w / math.sqrt(len(w)) + reference.array(layer.affine.bias)
    weight = weight * style[None, :, None, None]
    scale = np.sqrt((weight**2).sum((1, 2, 3), keepdims=True)) if demodulate else math.sqrt(fan_in)
    weight = weight / scale / math.sqrt(layer.magnitude_ema.item())
    return reference.correlate(x, weight, pad=weight.shape[-1] - 1) + reference.array(layer.bias)[:, None, None]


def filtered(x, source, target, radial, clamp):
    """The leaky ReLU between its filters; the middle of the image stays the middle."""
    rate = 2 * max(source.rate, target.rate)
    up, down = rate // source.rate, rate // target.rate
    first = kaiser_filter(6 * up, source.cutoff, source.half_width, rate, False) * up**2
    last = kaiser_filter(6 * down, target.cutoff, target.half_width, rate, radial)
    x = reference.correlate(spread(x, up), reference.per_channel(first, len(x)), pad=6 * up - 1)
    middle, needed = (x.shape[1] - 1) / 2, down * (target.size - 1) + 6 * down
    start = middle - (needed - 1) / 2
    assert start == int(start)
    if start < 0:
        x = np.pad(x, [(0, 0), (int(-start),) * 2, (int(-start),) * 2])
        start = 0
    x = x[:, int(start) :, int(start) :][:, :needed, :needed]
    x = np.clip(reference.leaky(x), -clamp, clamp)
    return reference.correlate(x, reference.per_channel(last, len(x)), pad=0, stride=down)


def expected_images(network, ws):
    config, outputs = network.config, signals(network.config, network.resolution, network.channels)
    images = []
    for w in reference.array(ws):
        x = features(network.input, w[0])
        for number, layer in enumerate(network.layers):
            is_last = number == config.layers
            x = modulated(layer, x, w[number + 1], demodulate=not is_last)
            if not is_last:
                radial = config.radial_filters and number < config.layers - config.critical_layers
                x = filtered(x, outputs[max(0, number - 1)], outputs[number], radial, config.conv_clamp)
        images.append(np.clip(x, -config.conv_clamp, config.conv_clamp) * 0.25)
    return np.stack(images)


@pytest.mark.parametrize("kind", ["T", "R"])
def test_images_are_those_of_the_formulas(kind):
    network = build(kind, conv_clamp=3.0).eval()
    network.input.transform = torch.tensor([[0.8, -0.7, 0.3], [0.7, 0.9, -0.2], [0, 0, 1]]).double()
    ws = draw(2, network.num_ws, 6, key="ws")
    found = network.synthesis(ws, "none")
    expected = expected_images(network, ws)
    assert np.abs(expected).max() > 0.2
    close(found, expected, tolerance=1e-6)  # filters are kept in float32
    z = draw(3, 5, key="z")
    assert torch.equal(network(z, truncation_psi=0), network(0 * z, truncation_psi=0))
    assert torch.equal(network.mapping(z), network.mapping(z, None))  # as export.py --format folder calls it


def test_networks_for_1024_px_have_nvidias_parameters():
    """Counted in NVIDIA's classes; the paper gives 22.3 M for T."""
    sizes = [36, 36, 52, 52, 84, 148, 148, 276, 276, 532, 1044, 1044, 1044, 1024, 1024]
    with torch.device("meta"):
        for name, count in (("t", 22_313_167), ("r", 15_093_151)):
            entry = ARCHITECTURES[f"stylegan3-{name}"]
            network = entry.generator(entry.generator_config(), resolution=1024, channels=3, classes=0)
            assert sum(parameter.numel() for parameter in network.parameters()) == count
            assert [output.size for output in signals(network.config, 1024, 3)] == sizes
    assert_raises(UserError, "squares of 8, 16", signals, GeneratorTConfig(), "16x32", 3)
    assert_raises(UserError, "not 24", signals, GeneratorTConfig(), 24, 3)
    assert_raises(UserError, "critical_layers 4: give less", GeneratorTConfig, **{**TINY, "critical_layers": 4})
    assert RECIPE["loss"] == {"style_mixing": 0.0}


def test_a_shift_of_the_transform_shifts_the_image():
    """By whole pixels, as far as the filters let no alias pass: equivariance to translation (section 2)."""
    network = build("T", margin=10, layers=6, critical_layers=2, channel_base=64, channel_max=8).eval()
    ws = draw(1, 1, 6, key="ws").expand(1, network.num_ws, 6)
    still = network.synthesis(ws, "none")
    network.input.transform = torch.tensor([[1, 0, -4 / 16], [0, 1, 0], [0, 0, 1.0]]).double()
    moved = network.synthesis(ws, "none")
    off = (moved[..., 4:] - still[..., :-4]).square().mean() / still.var()
    assert off < 1e-3 < (moved[..., 4:] - still[..., 4:]).square().mean() / still.var()


def test_filters_have_second_derivatives_and_activations_can_be_recomputed():
    up = Resampler(lowpass(12, 2.0, 6.0, 32), 2, up=True)
    down = Resampler(lowpass(12, 2.0, 6.0, 32, radial=True), 2, up=False)
    x = draw(1, 2, 4, 5).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: down(up(x).square()), (x,))
    plain, recomputed = build("R"), build("R", activation_checkpointing=True)
    for network in (plain, recomputed):
        ws = draw(2, network.num_ws, 6, key="ws").requires_grad_()
        with penalised():
            (gradient,) = torch.autograd.grad(network.synthesis(ws, "none").square().sum(), ws, create_graph=True)
        gradient.square().sum().backward()
        assert not network.squares.any()  # passes of penalties do not count
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(recomputed)[name], gradient, rtol=1e-9, atol=1e-12)


def test_magnitudes_are_those_of_the_global_batch_in_any_micro_batches():
    networks = [build("T", magnitude_ema_beta=0.75, classes=3).train() for _ in range(2)]
    ws = draw(6, networks[0].num_ws, 6, key="ws")
    for network, sizes in zip(networks, ([6], [4, 2]), strict=True):
        for part in ws.split(sizes):
            network.synthesis(part, "none")
        with torch.no_grad():
            network.synthesis(5 * ws, "none")
        network.update_w_avg(ws[:, 0].mean(0))
        torch.testing.assert_close(network.w_avg, 0.002 * ws[:, 0].mean(0))
    one, two = networks
    first = torch.as_tensor(features_square(one, ws))
    assert one.layers[0].magnitude_ema.item() == pytest.approx(0.75 * 0.5 + 0.25 * first.item())
    before = [layer.magnitude_ema.clone() for layer in one.layers]
    for layer, other in zip(one.layers, two.layers, strict=True):
        torch.testing.assert_close(layer.magnitude_ema, other.magnitude_ema)
    one.update_w_avg(one.w_avg.clone())  # without a pass
    one.squares[:2] = torch.tensor([math.inf, math.nan])  # of a step whose update is masked
    one.squares[-1] = 6
    before[2:] = [0.75 * mean for mean in before[2:]]
    one.update_w_avg(one.w_avg.clone())
    assert all(torch.equal(a, layer.magnitude_ema) for a, layer in zip(before, one.layers, strict=True))


def test_magnitudes_are_those_of_all_ranks(monkeypatch):
    whole, first, second = (build("T", classes=3).train() for _ in range(3))
    ws = draw(6, whole.num_ws, 6, key="ws")
    for network, part in ((whole, ws), (first, ws[:2]), (second, ws[2:])):
        network.synthesis(part, "none")
    whole.update_w_avg(whole.w_avg)
    monkeypatch.setattr(collectives, "all_reduce_sum_", lambda squares: squares.add_(second.squares))
    first.update_w_avg(first.w_avg)
    for layer, other in zip(whole.layers, first.layers, strict=True):
        torch.testing.assert_close(layer.magnitude_ema, other.magnitude_ema)


def features_square(network, ws):
    return np.mean([features(network.input, w) ** 2 for w in reference.array(ws[:, 0])])


def test_bf16_and_fp16_draw_about_the_same():
    network = build("T", channel_base=64, channel_max=16).float().eval()
    ws = draw(2, network.num_ws, 6, key="ws").float()
    exact = network.synthesis(ws, "none")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found = network.synthesis(ws, "none")
        assert found.dtype == torch.float32
        assert (found - exact).square().mean().sqrt() < 0.05 * exact.std()
