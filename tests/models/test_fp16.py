"""Mixed precision: what runs in fp16, what keeps it from overflowing, and that nothing of it touches bf16 and fp32."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from duetgan.models.growing import GrowingDiscriminator
from duetgan.models.layers.fp16 import Fp16Config, LayerPrecision
from duetgan.models.layers.stylegan2 import DiscriminatorBlock, FromRGB
from duetgan.models.stylegan2 import StyledLayer, ToRGB
from tests.models import test_discriminator, test_generator
from tests.models.helpers import draw, randomised, styled

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
WIDE: dict[str, Any] = {"channel_base": 256, "channel_max": 16}


def fp16():
    return torch.autocast("cpu", dtype=FP16)


def build_generator(resolution=16, channels=3, **more):
    return test_generator.build(resolution, channels, z_dim=8, w_dim=8, mapping_layers=1, **WIDE, **more).float()


def build_discriminator(resolution=16, classes=0, channels=3, **more):
    return test_discriminator.build(resolution, channels, classes, **WIDE, **more).float()


def error(found, expected):
    assert found.dtype == FP32
    return ((found - expected).norm() / expected.norm()).item()


def outputs(layers, run, look):
    """`look` at the outputs of `layers` (name -> module) while `run` runs their network."""
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen.update({name: look(out)}))
        for name, layer in layers.items()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def dtypes(layers, run):
    return outputs(layers, run, lambda output: output.dtype)


@pytest.mark.parametrize("resolutions", [1, 4])
@pytest.mark.parametrize("architecture", ["residual", "plain"])
def test_networks_in_fp16_are_close_to_those_in_fp32(architecture, resolutions):
    generator = build_generator(fp16_resolutions=resolutions)
    network = build_discriminator(architecture=architecture, classes=2, fp16_resolutions=resolutions)
    images, labels = draw(4, 3, 16, 16).float(), torch.tensor([0, 1, 1, 0])
    for run in (lambda: generator(draw(4, 8).float()), lambda: network(images, labels)):
        expected = run()
        with fp16():
            assert 1e-6 < error(run(), expected) < 5e-3


@pytest.mark.parametrize(("resolutions", "lowest"), [(0, 64), (1, 32), (2, 16), (3, 8), (4, 8), (9, 8)])  # 4 px: never
def test_only_the_largest_resolutions_run_in_fp16(resolutions, lowest):
    generator = build_generator(32, channels=1, fp16_resolutions=resolutions)
    network = build_discriminator(32, channels=1, fp16_resolutions=resolutions)
    expected: dict[Any, Any] = {size: FP16 if size >= lowest else FP32 for size in (4, 8, 16, 32)}
    layers: dict[Any, Any] = {size: block.second for size, block in zip(expected, generator.blocks, strict=True)}
    with fp16():
        assert dtypes(layers, lambda: generator(draw(1, 8).float())) == expected
    layers = {size: block.second for size, block in zip([32, 16, 8], network.blocks, strict=True)}
    layers |= {"rgb": network.from_rgb, 4: network.last_conv, "hidden": network.last_linear}
    with fp16():
        found = dtypes(layers, lambda: network(draw(2, 1, 32, 32).float()))
    assert found == expected | {"rgb": expected[32], "hidden": FP32}
    growing = build_discriminator(32, channels=1, fp16_resolutions=resolutions, kind=GrowingDiscriminator)
    inputs = {32: growing.from_rgb} | {int(size): layer for size, layer in growing.from_rgbs.items()}
    for size in (32, 16, 8):
        growing.enter(size, 0.5)
        images = draw(2, 1, size, size).float()
        layers = {side: inputs[side] for side in (size, size // 2)}
        with fp16():
            found = dtypes(layers, lambda images=images: growing(images))
        assert found == {side: expected[side] for side in layers}


def test_no_resolution_in_fp16_is_fp32_to_the_bit():
    generator, network = build_generator(fp16_resolutions=0), build_discriminator(fp16_resolutions=0)
    with torch.no_grad():
        generator.blocks[1].second.bias.fill_(1e4)  # beyond the clamp, which goes with fp16
    z, images = draw(2, 8).float(), draw(2, 3, 16, 16).float()
    with fp16():
        found = generator(z), network(images)
    assert found[0].equal(generator(z))
    assert found[1].equal(network(images))


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_nothing_is_normalised_without_fp16(monkeypatch, dtype):
    def refuse(*_):
        raise AssertionError("normalised")

    monkeypatch.setattr("duetgan.models.layers.fp16.normalised_for_fp16", refuse)
    generator = build_generator().to(FP32 if dtype == BF16 else dtype)
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
        generator(draw(1, 8).to(generator.constant.dtype))
    with fp16(), pytest.raises(AssertionError, match="normalised"):
        build_generator()(draw(1, 8).float())


def test_r1_through_fp16_is_nearer_to_that_of_fp32_than_bf16s():
    network = build_discriminator()
    gradients = []
    for context, scale in ((nullcontext(), 1.0), (fp16(), 128.0), (torch.autocast("cpu", dtype=BF16), 1.0)):
        images = draw(4, 3, 16, 16).float().requires_grad_()
        with context:
            logits = network(images)
        (inner,) = torch.autograd.grad((logits * scale).sum(), images, create_graph=True)
        ((inner / scale).square().sum() * scale).backward()
        flat = [(p.grad / scale).flatten() for p in network.parameters() if p.grad is not None]
        gradients.append(torch.cat(flat))
        network.zero_grad()
    # second derivatives jump where rounding moves an activation across leaky ReLU's kink
    lost = [error(found, gradients[0]) for found in gradients[1:]]
    assert lost[0] < 0.25
    assert lost[0] < 0.5 * lost[1]


@pytest.mark.parametrize(("styles", "weights"), [(1e5, 1.0), (1.0, 1e5), (1e4, 1e4), (1e-6, 1e-6)])
@pytest.mark.parametrize("kind", ["styled", "upsampling", "rgb"])
def test_huge_and_tiny_styles_and_weights_stay_in_range(monkeypatch, kind, styles, weights):
    layer = ToRGB(16, 3, 8) if kind == "rgb" else StyledLayer(16, 16, 8, 8, upsample=kind == "upsampling")
    with torch.no_grad():
        randomised(layer).float()
        layer.conv.affine.weight.mul_(styles)
        layer.conv.affine.bias.mul_(styles)
        layer.conv.weight.mul_(weights)
    arguments = (10 * draw(2, 16, 8, 8).float(), draw(2, 8, key="w").float()) + (() if kind == "rgb" else (None,))
    expected = styled(layer, *arguments)
    with fp16():
        found = styled(layer, *arguments)
    assert error(found.float(), expected) < 5e-3
    if styles * weights > 1:  # the numbers are such that without the normalisation fp16 overflows
        monkeypatch.setattr("duetgan.models.layers.fp16.normalised_for_fp16", not_normalised)
        with fp16():
            assert not torch.isfinite(styled(layer, *arguments)).all()


def not_normalised(style, weight, scale, weight_gain):
    if scale is None:
        return style, weight * weight_gain, torch.ones(len(style), len(weight))
    return style, weight, scale


def test_a_large_style_that_meets_only_zeros_gives_no_nan():
    layer = StyledLayer(2, 2, 2, 4)
    with torch.no_grad():
        layer.conv.affine.weight.zero_()
        layer.conv.affine.bias.copy_(torch.tensor([1e6, 1e-3]))
        layer.conv.weight[:, 0] = 0
        layer.conv.weight[:, 1] = 1e6
    x = draw(1, 2, 4, 4).float()
    with fp16():
        assert torch.isfinite(styled(layer, x, torch.zeros(1, 2), None)).all()
    with torch.no_grad():
        layer.conv.affine.bias.zero_()
        layer.conv.weight.zero_()
    with fp16():
        assert styled(layer, x, torch.zeros(1, 2), None).eq(0).all()  # no division by a norm of zero


@pytest.mark.parametrize("residual", [False, True])
def test_p3_the_discriminators_convolutions_are_clamped_with_their_gain_and_the_skip_is_not(residual):
    config = Fp16Config(conv_clamp=2.0, clamp_always=True)
    block = randomised(DiscriminatorBlock(3, 3, LayerPrecision(config, 8, 8), residual=residual))
    x, limit, gain = 5 * draw(2, 3, 8, 8), 2.0, math.sqrt(0.5) if residual else 1.0
    y = block.second(block.first(x).clamp(-limit, limit)).clamp(-limit * gain, limit * gain)
    if block.skip is not None:
        skip = block.skip(x)
        assert skip.abs().max() > limit * gain
        y = y + skip
    torch.testing.assert_close(block(x), y, rtol=0, atol=0)
    config.clamp_always = False
    assert not torch.allclose(block(x), y)


def test_p3_the_clamp_acts_in_every_precision_where_that_is_asked_for():
    z, images = draw(2, 8).float(), 100 * draw(2, 3, 16, 16).float()
    for build, inputs in ((build_generator, z), (build_discriminator, images)):
        plain, always = build(conv_clamp=0.5), build(conv_clamp=0.5, clamp_always=True, fp16_resolutions=0)
        assert not always(inputs).equal(plain(inputs))
        free = build(clamp_always=True, conv_clamp=None)
        assert free(inputs).equal(plain(inputs))
        layers = {
            name: part for name, part in always.named_modules() if isinstance(part, (StyledLayer, ToRGB, FromRGB))
        }
        largest = outputs(layers, partial(always, inputs), lambda output: float(output.detach().abs().max()))
        assert largest == dict.fromkeys(layers, 0.5)
    last = build_discriminator(conv_clamp=1e-3, clamp_always=True)
    taken = []
    last.last_linear.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    last(images)
    assert float(taken[0].detach().abs().max()) == pytest.approx(1e-3)
