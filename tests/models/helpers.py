"""What the tests of networks share: draws, parameters away from their start, comparisons, what a graph keeps."""

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from duetgan.models.layers import ACTIVATION_GAIN, compute_dtype
from duetgan.models.stylegan2 import modulate
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import generator

to_uint8 = ImageSpec(1, 8, 8).from_float  # of 8-bit images of any size and channels without alpha


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


def same(a, b):
    """Two state dicts, or other tensors by name, are equal to the bit."""
    assert a.keys() == b.keys()
    assert [name for name, value in a.items() if not torch.equal(value, b[name])] == []


def gradients(network):
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def kept_bytes(network, *inputs):
    """Bytes that the graph of a pass keeps for the backward pass, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    storages: dict[int, torch.Tensor] = {}  # alive until they are counted, so that no address comes twice

    def pack(x):
        if (place := x.untyped_storage().data_ptr()) not in parameters:
            storages[place] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        output = network(*inputs)
    assert output.requires_grad
    return sum(x.untyped_storage().nbytes() for x in storages.values())


def styled(layer, x, w, *arguments):
    """The output of a StyledLayer, whose noise is multiplied by its strength, or of ToRGB."""
    if arguments and arguments[0] is not None:
        arguments = (arguments[0] * layer.noise_strength * ACTIVATION_GAIN, *arguments[1:])
    return layer(x, modulate([layer.conv], [w], [compute_dtype(x)], ACTIVATION_GAIN)[0], *arguments)
