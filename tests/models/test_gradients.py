"""First and second derivatives of every part of StyleGAN2, and of both whole networks, against finite differences.

With respect to the inputs and to all parameters: R1 and path-length regularisation train on second derivatives.
"""

import pytest
import torch
from torch.func import functional_call

from duetgan.models.layers import EqualizedConv2d, EqualizedLinear, normalize_second_moment
from duetgan.models.layers.stylegan2 import DiscriminatorBlock, MappingNetwork, StyledLayer, SynthesisBlock, ToRGB
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.utils.seeding import forked
from tests.models.test_layers import draw, randomised


def check(module, inputs, *, fast=False, **options):
    """gradcheck and gradgradcheck of module(*inputs, **options); inputs are floating point, or passed as they are."""
    names = [name for name, _ in module.named_parameters()]
    differentiable = [x.clone().requires_grad_() for x in inputs]

    def output(*tensors):
        values, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        found = functional_call(module, dict(zip(names, parameters, strict=True)), values, options)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(x.tanh() for x in found)  # curved, so that what is linear has a second derivative, too

    tensors = (*differentiable, *(p.detach().clone().requires_grad_() for p in module.parameters()))
    assert torch.autograd.gradcheck(output, tensors, fast_mode=fast)
    assert torch.autograd.gradgradcheck(output, tensors, fast_mode=fast)


def test_second_moment_normalisation():
    x = draw(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(normalize_second_moment, (x,))
    assert torch.autograd.gradgradcheck(normalize_second_moment, (x,))


@pytest.mark.parametrize("activation", [False, True])
def test_linear(activation):
    check(randomised(EqualizedLinear(3, 2, lr_multiplier=0.5, activation=activation)), (draw(3, 3),))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("activation", [False, True])
def test_convolution(size, activation):
    check(randomised(EqualizedConv2d(2, 2, size, activation=activation)), (draw(1, 2, 4, 4),))


@pytest.mark.parametrize("classes", [0, 2])
def test_mapping(classes):
    network = randomised(MappingNetwork(2, 3, classes, 2, 0.3))
    check(network, (draw(3, 2),), labels=torch.tensor([1, 0, 1]) if classes else None)


@pytest.mark.parametrize("upsample", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_styled_layer(upsample, noisy):
    layer = randomised(StyledLayer(2, 2, 2, 4, upsample=upsample))
    side = 2 if upsample else 4
    check(layer, (draw(2, 2, side, side), draw(2, 2, key="w")), noise=draw(2, 1, 4, 4, key="noise") if noisy else None)


@pytest.mark.parametrize("channels", [1, 3])
def test_to_rgb(channels):
    check(randomised(ToRGB(2, channels, 2)), (draw(2, 2, 3, 3), draw(2, 2, key="w")))


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_synthesis_block(alpha):
    block = randomised(SynthesisBlock(2, 1, 2, 8, 1))
    ws = [draw(1, 2, key=f"w{i}") for i in range(3)]
    noise = [draw(1, 1, 8, 8, key="noise"), None]
    check(block, (draw(1, 2, 4, 4), draw(1, 1, 4, 4, key="image")), ws=ws, noise=noise, alpha=alpha, fast=True)


@pytest.mark.parametrize("residual", [False, True])
def test_discriminator_block(residual):
    check(randomised(DiscriminatorBlock(2, 1, residual=residual)), (draw(1, 2, 4, 4),))


@pytest.mark.parametrize(("channels", "classes", "count"), [(1, 0, 3), (3, 2, 1)])
@pytest.mark.parametrize("stage", [{}, {"resolution": 8, "alpha": 0.4}])
def test_generator(channels, classes, count, stage):
    with forked(0, "init", "gradients"):
        config = GeneratorConfig(z_dim=2, w_dim=2, mapping_layers=1, channel_base=32, channel_max=2)
        generator = randomised(Generator(config, resolution=8 if not stage else 16, channels=channels, classes=classes))
    maps = [
        draw(count, *shape, key=f"noise{i}") for i, shape in enumerate(generator.noise_shapes(stage.get("resolution")))
    ]
    labels = torch.arange(count) % classes if classes else None
    check(generator, (draw(count, 2, key="z"),), fast=True, labels=labels, noise=maps, **stage)


@pytest.mark.parametrize("architecture", ["residual", "plain"])
@pytest.mark.parametrize(("channels", "classes", "count", "group"), [(1, 0, 3, 1), (3, 2, 3, 3), (1, 3, 4, 2)])
@pytest.mark.parametrize("alpha", [None, 0.4])
def test_discriminator(architecture, channels, classes, count, group, alpha):
    config = DiscriminatorConfig(
        architecture=architecture, channel_base=32, channel_max=2, minibatch_std_group=group, mapping_layers=1
    )
    growing = alpha is not None
    with forked(0, "init", "gradients"):
        network = Discriminator(
            config, resolution=16 if growing else 8, channels=channels, classes=classes, progressive=growing
        )
    labels = torch.arange(count) % classes if classes else None
    options = {"alpha": alpha} if growing else {}
    check(randomised(network), (draw(count, channels, 8, 8),), fast=True, labels=labels, **options)
