import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from duetgan.models import r3gan
from duetgan.models.r3gan import R3Discriminator, R3DiscriminatorConfig, R3Generator, R3GeneratorConfig
from duetgan.training.gan.losses import squared_gradient_norm
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator
from tests.conftest import assert_raises
from tests.models import reference
from tests.models.helpers import draw, gradients, randomised, same

TINY: dict[str, Any] = {"width": 4, "cardinality": 2, "blocks": 1, "expansion": 2}


def build_g(resolution=8, channels=1, classes=0, **more):
    """A generator in float64 whose parameters are all away from their start."""
    with forked(0, "init", "generator"):
        config = R3GeneratorConfig(**{**TINY, "z_dim": 5, "embed_dim": 3, **more})
        return randomised(R3Generator(config, resolution=resolution, channels=channels, classes=classes))


def build_d(resolution=8, channels=1, classes=0, **more):
    """A discriminator in float64 whose parameters are all away from their start."""
    with forked(0, "init", "discriminator"):
        config = R3DiscriminatorConfig(**{**TINY, **more})
        return randomised(R3Discriminator(config, resolution=resolution, channels=channels, classes=classes))


def stages_by_hand(stages, x, resample):
    """Leaky ReLUs have no gain; below 8 px there are 2 groups, above it half as many."""
    for number, stage in enumerate(stages):
        if stage.change is not None:  # its place among the resampling shows in no number
            x = F.conv2d(x, stage.change.weight)
        if number:
            x = torch.from_numpy(np.stack([resample(image) for image in x.detach().numpy()]))
        for block in stage.blocks:
            groups = 1 if x.shape[2] == 16 else 2
            y = F.leaky_relu(F.conv2d(x, block.expand.weight, block.expand.bias), 0.2)
            y = F.leaky_relu(F.conv2d(y, block.group.weight, block.group.bias, padding=1, groups=groups), 0.2)
            x = x + F.conv2d(y, block.reduce.weight)
    return x


@pytest.mark.parametrize("classes", [0, 3])
def test_images_and_logits_are_the_formulas_also_of_rectangles(classes):
    """From maps of 4x6 pixels; a label of no class has a constant embedding."""
    sizes: Any = {"full_width_up_to": 8, "blocks": 2}
    g = build_g("24x16", 3, classes, **sizes)
    d = build_d("24x16", 3, classes, **sizes, embed_dim=7 if classes else None)
    z, images = draw(3, 5), draw(3, 3, 16, 24)
    labels: Any = torch.eye(3).double()[[2, 0, 1]] if classes else None
    x = z if labels is None else torch.cat([z, labels @ g.embed.weight.T], 1)
    x = (x @ g.linear.weight.T)[:, :, None, None] * g.basis
    assert x.shape == (3, 4, 4, 6)
    expected = F.conv2d(stages_by_hand(g.stages, x, reference.up), g.to_rgb.weight)
    torch.testing.assert_close(g(z, labels), expected)
    y = stages_by_hand(d.stages, F.conv2d(images, d.from_rgb.weight), reference.down)
    y = (y * d.basis).sum((2, 3)) @ d.output.weight.T
    embedded = torch.ones(3, 1).double()
    if labels is not None:
        labels[1] = 0
        embedded = labels @ d.embed.weight.T
        embedded[1] = 1 / math.sqrt(7)
    torch.testing.assert_close(d(images, labels), (y * embedded).sum(1))


def numbers(network):
    return sum(parameter.numel() for parameter in network.parameters())


def test_parameters_and_widths_are_those_of_the_papers_networks():
    """P7: the paper's network for ImageNet at 64 px has its full width there."""
    # published: 20.8M and 21.3M for CIFAR-10 with labels
    with torch.device("meta"):
        shape: dict[str, int] = {"resolution": 32, "channels": 3, "classes": 10}
        assert numbers(R3Generator(R3GeneratorConfig(), **shape)) == 20_781_952
        assert numbers(R3Discriminator(R3DiscriminatorConfig(), **shape)) == 21_280_512
        block = 2 * 768 * 1536 + 1536 * 16 * 9 + 2 * 1536
        shape = {"resolution": 32, "channels": 1, "classes": 0}
        assert numbers(R3Generator(R3GeneratorConfig(), **shape)) == 8 * block + 768 * 16 + 64 * 768 + 768
        assert numbers(R3Discriminator(R3DiscriminatorConfig(), **shape)) == 8 * block + 768 * 16 + 768 + 768
    halved = [(64, 384, 48), (128, 192, 24), (256, 96, 12)]
    assert R3GeneratorConfig().sizes(256) == [*((size, 768, 96) for size in (4, 8, 16, 32)), *halved]
    assert R3DiscriminatorConfig(width=64, cardinality=16).sizes(8) == [(4, 64, 16), (8, 64, 16)]
    sizes = R3DiscriminatorConfig(width=1536, cardinality=96, full_width_up_to=64).sizes(64)
    assert sizes == [(side, 1536, 96) for side in (4, 8, 16, 32, 64)]
    assert R3DiscriminatorConfig(width=16, cardinality=4, full_width_up_to=64).sizes(128)[-1] == (128, 8, 2)


