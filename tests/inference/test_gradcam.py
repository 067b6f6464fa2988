"""Grad-CAM: the map against slow computations, where it peaks, and what `predict.py --gradcam` writes."""

import json

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image
from torch import nn

from duetgan.commands import predict
from duetgan.inference import predictions
from duetgan.inference.predictions import output_files
from duetgan.metrics.grad_cam import grad_cam, image_heat, overlay
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator
from tests.metrics.conftest import classifier_run


def classifier(side=32):
    """An untrained ResNet-18 whose logits differ, in float64."""
    with forked(0, "init", "gradcam"):
        model = Classifier(ModelConfig(stem="small-stride2"), channels=1, classes=3, resolution=side)
    return model.double().eval().requires_grad_(False)


def images(count=2, side=32):
    return torch.rand(count, 1, side, side, dtype=torch.float64, generator=generator(0, "test", "gradcam")) * 2 - 1


def slow_cam(before: nn.Module, after: nn.Module, image: torch.Tensor, label: int) -> np.ndarray:
    """Equations 1 and 2 of the paper in loops, without autograd: the mean over a map of the logit's derivatives is its
    derivative along the whole map, divided by the number of places.
    """
    maps = before(image[None])
    _, channels, height, width = maps.shape
    steps = 1e-6 * torch.eye(channels, dtype=maps.dtype)[:, :, None, None]  # one channel each
    alphas = (after(maps + steps) - after(maps - steps))[:, label] / 2e-6 / (height * width)
    heat = np.zeros((height, width))
    for k, i, j in np.ndindex(channels, height, width):
        heat[i, j] += alphas[k].item() * maps[0, k, i, j].item()
    return np.maximum(heat, 0)


def resnet_parts():
    net = classifier().network
    before = nn.Sequential(net.conv1, net.bn1, net.relu, net.layer1, net.layer2, net.layer3, net.layer4)
    return before, nn.Sequential(net.avgpool, nn.Flatten(), net.fc)


def small_parts():
    """What comes after the layer is not linear."""
    with forked(0, "init", "small"):
        after = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, 3))
        return nn.Conv2d(1, 4, 3, stride=2).double(), after.double()


@pytest.mark.parametrize(("parts", "layer"), [(resnet_parts, "0.6"), (small_parts, "0")])
@torch.no_grad()
def test_the_map_is_the_papers(parts, layer):
    before, after = parts()
    model, batch = nn.Sequential(before, after).eval(), images(side=18)
    found = grad_cam(model, batch, torch.tensor([2, 0]), layer)
    for image, label, heat in zip(batch, (2, 0), found, strict=True):
        expected = slow_cam(before, after, image, label)
        assert expected.max() > 0
        np.testing.assert_allclose(heat.numpy(), expected, rtol=1e-6, atol=1e-8 * expected.max())


def test_layers_without_maps_are_refused():
    for layer, told in (
        ("fc", r"layer 'fc' gives no maps \(its output is \[2, 3\]\); choose a stage"),
        ("layer5", r"no layer is called 'layer5' \(did you mean 'layer[1-4]'\?\)"),
    ):
        with pytest.raises(UserError, match=told):
            grad_cam(classifier(), images(), torch.tensor([0, 1]), layer)


class ChannelsLast(nn.Module):
    """What timm says of a Swin: the maps of its stages are [N, h, w, C]."""

    output_fmt = "NHWC"

    def __init__(self, head: nn.Module, convolution: nn.Module) -> None:
        super().__init__()
        self.first, self.stage, self.head = convolution, nn.Tanh(), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stage(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).mean((2, 3)))


@pytest.mark.parametrize("layer", ["stage", "first"])
def test_maps_whose_channels_come_last_give_the_same_heat(layer):
    with forked(0, "test"):
        convolution, head = nn.Conv2d(3, 5, 3), nn.Linear(5, 2)
    plain = nn.Sequential(convolution, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    inputs, targets = torch.rand(2, 3, 12, 9, generator=generator("test", "nhwc")), torch.tensor([0, 1])
    found = grad_cam(ChannelsLast(head, convolution), inputs, targets, layer)
    assert found.shape == (2, 10, 7)
    torch.testing.assert_close(found, grad_cam(plain, inputs, targets, {"first": "0", "stage": "1"}[layer]))


def bilinear(side):
    """Weights [side, 4] of a map's four pixels; beyond the outer ones' centres they go on."""
    weights = np.maximum(0, 1 - abs((np.arange(side)[:, None] + 0.5) * 4 / side - 0.5 - np.arange(4)))
    return weights / weights.sum(1, keepdims=True)


def test_heat_is_scaled_image_by_image_and_may_be_none(monkeypatch):
    model = classifier().float()
    sample_images = torch.randint(0, 256, (3, 1, 32, 32), dtype=torch.uint8, generator=generator(0, "test"))
    heat = image_heat(model, sample_images, torch.tensor([0, 1, 2]))
    assert heat.dtype == torch.float32
    assert heat.min() >= 0
    assert heat.amax((1, 2)).tolist() == [1.0, 1.0, 1.0]
    model.network.fc.weight.fill_(-1.0)  # every map speaks against every class
    assert image_heat(model, sample_images, torch.tensor([0, 1, 2])).abs().max() == 0
    sample_image = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8, generator=generator(0, "test"))
    heat = torch.zeros(4, 4)
    large, shown = overlay(sample_image, heat)
    assert large.shape == (3, 224, 224)
    assert torch.equal(large, shown)
    assert torch.equal(large[:, ::28, ::28], sample_image.expand(3, -1, -1))
    assert overlay(torch.zeros(3, 5, 300, dtype=torch.uint8), heat)[0].shape == (3, 5, 300)
    heat[0, 3], heat[2, 1] = 1.0, 0.5
    _, shown = overlay(sample_image[:, :6], heat)
    rows, columns = (bilinear(side) for side in (168, 224))
    smooth = rows @ heat.numpy() @ columns.T
    colours = 255 * colormaps["turbo"](smooth)[..., :3].transpose(2, 0, 1)
    off = np.abs(shown.numpy() - (large[:, :168].numpy() * (1 - 0.65 * smooth) + colours * 0.65 * smooth))
    assert off.max() < 4  # of the neighbouring one of 256 colours
    assert off.mean() < 0.3


