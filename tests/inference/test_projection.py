import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.autograd import gradcheck, gradgradcheck

from duetgan.inference.projection import (
    Distance,
    ProjectionConfig,
    Projector,
    ResNetFeatures,
    build_features,
    correlation,
    feature_distance,
    find,
    resize,
    unit_length,
)
from duetgan.models.backbones.base import MEAN, STD
from duetgan.models.backbones.torchvision import RESNET
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from duetgan.utils.seeding import generator as keyed_generator
from tests.conftest import assert_raises
from tests.inference.conftest import draws, sampler_of, styled


def projector(generator, target, *, seed=0, **config):
    """A search for an image uint8 [C, H, W] by its pixels."""
    wanted = target[None].to(generator.w_avg.dtype) / 127.5 - 1
    distance = Distance(wanted, features=None, pixel_weight=1.0)
    return Projector(generator, distance, ProjectionConfig(**config), seed=seed)


@pytest.fixture
def own(generator):
    """An image that the generator itself has drawn, of class 2, with the stored noise."""
    return sampler_of(generator, chosen=[2], noise_mode="const", seed=9).images([0])[0]


def test_what_was_found_is_not_shaken_away(generator, own):
    search = projector(generator, own, steps=1, lr=1e-9, shake=10.0)
    start = search.start([1])
    for refine in (True, False):
        with patch.object(generator, "synthesis", side_effect=generator.synthesis) as watched:
            search.search("w", start, refine=refine)
        assert torch.equal(watched.call_args_list[0].args[0][0], start.ws) == refine


def test_the_steps_are_adams(generator, own):
    """The oracle: the update written out, with the shaken w. Appendix D of 1912.04958: the rate rises over the first
    20th of the steps, linearly, and falls over the last quarter by a cosine.
    """
    search = projector(generator, own, seed=3, steps=40, lr=0.1, shake=0.2)
    start = search.start([1])
    w = start.ws[0].clone()
    mean, square = torch.zeros(8), torch.zeros(8)
    for step in range(40):
        noise = torch.randn(1, 8, generator=keyed_generator(3, "project", "w", step))[0]
        shaken = w + 0.2 * search.spread * max(0.0, 1 - step / 40 / 0.75) ** 2 * noise
        shaken.requires_grad_()
        image = generator.synthesis(shaken.expand(4, -1)[None], "const")
        (gradient,) = torch.autograd.grad((image - (own / 127.5 - 1)).square().mean(), shaken)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        lr = 0.1 * min(1.0, (step + 1) / 2) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, (1 - step / 40) / 0.25)))
        w = w - lr * (mean / (1 - 0.9 ** (step + 1))) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    torch.testing.assert_close(search.search("w", start).ws[0], w, rtol=1e-3, atol=1e-4)


def test_it_starts_from_the_class_that_looks_most_like_the_target(generator, own):
    alone = {label: projector(generator, own).start([label]) for label in range(3)}
    best = min(alone, key=lambda label: alone[label].loss)
    search = projector(generator, own)
    start = search.start([0, 1, 2])
    assert search.label == best
    assert torch.equal(start.ws, alone[best].ws)
    assert len({result.loss for result in alone.values()}) == 3
    z = torch.randn(10_000, generator.z_dim, generator=keyed_generator(0, "class mean"))
    w = generator.mapping(z, torch.full([10_000], best))
    torch.testing.assert_close(start.ws, w.mean(0).expand(4, -1))
    assert search.spread == pytest.approx(math.sqrt((w - w.mean(0)).square().sum(1).mean()), rel=1e-4)


def test_without_classes_it_starts_from_the_mean_w_and_a_worse_result_is_dropped():
    generator = styled(classes=0, channels=3)
    target = sampler_of(generator, noise_mode="const").images([0])
    config = ProjectionConfig(space="w", features="pixels", pixel_weight=0.25, steps=1, lr=1e3)
    search = find(sampler_of(generator, seed=3), target, config)
    assert (search.seed, search.label, search.spaces) == (3, None, {"w": search.first})
    assert torch.equal(search.first.ws, generator.w_avg.expand(4, -1))
    difference = (search.first.image.double() - target[0]) / 255
    assert search.first.rmse == pytest.approx(float(difference.square().mean().sqrt()), rel=1e-5)
    assert search.first.loss == pytest.approx(0.25 * (2 * search.first.rmse) ** 2, rel=1e-5)
    assert search.first.distances == [f"rmse {search.first.rmse:.3f}"]
    assert replace(search.first, perceptual=0.12345).distances[0] == "features 0.123"


