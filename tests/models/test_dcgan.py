"""DCGAN with spectral norm: its layers' norms, what moves them, and its form."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from duetgan.models import dcgan
from duetgan.training.gan.losses import squared_gradient_norm
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.models.helpers import draw, randomised, same

SHAPE: dict[str, Any] = {"resolution": 16, "channels": 1}


def networks(classes=3, width=4, **changes):
    shape = {**SHAPE, **changes, "classes": classes}
    with forked(0, "init", "dcgan"):
        generator = dcgan.DcganGenerator(dcgan.DcganGeneratorConfig(z_dim=6, width=width), **shape)
        discriminator = dcgan.DcganDiscriminator(dcgan.DcganConfig(width=width), **shape)
    return generator.double(), discriminator.double()


def unit(x):
    return x / (x.square().mean(1, keepdim=True) + 1e-8).sqrt()


def spectral(layer, gain=1.0):
    """A layer's weight [outputs, inputs, ...] divided by u W v, times the gain."""
    return layer.weight * gain / estimate(layer)


@pytest.mark.parametrize("classes", [0, 3])
def test_images_and_logits_are_the_papers_also_of_rectangles(classes):
    """1802.05957, table 3, from maps of 4x6 pixels; the widths are 16, 8 and 4."""
    generator, network = map(randomised, networks(classes, resolution="24x16", channels=3))
    z, images, labels = draw(4, 6), draw(4, 3, 16, 24), torch.tensor([0, 2, 1, 1]) if classes else None
    x = z if labels is None else torch.cat([z, generator.embed.weight.T[labels]], 1)
    x = (x @ generator.linear.weight.T + generator.linear.bias).view(4, 16, 4, 6)
    for block in generator.blocks:
        x = F.conv_transpose2d(unit(x).relu(), block.weight, block.bias, stride=2, padding=1)
    x = F.conv2d(unit(x).relu(), generator.to_rgb.weight, generator.to_rgb.bias, padding=1).tanh()
    weights = None if labels is None else F.one_hot(labels, 3).double()
    for given in (labels, weights):
        torch.testing.assert_close(generator(z, given), x)
    assert (x.shape, len(network.layers)) == ((4, 3, 16, 24), 10)
    y = images
    for number, layer in enumerate(network.layers[::2]):
        strided = number % 2  # 4x4 with stride 2, after each 3x3 but the last
        y = F.conv2d(y, spectral(layer, 2**0.5), layer.bias, stride=1 + strided, padding=1)
        assert (layer.weight.shape[2], y.shape[1]) == (3 + strided, (4, 4, 8, 8, 16)[number])
        y = F.leaky_relu(y, 0.1)
    y = y.flatten(1) @ spectral(network.output).T + network.output.bias
    logits = y[:, 0]
    if labels is not None:
        embedded = spectral(network.embed).T[labels] + network.embed.bias
        logits = logits + (y[:, 1:] * embedded).sum(1)
    torch.testing.assert_close(network(images, labels), logits)


def layers_of(network):
    return [module for module in network.modules() if isinstance(module, dcgan.Spectral)]


def largest(layer):
    """A layer's largest singular value."""
    return float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2))


def estimate(layer):
    return float(layer.u @ layer.weight.detach().flatten(1) @ layer.v)


@pytest.mark.parametrize("size", [None, 3])
def test_the_weight_is_divided_by_its_largest_singular_value(size):
    with forked(0, "init", "spectral"):
        layer = dcgan.Spectral(5, 7, size).double()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape))
    for _ in range(300):
        layer.follow()
    assert estimate(layer) == pytest.approx(largest(layer), rel=1e-9)
    x = torch.randn(2, 5, *([6, 6] if size else []), dtype=torch.float64)
    layer(x).square().sum().backward()  # the norm is not a constant to the gradient: scaling W changes nothing
    assert layer.weight.grad is not None
    assert float((layer.weight.grad * layer.weight.detach()).sum()) == pytest.approx(0, abs=1e-9)


