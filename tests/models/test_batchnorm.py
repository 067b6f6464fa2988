"""One process: the layer is BatchNorm2d. Several processes are tried in tests/distributed."""

import pytest
import torch
from torch import nn

from duetgan.models.batchnorm import CPUSyncBatchNorm2d, synchronise_batchnorm
from duetgan.models.classifier import Classifier, ModelConfig
from tests.models.test_layers import draw

CPU = torch.device("cpu")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_alone_it_is_batchnorm(momentum, affine):
    ours = CPUSyncBatchNorm2d(3, momentum=momentum, affine=affine).double()
    torchs = nn.BatchNorm2d(3, momentum=momentum, affine=affine).double()
    for step in range(3):
        x = [draw(4, 3, 2, 2, key=f"{step}").requires_grad_() for _ in range(2)]
        outputs = [ours(x[0]), torchs(x[1])]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
        for output in outputs:
            output.pow(3).sum().backward()
        torch.testing.assert_close(x[0].grad, x[1].grad, rtol=0, atol=0)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    for name, value in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    x = draw(2, 3, 2, 2, key="evaluation")
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x), rtol=0, atol=0)


def test_conversion_replaces_every_layer_and_keeps_the_state():
    model = Classifier(ModelConfig(name="resnet18", stem="small-stride2"), channels=1, classes=3, resolution=8)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.get_buffer("running_mean").add_(0.5)
                module.weight.mul_(2)
    model = model.double()
    x = draw(2, 1, 8, 8)
    expected, state = model.eval()(x), {name: value.clone() for name, value in model.state_dict().items()}
    converted = synchronise_batchnorm(model, CPU)
    kinds = {type(module) for module in converted.modules() if isinstance(module, nn.BatchNorm2d)}
    assert kinds == {CPUSyncBatchNorm2d}
    assert converted.state_dict().keys() == state.keys()
    for name, value in converted.state_dict().items():
        assert value.dtype == state[name].dtype
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    torch.testing.assert_close(converted.eval()(x), expected, rtol=0, atol=0)


def test_accelerators_get_torchs_own():
    model = synchronise_batchnorm(nn.Sequential(nn.BatchNorm2d(2)), torch.device("cuda"))
    assert [type(child) for child in model.children()] == [nn.SyncBatchNorm]
