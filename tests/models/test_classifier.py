import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from duetgan.models import batchnorm
from duetgan.models.backbones.torchvision import RESNET
from duetgan.models.batchnorm import CPUSyncBatchNorm2d, statistics_kept
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.preparation import scaled
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.models.helpers import draw, gradients, kept_bytes, same


def build(channels=3, classes=4, resolution=32, **config):
    with forked(0, "init", "test classifier"):
        return Classifier(ModelConfig(**config), channels=channels, classes=classes, resolution=resolution)


def test_new_first_convolutions_and_what_no_network_can_be_built_from():
    weight = build(channels=1, stem="small").network.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # fan out
    with pytest.raises(UserError, match=r"'resnet99' is unknown \(did you mean 'resnet\w+'\?\); there are resnet18"):
        ModelConfig(name="resnet99")
    with pytest.raises(UserError, match=r"two classes or more, the data has 1"):
        build(classes=1)


@pytest.mark.filterwarnings("ignore")  # torch's own: that tracing is deprecated and shapes become constants
@pytest.mark.parametrize("resolution", [32, "32x24"])
def test_a_network_that_scales_its_images_can_be_traced(resolution):
    """As TensorBoard's graph does before the first step; sizes are tensors there."""
    model = build(resolution=resolution, input_size=48).eval()
    images = torch.randn(2, *model.spec.shape)
    assert torch.equal(torch.jit.trace(model, images)(images), model(images))


BOTTLENECKS = [name for name in RESNET.names if name not in ("resnet18", "resnet34")]


@pytest.mark.parametrize("name", RESNET.names)
def test_hes_strides_are_for_bottlenecks(name):
    with torch.device("meta"):
        if name not in BOTTLENECKS:
            with pytest.raises(UserError, match=rf"he_strides is for bottlenecks .*; {name} has none: leave it out"):
                RESNET.build(name, he_strides=True)
            return
        network: Any = RESNET.build(name, he_strides=True)
    for number, stage in enumerate((network.layer1, network.layer2, network.layer3, network.layer4)):
        strides = [(block.conv1.stride[0], block.conv2.stride[0]) for block in stage]
        assert strides == [(2 if number else 1, 1)] + [(1, 1)] * (len(stage) - 1)


def test_the_hidden_head():
    model = build(classes=7, head="hidden", head_width=9).eval()
    linear, relu, last = model.network.fc
    assert (linear.weight.shape, last.weight.shape, relu.inplace) == ((9, 512), (7, 9), True)
    x = draw(2, 3, 32, 32).float()
    hidden = (model.features(x) @ linear.weight.T + linear.bias).clamp_min(0)
    torch.testing.assert_close(model(x), hidden @ last.weight.T + last.bias)


@pytest.mark.parametrize("inplace", [False, True])
def test_relus_overwrite_their_input_or_not_and_give_the_same(inplace):
    model, other = build(head="hidden", inplace=inplace), build(head="hidden", inplace=not inplace)
    assert {m.inplace for m in model.modules() if isinstance(m, nn.ReLU)} == {inplace}
    x = draw(4, 3, 32, 32).float()
    (model(x).square().sum() + other(x).square().sum()).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", [None, "file.pth"])
@pytest.mark.parametrize("normalise", ["auto", "symmetric", "imagenet"])
def test_images_are_normalised_as_asked(weights, normalise, channels, slim):
    """Grey by the means of the colours' numbers; a fourth channel as red."""
    model = build(channels, stem="small", weights=weights, normalise=normalise)
    x = draw(2, channels, 8, 8).float().clamp(-1, 1)
    if normalise == "imagenet" or (normalise == "auto" and weights):
        mean, std = [0.485, 0.456, 0.406, 0.485][:channels], [0.229, 0.224, 0.225, 0.229][:channels]
        if channels < 3:
            mean, std = [0.449] * channels, [0.226] * channels
        expected = torchvision.transforms.functional.normalize((x + 1) / 2, mean, std)
        torch.testing.assert_close(model.prepare(x), expected)
    else:
        assert model.prepare(x) is x
    assert not any("input_" in name for name in model.state_dict())  # old checkpoints fit