def test_a_seed_gives_one_result_and_the_generator_stays_as_it_is(generator, own):
    def found(seed, space):
        search = projector(generator, own, steps=6, seed=seed, noise_mode="optimise")
        return search.search(space, search.start([0, 1, 2])).ws

    for space in ("w", "w+"):
        assert torch.equal(found(0, space), found(0, space))
        assert not torch.equal(found(0, space), found(1, space))
    before = {key: value.clone() for key, value in generator.state_dict().items()}
    search = projector(generator, own, steps=3, noise_mode="optimise")
    start = search.start([0])
    ws, maps = start.ws.clone(), [m.clone() for m in start.noise]
    search.search("w", start)
    assert all(torch.equal(before[key], value) for key, value in generator.state_dict().items())
    assert all(parameter.grad is None for parameter in generator.parameters())
    assert torch.equal(start.ws, ws)
    assert all(torch.equal(a, b) for a, b in zip(start.noise, maps, strict=True))


def test_noise_is_searched_for_if_asked(generator, own):
    search = projector(generator, own, steps=40, noise_mode="optimise", noise_weight=0.0)
    start = search.start([0])
    free = search.search("w", start)
    assert [m.shape for m in free.noise] == [(1, 1, 4, 4), (1, 1, 8, 8), (1, 1, 8, 8)]
    for before, level in zip(start.noise, free.noise, strict=True):
        assert not torch.equal(before, level)
        assert float(level.mean()) == pytest.approx(0, abs=1e-5)
        assert float(level.square().mean()) == pytest.approx(1, abs=1e-4)
    strict = projector(generator, own, steps=40, noise_mode="optimise", noise_weight=1e5)
    assert correlation(strict.search("w", strict.start([0])).noise) < 0.1 * correlation(free.noise)
    assert projector(generator, own, noise_mode="none").start([0]).noise == "none"


def test_float64_is_searched_in_float64(request):
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    search = projector(styled(), torch.zeros(1, 8, 8, dtype=torch.uint8), steps=2, noise_mode="optimise")
    assert search.search("w+", search.start([0])).ws.dtype == torch.float64


def test_correlation_is_that_of_neighbours_at_every_size():
    maps = [draws(1, 1, 4, 4), draws(1, 1, 32, 16, seed=1), draws(1, 1, 8, 32, seed=2)]
    expected = 0.0
    for level in maps:
        values = level[0, 0].numpy()
        while True:
            height, width = values.shape
            for down, right in ((1, 0), (0, 1)):
                places = np.ndindex(height, width)
                products = [values[i, j] * values[(i - down) % height, (j - right) % width] for i, j in places]
                expected += (sum(products) / values.size) ** 2
            if min(height, width) <= 8:
                break
            values = values.reshape(height // 2, 2, width // 2, 2).sum(axis=(1, 3)) / 2
    assert float(correlation(maps)) == pytest.approx(expected, abs=1e-10)
    assert gradcheck(lambda x: correlation([x]), draws(1, 1, 16, 16).requires_grad_())


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
    expected = maps / (maps.square().sum(1, keepdim=True) + 1e-10).sqrt()
    torch.testing.assert_close(unit_length(maps), expected, rtol=0, atol=1e-12)
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


@pytest.mark.parametrize(("channels", "side", "seen"), [(1, 8, 64), (3, 64, 64), (3, 96, 96), (1, 128, 112)])
def test_features_are_the_stem_and_the_four_stages(network, channels, side, seen, monkeypatch):
    """The oracle: hooks on the whole network, fed by hand."""
    monkeypatch.setattr("duetgan.inference.projection.LARGEST", 112)
    images = draws(1, channels, side, side * 5 // 4).clamp(-1, 1)
    caught, layers = [], ("bn1", "layer1", "layer2", "layer3", "layer4")
    hooks = [getattr(network, name).register_forward_hook(lambda *found: caught.append(found[2])) for name in layers]
    wanted = F.interpolate(images, size=(seen, seen * 5 // 4), mode="bilinear", align_corners=False, antialias=True)
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
    built = build_features(None, tmp_path / "x.safetensors", cpu)
    assert built is not None
    for found, expected in zip(built(images.float()), ResNetFeatures(network)(images), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