def test_output_files_neither_collide_nor_leave_the_folder_nor_hit_an_input(tmp_path):
    files = ["a/cat.png", "b/cat.jpg", "b/CAT.jpg", "cat-gradcam-2.png", str(tmp_path / "cat-gradcam.png"), "../.."]
    files += [".png", "x" * 250 + ".png", "x" * 251 + ".png", "é" * 150]
    found = output_files(tmp_path, files, kind="gradcam")
    assert len({str(path).casefold() for path in found}) == len(files)
    assert tmp_path / "cat-gradcam.png" not in found
    for path in found:
        assert path.resolve().parent == tmp_path.resolve()
        assert path.suffix == ".png"
        path.write_bytes(b"")
    assert found[0].name == "cat-gradcam-2.png"
    names = [path.name for path in output_files(tmp_path / "names", ["x" * 180, "y" * 181], kind="gradcam")]
    assert names == ["x" * 180 + "-gradcam.png", "y" * 180 + "-gradcam.png"]


@pytest.fixture
def files(tmp_path):
    found: list[str] = []
    for folder, name in (("a", "cat.png"), ("b", "cat.png"), ("b", "dog.png")):
        (tmp_path / folder).mkdir(exist_ok=True)
        pixels = np.random.default_rng(len(found)).integers(0, 256, (12, 10), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / folder / name)
        found.append(str(tmp_path / folder / name))
    return found


@pytest.fixture
def options(tmp_path):
    """Those that every call has."""
    return ["--checkpoint", str(classifier_run(tmp_path / "run", resize_filter="area")), "--device", "cpu"]


def test_predict_writes_an_image_for_each_readable_file(tmp_path, options, files, capsys):
    broken, out = tmp_path / "broken.png", tmp_path / "maps"
    broken.write_bytes(b"no image")
    arguments = [*options, "--json", "--batch-size", "2", str(broken), *files]
    assert run_cli(predict.main, arguments) == 2
    plain = json.loads(capsys.readouterr().out)
    assert run_cli(predict.main, [*arguments, "--gradcam", str(out), "--gradcam-layer", "layer3"]) == 2
    found = json.loads(capsys.readouterr().out)
    names = [result.pop("gradcam", None) for result in found]
    assert found == plain
    written = [None, "cat-gradcam.png", "cat-gradcam-2.png", "dog-gradcam.png"]
    assert names == [name and str(out / name) for name in written]
    assert sorted(path.name for path in out.iterdir()) == sorted(filter(None, written))


def test_refusals(tmp_path, options, files, refused):
    maps = ["--gradcam", tmp_path / "m"]
    for more, told in (
        (["--gradcam-class", "dark"], "belong to --gradcam DIR"),
        (["--gradcam-layer", "layer1"], "belong to --gradcam DIR"),
        ([*maps, "--gradcam-class", "darc"], "--gradcam-class: no class 'darc' (did you mean 'dark'?)"),
        ([*maps, "--gradcam-layer", "layer9"], "no layer is called 'layer9'"),
        (["--gradcam", "/proc/nowhere"], "cannot be written"),
    ):
        assert told in refused(predict.main, *options, *files, *more, alone=True)


@pytest.mark.parametrize(
    ("name", "stem", "side", "layer"),
    [
        ("resnet18", "imagenet", 224, "layer4"),  # 7x7
        ("resnet18", "imagenet", 128, "layer4"),  # 4x4
        ("resnet18", "imagenet", 64, "layer3"),  # layer4 has 2x2: one smear
        ("resnet18", "imagenet", 32, "layer2"),
        ("resnet18", "imagenet", 8, "layer1"),
        ("resnet18", "imagenet", "128x32", "layer2"),  # the shorter side counts
        ("resnet18", "imagenet", "32x128", "layer2"),
        ("resnet18", "small", 32, "layer4"),
        ("convnext_tiny", "small", 32, "features.7"),  # other backbones name their own
    ],
)
def test_the_layer_that_is_looked_at_unasked_has_places_to_tell_apart(name, stem, side, layer):
    model = Classifier(ModelConfig(name=name, stem=stem), channels=1, classes=3, resolution=side)
    assert predictions.default_layer(model) == layer
    assert model.training  # as it was
    assert not any(module._forward_hooks for module in model.modules())
