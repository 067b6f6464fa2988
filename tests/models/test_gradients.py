"""First and second derivatives of StyleGAN2's networks, with every layer in them, against finite differences.

With respect to the inputs and to all parameters: R1 and path-length regularisation train on second derivatives.
"""

import pytest
import torch
from torch.func import functional_call

from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.utils.seeding import forked
from tests.models.helpers import draw, randomised


def check(module, inputs, **options):
    """gradcheck and gradgradcheck of module(*inputs, **options), along random directions."""
    names = [name for name, _ in module.named_parameters()]

    def output(x, *parameters):
        found = functional_call(module, dict(zip(names, parameters, strict=True)), (x,), options)
        return found.tanh()  # curved, so that what is linear has a second derivative, too

    tensors = (inputs.requires_grad_(), *(p.detach().clone().requires_grad_() for p in module.parameters()))
    assert torch.autograd.gradcheck(output, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(output, tensors, fast_mode=True)


@pytest.mark.parametrize(
    ("channels", "classes", "count", "noisy", "growing"),  # every pair of two of them
    [(1, 0, 3, False, False), (3, 2, 1, True, False), (1, 0, 3, True, True), (3, 2, 1, False, True)],
)
def test_generator(channels, classes, count, noisy, growing):
    stage = {"resolution": 8, "alpha": 0.4} if growing else {}
    with forked(0, "init", "gradients"):
        config = GeneratorConfig(z_dim=2, w_dim=2, mapping_layers=2, channel_base=32, channel_max=2)
        generator = randomised(Generator(config, resolution=16 if stage else 8, channels=channels, classes=classes))
    shapes = generator.noise_shapes(stage.get("resolution"))
    maps = [draw(count, *shape, key=f"noise{i}") for i, shape in enumerate(shapes)]
    labels = torch.arange(count) % classes if classes else None
    check(generator, draw(count, 2, key="z"), labels=labels, noise=maps if noisy else "none", **stage)


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
    check(randomised(network), draw(count, channels, 8, 8), labels=labels, **options)