@pytest.mark.parametrize("side", [48, 20])
def test_the_network_sees_normalised_and_scaled_images(side):
    model, plain = build(normalise="imagenet", input_size=side).eval(), build().eval()
    seen: list[torch.Tensor] = []
    model.network.conv1.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    x = draw(2, 3, 32, 32).float()
    found = model(x)
    scaled_images = F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(seen[0], ((scaled_images + 1) / 2 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    torch.testing.assert_close(found, plain(seen[0]))
    torch.testing.assert_close(model.features(x), plain.features(seen[0]))


@pytest.mark.parametrize(("side", "scaled"), [(32, False), (48, True), (20, True)])
def test_images_of_the_networks_size_are_left_alone(side, scaled):
    model = build(input_size=32)
    x = draw(1, 3, side, side).float()
    assert (model.prepare(x) is not x) == scaled
    assert model.prepare(x).shape == (1, 3, 32, 32)


def trained_once(checkpointing, *, frozen=()):
    """Two steps' worth of gradients and statistics at batch 4."""
    model = build(name="resnet18", activation_checkpointing=checkpointing, normalise="imagenet").train()
    for prefix, module in model.named_modules():
        if prefix.startswith(tuple(frozen)) and frozen:
            module.eval().requires_grad_(False)
    for key in ("a", "b"):
        model(draw(4, 3, 32, 32, key=key).float()).square().sum().backward()
    return model


@pytest.mark.parametrize("frozen", [(), ("network.conv1", "network.bn1", "network.layer1")])
def test_checkpointing_changes_no_gradient_and_no_statistic(frozen):
    plain, checkpointed = trained_once(False, frozen=frozen), trained_once(True, frozen=frozen)
    assert plain.network.layer4[1].bn2.num_batches_tracked == 2
    same(plain.state_dict(), checkpointed.state_dict())
    found = gradients(plain)
    same(found, gradients(checkpointed))
    still = tuple(f"{name}." for name in frozen)
    assert found.keys() == {name for name, _ in plain.named_parameters() if not name.startswith(still)}
    assert {norm.momentum for norm in checkpointed.modules() if isinstance(norm, nn.BatchNorm2d)} == {0.1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_compiled_checkpointed_network_has_the_same_gradients_and_statistics():
    torch._dynamo.reset()
    found = []
    for backend in (None, "aot_eager"):
        model = build(activation_checkpointing=True).train()
        network = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        network(draw(4, 3, 32, 32).float()).square().sum().backward()
        found.append([p.grad for p in model.parameters()] + list(model.buffers()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_checkpointing_keeps_less_and_is_for_training_only(monkeypatch):
    x = draw(4, 3, 32, 32).float()
    kept = [kept_bytes(build(activation_checkpointing=checkpointing).train(), x) for checkpointing in (False, True)]
    assert kept[1] < 0.2 * kept[0]
    calls: list[object] = []

    def checkpoint(function, x, **_):
        calls.append(function)
        return function(x)

    monkeypatch.setattr("duetgan.models.batchnorm.checkpoint", checkpoint)
    model = build(activation_checkpointing=True)
    x = draw(2, 3, 32, 32).float()
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    assert not calls
    model(x)
    assert len(calls) == 5


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, CPUSyncBatchNorm2d])
def test_statistics_are_kept_inside_the_block_only(kind, monkeypatch):
    norm = kind(3, momentum=0.3).train()
    if kind is CPUSyncBatchNorm2d:
        monkeypatch.setattr(batchnorm, "perform", lambda _: None)  # a sum over one rank
        monkeypatch.setattr(norm, "forward", norm.synchronised)
    x = draw(4, 3, 2, 2).float()
    norm(x)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with contextlib.suppress(RuntimeError), statistics_kept(norm):
        torch.testing.assert_close(norm(x).mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
        raise RuntimeError  # as torch does, to end a recomputation early
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    norm(x + 1)
    assert (norm.num_batches_tracked, norm.momentum) == (2, 0.3)
    assert not torch.equal(norm.running_mean, before["running_mean"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_images_are_scaled_in_any_precision(dtype):
    """torch has no antialiased scaling in bf16 on CPUs."""
    images = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    found = scaled(images.to(dtype), 13)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 13, 13))
    torch.testing.assert_close(found.float(), scaled(images, 13), atol=8e-3, rtol=0)
    model = Classifier(ModelConfig(stem="small-stride2", input_size=16), channels=3, classes=2, resolution=8)
    assert torch.isfinite(model.eval().to(dtype)(images.to(dtype))).all()