@pytest.mark.parametrize("classes", [0, 10])
@pytest.mark.parametrize("resolution", [32, 64])
def test_start_of_the_parameters(resolution, classes):
    sizes: dict[str, Any] = {"width": 64, "cardinality": 4, "embed_dim": 300}
    shape: dict[str, int] = {"resolution": resolution, "channels": 3, "classes": classes}
    with forked(0, "init", "start"):
        generator = R3Generator(R3GeneratorConfig(**sizes, z_dim=200), **shape)
        discriminator = R3Discriminator(R3DiscriminatorConfig(**sizes), **shape)
    count = 2 * (4 if resolution == 32 else 5)  # blocks in all
    for network, basis_fan_in in ((generator, 1), (discriminator, 16)):
        for name, parameter in network.named_parameters():
            if name.endswith("bias") or "reduce" in name:
                assert parameter.eq(0).all(), name
                continue
            gain = math.sqrt(2 / 1.04) / count**0.25 if ".blocks." in name else 1.0
            if name == "embed.weight" and network is discriminator:
                gain = 1 / math.sqrt(300)
            sigma = gain / math.sqrt(basis_fan_in if name == "basis" else parameter[0].numel())
            off = 5 * sigma / math.sqrt(parameter.numel())
            assert parameter.std().item() == pytest.approx(sigma, abs=off / math.sqrt(2)), name
            assert abs(parameter.mean().item()) < off, name


def test_samples_have_the_scale_of_images_at_the_start():
    with forked(0, "init", "identity"):
        network = R3Generator(R3GeneratorConfig(width=32, cardinality=4), resolution=32, channels=3, classes=0)
    assert 0.3 < network(torch.randn(16, 64, generator=generator(0, "test"))).std().item() < 1.5


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def penalised(network, images, labels, dtype=None):
    """The gradients of R3GAN's whole discriminator loss, by parameter."""
    network.zero_grad()
    real, fake = (image.clone().requires_grad_() for image in images)
    with autocast(dtype):
        logits = network(real, labels), network(fake, labels)
    penalty = squared_gradient_norm(logits[0], real) + squared_gradient_norm(logits[1], fake)
    (torch.nn.functional.softplus(logits[1] - logits[0]) + 0.5 * penalty).mean().backward()
    return gradients(network)


def drawn(network, z, labels, dtype=None):
    """The gradients of a loss of the images, by parameter, and the images."""
    network.zero_grad()
    with autocast(dtype):
        images = network(z, labels)
    images.square().sum().backward()
    return gradients(network) | {"images": images}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("build", "run", "shape"), [(build_g, drawn, [2, 5]), (build_d, penalised, [2, 2, 3, 64, 64])])
def test_checkpointing_changes_no_bit_of_the_gradients(build, run, shape, dtype):
    network, labels = build(64, 3, 2, blocks=2, width=8, cardinality=4).float(), torch.tensor([0, 1])
    expected = run(network, draw(*shape).float(), labels, dtype)
    assert not network.stages.recompute
    assert build(activation_checkpointing=True).stages.recompute
    network.stages.recompute = True
    same(run(network, draw(*shape).float(), labels, dtype), expected)
    assert all(gradient.isfinite().all() for gradient in expected.values())


def test_the_generator_takes_no_noise_and_state_dict_names_stay():
    network, z = build_g(), draw(2, 5)
    assert network.noise_shapes() == []
    noises: list[Any] = ["random", "const", []]
    for noise in noises:
        assert network(z, noise=noise, truncation_psi=1.0, truncation_cutoff=3).equal(network(z))
    assert_raises(UserError, r"truncation_psi 0\.7: R3GAN has no w to truncate", network, z, truncation_psi=0.7)
    for build in (build_g, build_d):
        assert build(expansion=3).stages[0].blocks[0].group.weight.shape == (12, 6, 3, 3)
    block = [
        f"blocks.0.{name}" for name in ("expand.weight", "expand.bias", "group.weight", "group.bias", "reduce.weight")
    ]
    for network, own in (
        (build_g(64, 1, 2), ["embed.weight", "linear.weight", "basis", "to_rgb.weight", "stages.4.change.weight"]),
        (build_d(64, 1, 2), ["from_rgb.weight", "basis", "output.weight", "embed.weight", "stages.1.change.weight"]),
    ):
        assert set(network.state_dict()) == {*own, *(f"stages.{stage}.{name}" for stage in range(5) for name in block)}


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 8, 8), (1, 8, 4)])
def test_the_discriminator_refuses_other_images(shape):
    with pytest.raises(ValueError, match=r"for a discriminator of \(1, 8, 8\)"):
        build_d()(draw(2, *shape))


