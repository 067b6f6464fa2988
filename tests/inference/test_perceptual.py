import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.autograd import gradcheck, gradgradcheck

from duetgan.inference.perceptual import Distance, ResNetFeatures, build_features, feature_distance, resize, unit_length
from duetgan.models.backbones.base import MEAN, STD
from duetgan.models.backbones.torchvision import RESNET
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.inference.conftest import draws, styled


@pytest.fixture(scope="module")
def network():
    """A ResNet-50 with random weights, in float64, whose features neither vanish nor explode."""
    with forked(0, "init", "perceptual"):
        network = RESNET.build("resnet50", he_strides=True)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.get_buffer("running_var").uniform_(0.5, 2)
                module.get_buffer("running_mean").uniform_(-0.1, 0.1)
    return network.double().eval().requires_grad_(False)


def test_channels_are_scaled_to_unit_length_with_a_finite_gradient():
    maps = draws(2, 3, 2, 2)
    maps[1, :, 0, 1] = 0
    found = unit_length(maps)
    for n, row, column in np.ndindex(2, 2, 2):
        vector = maps[n, :, row, column].numpy()
        expected = vector / np.sqrt((vector**2).sum() + 1e-10)
        np.testing.assert_allclose(found[n, :, row, column].numpy(), expected, rtol=0, atol=1e-12)
    maps = torch.zeros(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(unit_length(maps)[0, 0, 0, 0], maps)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0


def test_distance_of_features_is_lpips_without_weights_and_its_gradients():
    a = [draws(2, 3, 4, 4), draws(2, 5, 2, 2, seed=1)]
    b = [draws(1, 3, 4, 4, seed=2), draws(1, 5, 2, 2, seed=3)]
    found = feature_distance(a, b)
    for n in range(2):
        expected = 0.0
        for x, y in zip(a, b, strict=True):
            for c, i, j in np.ndindex(*x.shape[1:]):
                expected += float(x[n, c, i, j] - y[0, c, i, j]) ** 2 / x[0, 0].numel()
        assert float(found[n]) == pytest.approx(expected, abs=1e-10)
    maps = draws(1, 3, 2, 2).requires_grad_()
    other = [unit_length(draws(1, 3, 2, 2, seed=1))]

    def loss(x):
        return feature_distance([unit_length(x)], other)

    assert gradcheck(loss, maps)
    assert gradgradcheck(loss, maps)
    assert gradcheck(lambda x: resize(x, 7), draws(1, 1, 4, 4).requires_grad_())


@pytest.mark.parametrize(("before", "side"), [(8, 64), (16, 24), (96, 64), (300, 256), (64, 64)])
def test_scaling_is_bilinear(before, side):
    images = draws(2, 3, before, before)
    expected = F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(resize(images, side), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("channels", "side", "seen"), [(1, 8, 64), (3, 64, 64), (3, 96, 96), (1, 128, 112)])
def test_features_are_the_stem_and_the_four_stages(network, channels, side, seen, monkeypatch):
    """The oracle: hooks on the whole network, fed by hand."""
    monkeypatch.setattr("duetgan.inference.perceptual.LARGEST", 112)
    images = draws(1, channels, side, side).clamp(-1, 1)
    caught, layers = [], ("bn1", "layer1", "layer2", "layer3", "layer4")
    hooks = [getattr(network, name).register_forward_hook(lambda *found: caught.append(found[2])) for name in layers]
    wanted = F.interpolate(images, size=(seen, seen), mode="bilinear", align_corners=False, antialias=True)
    rgb = wanted.expand(-1, 3, -1, -1) * 0.5 + 0.5
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))
    network((rgb - mean.double()) / std.double())
    for hook in hooks:
        hook.remove()
    found = ResNetFeatures(network)(images)
    assert [maps.shape[1] for maps in found] == [64, 256, 512, 1024, 2048]
    for output, maps in zip(caught, found, strict=True):
        raw = output.relu()
        expected = raw / (raw.square().sum(1, keepdim=True) + 1e-10).sqrt()
        torch.testing.assert_close(maps, expected, rtol=0, atol=1e-6)  # MEAN and STD are held in float32


def test_equal_images_are_at_distance_0_and_the_gradient_reaches_w(network):
    target, other = draws(1, 1, 16, 16).clamp(-1, 1), draws(2, 1, 16, 16, seed=1).clamp(-1, 1)
    features = ResNetFeatures(network)
    distance = Distance(target, features=features, pixel_weight=0.5)
    assert float(distance(target)) == 0
    found = distance(other)
    assert found.shape == (2,)
    expected = feature_distance(features(other), features(target)) + 0.5 * (other - target).square().mean((1, 2, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (found > 0.1).all()
    pixels = Distance(target, features=None, pixel_weight=0.5)
    torch.testing.assert_close(pixels(other), 0.5 * (other - target).square().mean((1, 2, 3)), rtol=0, atol=1e-10)
    assert pixels.perceptual(other) is None
    # against central differences along a random direction, through generator and network
    generator = styled().double()
    distance = Distance(draws(1, 1, 8, 8).clamp(-1, 1), features=ResNetFeatures(network), pixel_weight=1.0)

    def loss(ws):
        return distance(generator.synthesis(ws, "const")).sum()

    ws, way = draws(1, 4, 8), draws(1, 4, 8, seed=1)
    (gradient,) = torch.autograd.grad(loss(ws.requires_grad_()), ws)
    assert (gradient.abs().amax(dim=2) > 0).all()  # of every layer
    with torch.no_grad():
        slope = (loss(ws + 1e-6 * way) - loss(ws - 1e-6 * way)) / 2e-6
    assert float((gradient * way).sum()) == pytest.approx(float(slope), rel=1e-4)


def test_building_and_what_is_missing(network, tmp_path, no_weights):
    cpu = torch.device("cpu")
    assert build_features("pixels", None, cpu) is None
    assert_raises(UserError, "--weights is for --features resnet50", build_features, "pixels", tmp_path / "x", cpu)
    assert_raises(UserError, r"--weights.*--features pixels", build_features, "resnet50", None, cpu)
    state = {key: value.float() if value.is_floating_point() else value for key, value in network.state_dict().items()}
    save_file(state, tmp_path / "x.safetensors", metadata={"stride": "conv1"})
    images = draws(1, 1, 16, 16).clamp(-1, 1)
    built = build_features("resnet50", tmp_path / "x.safetensors", cpu)
    assert built is not None
    for found, expected in zip(built(images.float()), ResNetFeatures(network)(images), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
