import math

import pytest
import torch

from models.stylegan2 import Discriminator, DiscriminatorConfig
from training import losses
from utils.seeding import forked, generator

LOGITS = torch.tensor([-700.0, -3.0, 0.0, 0.5, 20.0, 700.0], dtype=torch.float64)


def softplus(x):
    """log(1 + e^x), without overflow."""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize(
    ("loss", "sign"),
    [(losses.generator_nonsaturating, -1), (losses.discriminator_fake, 1), (losses.discriminator_real, -1)],
)
def test_closed_forms(loss, sign):
    expected = torch.tensor([softplus(sign * x) for x in LOGITS.tolist()], dtype=torch.float64)
    torch.testing.assert_close(loss(LOGITS), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "sign"),
    [(losses.generator_nonsaturating, -1), (losses.discriminator_fake, 1), (losses.discriminator_real, -1)],
)
def test_gradients_are_sigmoids(loss, sign):
    logits = LOGITS.clone().requires_grad_()
    loss(logits).sum().backward()
    torch.testing.assert_close(logits.grad, sign * torch.sigmoid(sign * LOGITS), rtol=1e-12, atol=1e-12)


def draw(*shape):
    return torch.randn(shape, generator=generator(0, "test"), dtype=torch.float64)


def test_r1_of_a_linear_and_a_quadratic_critic():
    weights, images = draw(2, 3, 3), draw(4, 2, 3, 3).requires_grad_()
    linear = losses.squared_gradient_norm((images * weights).sum(dim=(1, 2, 3)), images)
    torch.testing.assert_close(linear, weights.square().sum().expand(4), rtol=1e-12, atol=1e-12)
    quadratic = losses.squared_gradient_norm(images.square().sum(dim=(1, 2, 3)) / 2, images)
    torch.testing.assert_close(quadratic, images.detach().square().sum(dim=(1, 2, 3)), rtol=1e-12, atol=1e-12)


def test_r1s_double_backward():
    # D(x) = sum(a x^2): R1 = 4 a^2 sum(x^2), its derivative by a is 8 a sum(x^2)
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    images = draw(3, 1, 2, 2).requires_grad_()
    penalty = losses.squared_gradient_norm((factor * images.square()).sum(dim=(1, 2, 3)), images)
    penalty.sum().backward()
    torch.testing.assert_close(factor.grad, (8 * factor * images.square().sum()).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [2.0**10, torch.tensor(2.0**16, dtype=torch.float64)])
def test_the_scale_leaves_value_and_gradient_alone(scale):
    def penalty_and_gradient(scale):
        factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        images = draw(3, 1, 2, 2).requires_grad_()
        penalty = losses.squared_gradient_norm((factor * images.pow(3)).sum(dim=(1, 2, 3)), images, scale)
        penalty.sum().backward()
        return penalty.detach(), factor.grad

    for found, expected in zip(penalty_and_gradient(scale), penalty_and_gradient(1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_scale_keeps_tiny_gradients_of_fp16():
    images = torch.full((2, 1, 1, 1), 0.5, dtype=torch.float16, requires_grad=True)

    def logits():
        return (images.square() * 1e-4).float().mul(1e-4).sum(dim=(1, 2, 3))  # its gradient underflows in fp16

    assert losses.squared_gradient_norm(logits(), images).eq(0).all()
    scaled = losses.squared_gradient_norm(logits(), images, 2.0**14)
    torch.testing.assert_close(scaled, torch.full((2,), 1e-16), rtol=0.02, atol=0)


def test_r1_has_one_value_a_sample_through_a_network():
    config = DiscriminatorConfig(channel_base=64, channel_max=3, minibatch_std_group=1)
    with forked(0, "init", "r1"):
        network = Discriminator(config, resolution=8, channels=1, classes=0).double()
    images = draw(4, 1, 8, 8).requires_grad_()
    whole = losses.squared_gradient_norm(network(images), images)
    assert whole.shape == (4,)
    for index in range(4):
        one = images[index : index + 1].detach().requires_grad_()
        torch.testing.assert_close(losses.squared_gradient_norm(network(one), one)[0], whole[index], rtol=1e-9, atol=0)
