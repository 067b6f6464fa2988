"""Weight gradients in bf16 of convolutions whose maps are narrower than the stride."""

import copy

import pytest
import torch
from torch import nn

from duetgan.training.classifier.network import widen_narrow_maps


@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 2, 1), (5, 2, 1), (7, 2, 1), (3, 3, 2), (3, 2, 2)])
def test_gradients_are_those_of_fp32_whatever_the_memory_held(kernel, stride, side):
    """As in layer4 of a ResNet with images of 16 px."""
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
    x, own = torch.randn(6, 64, side, side), copy.deepcopy(conv)
    expected = own(x)
    expected.square().sum().backward()
    widen_narrow_maps(conv)
    assert own.weight.grad is not None
    for _ in range(4):
        junk = [torch.full((128, 64, kernel, kernel), float("nan"), dtype=d) for d in (torch.bfloat16, torch.float32)]
        del junk
        conv.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = conv(x)
        assert found.shape == expected.shape
        found.float().square().sum().backward()
        assert conv.weight.grad is not None
        assert (conv.weight.grad - own.weight.grad).norm() < 0.02 * own.weight.grad.norm()
    assert torch.equal(conv(x), own(x))  # in fp32 nothing changes


def test_other_convolutions_stay_as_they_are():
    others = [nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 4, stride=2, padding=1)]
    widen_narrow_maps(nn.ModuleList(others))
    assert not any(conv._forward_pre_hooks for conv in others)
