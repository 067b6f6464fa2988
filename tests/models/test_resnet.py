from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from models.resnet import Classifier, ResNetConfig, build_torchvision
from tests.models.test_layers import draw
from utils.errors import UserError
from utils.seeding import forked

WEIGHTS = Path(__file__).resolve().parents[3] / "shared" / "weights" / "resnet50-imagenet.safetensors"


def build(channels=3, classes=4, resolution=32, **config):
    with forked(0, "init", "test classifier"):
        return Classifier(ResNetConfig(**config), channels=channels, classes=classes, resolution=resolution)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("stem", "size", "side"),  # kernel of the first convolution, width of layer4's map for 32 px
    [("imagenet", 7, 1), ("small", 3, 4), ("small-stride2", 3, 2)],
)
def test_stems(channels, stem, size, side):
    model = build(channels, stem=stem).eval()
    assert model.network.conv1.weight.shape == (64, channels, size, size)
    assert isinstance(model.network.maxpool, nn.Identity) == (stem != "imagenet")
    seen: dict[str, torch.Size] = {}
    model.network.layer4.register_forward_hook(lambda _module, _inputs, output: seen.update(shape=output.shape))
    x = draw(2, channels, 32, 32).float()
    assert model(x).shape == (2, 4)
    assert seen["shape"] == (2, 512, side, side)
    assert model.features(x).shape == (2, model.feature_dim)


@pytest.mark.parametrize(("name", "dim"), [("resnet18", 512), ("resnet34", 512), ("resnet50", 2048)])
def test_feature_dim(name, dim):
    with torch.device("meta"):
        model = Classifier(ResNetConfig(name=name), channels=3, classes=5, resolution=32)
    assert model.feature_dim == dim
    assert model.network.fc.weight.shape == (5, dim)
    assert (model.channels, model.classes, model.resolution) == (3, 5, 32)


def test_logits_are_the_head_of_the_features():
    model = build().eval()
    x = draw(2, 3, 32, 32).float()
    torch.testing.assert_close(model(x), model.network.fc(model.features(x)), rtol=0, atol=0)


def test_with_torchvisions_stem_it_is_torchvisions_network():
    model = build(classes=7).eval()
    theirs = torchvision.models.resnet18(num_classes=7).eval()
    ours = model.state_dict()
    assert all(name.startswith("network.") for name in ours)
    theirs.load_state_dict({name.removeprefix("network."): value for name, value in ours.items()})
    x = draw(2, 3, 32, 32).float()
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize("he_strides", [False, True])
def test_place_of_the_strides(he_strides):
    with torch.device("meta"):
        network = build_torchvision("resnet50", he_strides=he_strides)
    for index in (1, 2, 3, 4):
        stage = getattr(network, f"layer{index}")
        stride = (1, 1) if index == 1 else (2, 2)
        first, second = (stage[0].conv1, stage[0].conv2) if he_strides else (stage[0].conv2, stage[0].conv1)
        assert (first.stride, second.stride) == (stride, (1, 1))
        assert all(block.conv1.stride == block.conv2.stride == (1, 1) for block in stage[1:])


def test_he_strides_change_no_shape():
    x = draw(1, 3, 32, 32).float()
    with torch.no_grad():
        shapes = {build_torchvision("resnet50", he_strides=he).eval()(x).shape for he in (False, True)}
    assert shapes == {(1, 1000)}


def test_new_first_convolutions_follow_he():
    weight = build(channels=1, stem="small").network.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # fan out


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="the ImageNet weights file is not on this machine")
def test_the_imagenet_weights_fit_every_key():
    network = build_torchvision("resnet50", he_strides=True)
    state = load_file(WEIGHTS)
    counters = {name for name in network.state_dict() if name.endswith("num_batches_tracked")}
    found = network.load_state_dict(state, strict=False)
    assert found.unexpected_keys == []
    assert set(found.missing_keys) <= counters
    torch.testing.assert_close(network.conv1.weight.detach(), state["conv1.weight"].float(), rtol=0, atol=0)


def test_what_no_network_can_be_built_from():
    with pytest.raises(UserError, match=r"'resnet99' is unknown; choose one of resnet18"):
        build_torchvision("resnet99")
    with pytest.raises(UserError, match=r"two classes or more, the data has 1"):
        build(classes=1)