def test_every_layer_starts_at_norm_one_and_follows_updates_not_passes():
    embedding = networks(classes=1000)[0].embed.weight  # beside z, with its variance
    assert embedding.std().item() == pytest.approx(1, rel=0.05)
    discriminator = networks()[1]
    layers = layers_of(discriminator)
    assert [largest(layer) for layer in layers] == pytest.approx([1.0] * 7, abs=1e-5)
    images, labels = torch.randn(2, 1, 16, 16, dtype=torch.float64), torch.tensor([0, 2])
    before = {name: value.clone() for name, value in discriminator.state_dict().items()}
    assert discriminator(images, labels).equal(discriminator(images, labels))
    same(discriminator.state_dict(), before)
    with torch.no_grad():
        for parameter in discriminator.parameters():
            parameter.mul_(3).add_(torch.randn_like(parameter), alpha=0.05)
    discriminator.after_update()
    moved = {name for name, value in discriminator.state_dict().items() if not value.equal(before[name])}
    assert {name for name in before if name.endswith((".u", ".v"))} <= moved
    for layer in layers:
        assert estimate(layer) == pytest.approx(largest(layer), rel=0.15)


def test_bf16_between_the_first_and_the_last_layer_and_norms_in_fp32():
    generator, discriminator = (network.float() for network in networks())
    z, images, labels = draw(4, 6).float(), draw(4, 1, 16, 16).float(), torch.tensor([0, 2, 1, 1])
    seen: dict[str, torch.dtype] = {}
    for name, layer in (*generator.named_modules(), *discriminator.named_modules()):
        layer.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.dtype}))
    expected = generator(z, labels), discriminator(images, labels)
    layer = discriminator.layers[2]
    weight = layer.weight * (layer.gain / (layer.u @ layer.weight.flatten(1) @ layer.v))
    with torch.autocast("cpu", torch.bfloat16):
        found, x = (generator(z, labels), discriminator(images, labels)), discriminator.layers[:2](images)
        assert layer(x).equal(F.conv2d(x, weight, layer.bias, stride=2, padding=1))
    for reduced, full in zip(found, expected, strict=True):
        assert reduced.dtype == torch.float32
        assert 0 < (reduced - full).norm() / full.norm() < 0.03
    inside = {name for name, dtype in seen.items() if dtype == torch.bfloat16}
    assert inside == {"blocks.0", "blocks.1", "layers", *(f"layers.{number}" for number in range(10))}


def test_the_slope_of_the_logits_is_bounded_and_widths_double_towards_4_px():
    discriminator = networks(classes=0)[1]
    images = torch.randn(8, 1, 16, 16, dtype=torch.float64, requires_grad=True)
    slopes = squared_gradient_norm(discriminator(images), images).sqrt().detach()
    # a kernel of norm 1 is a convolution of norm at most its side (1802.05957, section 2.1): 3 and, strided, 4 / 2
    assert 0 < float(slopes.max()) <= 3.0**3 * 2.0**2 * dcgan.GAIN**5
    assert dcgan.DcganConfig(width=64).widths(32) == [512, 256, 128, 64]
    assert dcgan.DcganConfig(width=64).widths(128) == [512, 512, 512, 256, 128, 64]
    assert dcgan.DcganConfig(width=64, width_max=200).widths(64) == [200, 200, 200, 128, 64]
    for sizes in ({"width": 0}, {"width_max": 0}):
        with pytest.raises(UserError, match="must be"):
            dcgan.DcganConfig(**sizes)
    with pytest.raises(UserError, match="doubling a few pixels"):
        dcgan.DcganConfig().widths(15)
    with pytest.raises(UserError, match=r"truncation_psi 0\.5: DCGAN has no w"):
        networks()[0](torch.zeros(1, 6), None, truncation_psi=0.5)
