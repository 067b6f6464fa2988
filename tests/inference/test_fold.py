import copy
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.fast import faster, fold_batchnorm
from duetgan.utils.seeding import forked

SIZES = [("resnet18", "small", False, 1), ("resnet18", "imagenet", False, 3), ("resnet50", "small-stride2", True, 3)]


def lived_in(model: Any) -> Any:
    """Give every BatchNorm statistics, gains and biases that count."""
    for module in norms(model):
        nn.init.uniform_(module.weight, 0.5, 1.5)
        nn.init.normal_(module.bias)
        nn.init.normal_(module.running_mean)
        nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def classifier(name="resnet18", stem="small", he_strides=False, channels=1):
    with forked(0, "init", "fold"):
        config = ModelConfig(name=name, stem=stem, he_strides=he_strides)
        return lived_in(Classifier(config, channels=channels, classes=4, resolution=16))


def norms(model) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


class Untraceable(nn.Module):
    """Its way depends on the values, which torch.fx cannot trace."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As bfloat16 is."""
    assert 0 < float((found - expected).detach().norm() / expected.detach().norm()) < 0.03


@pytest.mark.parametrize("sizes", SIZES)
def test_a_folded_resnet_gives_the_same_logits_in_float64(sizes):
    model = classifier(*sizes).double()
    before = copy.deepcopy(model.state_dict())
    folded = fold_batchnorm(model)
    with forked(0, "test"):
        x = torch.randn(3, sizes[-1], 16, 16, dtype=torch.float64)
    expected, found = model(x), folded(x)
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not norms(folded)
    assert norms(model)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not any(p.requires_grad for p in folded.parameters())


def test_what_is_folded_and_which_norms_stay():
    with forked(0, "test"):
        model = lived_in(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4, eps=0.7))).double()
        x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    conv, norm = model
    gain = norm.weight / torch.sqrt(norm.running_var + 0.7)
    expected = (conv(x) - norm.running_mean.view(-1, 1, 1)) * gain.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    torch.testing.assert_close(fold_batchnorm(model)(x), expected, rtol=1e-12, atol=1e-12)
    with forked(0, "test"):
        conv, norm, x = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), torch.randn(2, 2, 3, 3)
    without = nn.BatchNorm2d(2, track_running_stats=False)
    for layers in ([conv, nn.ReLU(), norm], [norm, conv], [conv, without], [conv, norm, Untraceable()]):
        model = nn.Sequential(*layers).eval()
        folded = fold_batchnorm(model)
        assert len(norms(folded)) == 1
        assert folded(x).equal(model(x))


def test_memory_layout_and_mode_are_kept():
    model = classifier().to(memory_format=torch.channels_last).train()
    folded: Any = fold_batchnorm(model)
    weight = folded.get_parameter("network.layer1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert model.training
    assert not any(module.training for module in folded.modules())


def test_n8_a_faster_classifier_gives_the_folded_networks_logits_and_leaves_the_one_given_as_it_is():
    model, cpu = classifier(), torch.device("cpu")
    with forked(0, "test"):
        x = torch.randn(4, 1, 16, 16)
    expected, kinds = model(x), []
    for precision in ("auto", "fp32"):
        assert faster(model, cpu, precision=precision, fold=False)(x).equal(expected)
        assert faster(model, cpu, precision=precision, fold=True)(x).equal(fold_batchnorm(model)(x))
    with model.network.conv1.register_forward_hook(lambda _, __, output: kinds.append(output.dtype)):
        for precision in ("bf16", "fp16", "fp32", "auto"):
            faster(model, cpu, precision=precision, fold=False)(x)
    assert kinds == [torch.bfloat16, torch.float16, torch.float32, torch.float32]
    for fold in (False, True):
        reduced = faster(model, cpu, precision="bf16", fold=fold)
        with torch.autocast("cpu", enabled=False):  # as an evaluation in full float32 has it
            found = reduced(x)
        assert found.dtype == torch.float32
        assert_near(found, expected)
        assert reduced.features(x).equal(model.features(x))
    assert model(x).equal(expected)
    assert "forward" not in vars(model)


def test_views_are_the_mean_of_their_logits():
    model = classifier().double()
    with forked(0, "test"):
        x = torch.randn(3, 1, 16, 16, dtype=torch.float64)
    cpu = torch.device("cpu")
    expected = (model(x) + model(x.flip(3))) / 2
    found = faster(model, cpu, precision="fp32", fold=False, tta="flip")(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    rows = torch.arange(16)
    for step in (-1, 1):  # rows and columns that a moved image shows; beyond the edge its reflection
        place = 15 - (15 - (rows + step).abs()).abs()
        view = x[:, :, place][:, :, :, place]
        expected = expected + (model(view) + model(view.flip(3))) / 4
    expected = expected / 2
    found = faster(model, cpu, precision="fp32", fold=True, tta="shift")(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (found - model(x)).abs().max() > 1e-3
    assert torch.equal(faster(model, cpu, precision="fp32", fold=False)(x), model(x))