def test_bf16_in_the_stages_and_fp32_outside_them():
    sizes: dict[str, Any] = {"width": 32, "cardinality": 4}
    shape: dict[str, int] = {"resolution": 16, "channels": 3, "classes": 2}
    with forked(0, "init", "bf16"):
        g = R3Generator(R3GeneratorConfig(**sizes), **shape)
        d = R3Discriminator(R3DiscriminatorConfig(**sizes), **shape)
    with torch.no_grad():
        for parameter in (*g.parameters(), *d.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator(0, "test", parameter.numel())))
    seen: dict[str, set[torch.dtype]] = {}
    for name, module in (*g.named_modules(), *d.named_modules()):
        if isinstance(module, (r3gan.Linear, r3gan.Stage, r3gan.Convolution)):
            kinds = seen.setdefault(name.split(".")[0], set())
            module.register_forward_hook(lambda _, __, output, kinds=kinds: kinds.add(output.dtype))
    z, labels = draw(4, 64).float(), torch.tensor([0, 1, 1, 0])
    images = g(z, labels)
    expected = images, d(images, labels)
    for kinds in seen.values():
        kinds.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, hidden = (g(z, labels), d(images, labels)), d.hidden(images)
    assert {x.dtype for x in (*found, hidden)} == {torch.float32}
    inside = ("from_rgb", "stages")
    assert seen == {kind: {torch.bfloat16 if kind in inside else torch.float32} for kind in seen}
    assert seen.keys() == {*inside, "embed", "linear", "to_rgb", "output"}
    for reduced, full in zip(found, expected, strict=True):
        assert 0 < (reduced - full).norm() / full.norm() < 0.03


def test_channels_last_is_kept_through_the_stages_and_changes_no_number():
    g, d, labels = build_g(32, 3, 2), build_d(32, 3, 2), torch.tensor([0, 1])
    z, images = draw(2, 5), draw(2, 3, 32, 32)
    expected = g(z, labels), d(images, labels)
    layouts = []
    for network in (g, d):
        network.to(memory_format=torch.channels_last)
        for stage in network.stages:
            for block in stage.blocks:
                block.register_forward_hook(
                    lambda _, __, x: layouts.append(x.is_contiguous(memory_format=torch.channels_last))
                )
    torch.testing.assert_close(g(z, labels), expected[0], rtol=1e-10, atol=1e-10)
    images = images.to(memory_format=torch.channels_last)
    torch.testing.assert_close(d(images, labels), expected[1], rtol=1e-10, atol=1e-10)
    assert layouts == [True] * 8


@pytest.mark.parametrize(
    ("settings", "resolution", "message"),
    [
        ({"width": 0}, 8, "^width 0: must be greater than 0"),
        ({"blocks": 0}, 8, "^blocks 0: must be greater than or equal to 1"),
        ({"cardinality": -1}, 8, "^cardinality -1: must be greater than 0"),
        ({"expansion": 0}, 8, "^expansion 0: must be greater than 0"),
        ({"embed_dim": 0}, 8, "^embed_dim 0: must be"),
        ({"width": 10, "cardinality": 3}, 8, r"^cardinality 3 does not divide the 20 channels .* a divisor of 20"),
        ({}, 15, "resolution 15: doubling a few pixels never"),
        ({}, 4, "resolution 4: doubling a few pixels never"),
        ({"width": 12, "cardinality": 8}, 256, "width 12 is halved .* make it a multiple of 8 for 256 px"),
        ({"width": 16, "cardinality": 4}, 256, "cardinality 4 is halved .* make it a multiple of 8 for 256 px"),
    ],
)
def test_sizes_that_do_not_work(settings, resolution, message):
    for build in (build_g, build_d):
        assert_raises(UserError, message, build, resolution, **settings)


def test_widths_halve_with_every_doubling_above_a_size_also_for_96_px():
    sizes = R3GeneratorConfig(width=64, cardinality=16, full_width_up_to=16).sizes(96)
    assert [(side, width) for side, width, _ in sizes if side > 12] == [(24, 64), (48, 32), (96, 16)]
    assert all(width == 4 * cardinality for _, width, cardinality in sizes)
