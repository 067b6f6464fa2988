"""One process: the layer is BatchNorm2d. Several processes are tried in tests/distributed."""

import pytest
import torch
from torch import nn

from duetgan.models.batchnorm import CPUSyncBatchNorm2d, synchronise_batchnorm
from duetgan.models.classifier import Classifier, ModelConfig
from tests.models.helpers import draw, same

CPU = torch.device("cpu")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_alone_it_is_batchnorm(momentum, affine):
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


def test_conversion_replaces_every_layer_and_keeps_the_state():
    model = Classifier(ModelConfig(name="resnet18", stem="small-stride2"), channels=1, classes=3, resolution=8).double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.get_buffer("running_mean").add_(0.5)
                module.weight.mul_(2)
    x = draw(2, 1, 8, 8)
    expected, state = model.eval()(x), {name: value.clone() for name, value in model.state_dict().items()}
    converted = synchronise_batchnorm(model, CPU)
    kinds = {type(module) for module in converted.modules() if isinstance(module, nn.BatchNorm2d)}
    assert kinds == {CPUSyncBatchNorm2d}
    torch.testing.assert_close(dict(converted.state_dict()), state, rtol=0, atol=0)  # and their types
    torch.testing.assert_close(converted.eval()(x), expected, rtol=0, atol=0)


def test_accelerators_get_torchs_own():
    model = synchronise_batchnorm(nn.Sequential(nn.BatchNorm2d(2)), torch.device("cuda"))
    assert [type(child) for child in model.children()] == [nn.SyncBatchNorm]
