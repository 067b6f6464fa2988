"""DCGAN with spectral norm: its layers' norms, what moves them, and its form."""

from typing import Any

import pytest
import torch

from duetgan.models import dcgan
from duetgan.training.gan.losses import squared_gradient_norm
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.models.helpers import same

SHAPE = {"resolution": 16, "channels": 1}


def networks(classes=3, width=4):
    with forked(0, "init", "dcgan"):
        generator = dcgan.DcganGenerator(dcgan.DcganGeneratorConfig(z_dim=6, width=width), classes=classes, **SHAPE)
        discriminator = dcgan.DcganDiscriminator(dcgan.DcganConfig(width=width), classes=classes, **SHAPE)
    return generator.double(), discriminator.double()


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
    weight = layer.weight.detach() / largest(layer)
    plain = torch.nn.functional.conv2d(x, weight, padding=1) if size else x @ weight.t()
    torch.testing.assert_close(layer(x).detach(), plain)
    layer(x).square().sum().backward()  # the norm is not a constant to the gradient: scaling W changes nothing
    assert layer.weight.grad is not None
    assert float((layer.weight.grad * layer.weight.detach()).sum()) == pytest.approx(0, abs=1e-9)


def test_every_layer_starts_at_norm_one_and_follows_updates_not_passes():
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


def test_the_slope_of_the_logits_is_bounded_and_widths_double_towards_4_px():
    discriminator = networks(classes=0)[1]
    images = torch.randn(8, 1, 16, 16, dtype=torch.float64, requires_grad=True)
    slopes = squared_gradient_norm(discriminator(images), images).sqrt().detach()
    # a kernel of norm 1 is a convolution of norm at most its side (1802.05957, section 2.1): 3 and, strided, 4 / 2
    assert 0 < float(slopes.max()) <= 3.0**3 * 2.0**2 * dcgan.GAIN**5
    assert dcgan.DcganConfig(width=64).widths(32) == [512, 256, 128, 64]
    assert dcgan.DcganConfig(width=64).widths(128) == [512, 512, 512, 256, 128, 64]
    for sizes in ({"width": 0}, {"width_max": 0}):
        with pytest.raises(UserError, match="must be"):
            dcgan.DcganConfig(**sizes)
    with pytest.raises(UserError, match="doubling a few pixels"):
        dcgan.DcganConfig().widths(15)
    with pytest.raises(UserError, match=r"truncation_psi 0\.5: DCGAN has no w"):
        networks()[0](torch.zeros(1, 6), None, truncation_psi=0.5)


@pytest.mark.parametrize("classes", [0, 3])
def test_no_sample_depends_on_another(classes):
    generator, discriminator = networks(classes)
    z = torch.randn(4, 6, dtype=torch.float64)
    labels: Any = torch.tensor([0, 1, 2, 1]) if classes else None
    images = generator(z, labels)
    assert images.shape == (4, 1, 16, 16)
    assert float(images.detach().abs().max()) <= 1
    logits = discriminator(images, labels)
    assert logits.shape == (4,)
    for index in range(4):
        row = slice(index, index + 1)
        alone = generator(z[row], None if labels is None else labels[row])
        torch.testing.assert_close(alone, images[row])
        torch.testing.assert_close(discriminator(alone, None if labels is None else labels[row]), logits[row])
    if classes:
        assert not generator(z, labels.flip(0)).allclose(images)
        mixed = torch.nn.functional.one_hot(labels, 3).double()
        torch.testing.assert_close(generator(z, mixed), images)
