"""Images of every kind, alpha, 16 bits, floats, many channels and labels, from the network's values to what is made of
them; oracles by the pixel.
"""

import re
from itertools import product
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from duetgan.metrics.features.extractors import (
    Extractor,
    classifier_input,
    photographs,
    pixel_features,
)
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import ARCHITECTURES
from duetgan.models.weights import fit_first
from duetgan.training.gan.ada import Ada, AdaConfig
from duetgan.training.gan.ada import operations as ops
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import DARK, LIGHT, grid, save_image, visible
from tests.conftest import assert_raises
from tests.end_to_end.test_rectangles import SMALL
from tests.training.gan.ada_oracle import random

CPU = torch.device("cpu")
P1 = torch.ones(())


def spec_of(channels: int, alpha: bool = False, depth: Any = "uint8", side: int = 8, high: float = 0.0) -> ImageSpec:
    usual = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0}[depth]
    return ImageSpec(channels, side, side, alpha=alpha, depth=depth, high=high or usual)


def stored(spec: ImageSpec, n: int = 4, seed: int = 0) -> torch.Tensor:
    """Random images as files of this kind have them; a quarter of the pixels transparent, as many opaque."""
    numbers = np.random.default_rng(seed)
    values = numbers.uniform(spec.low, spec.high, (n, *spec.shape))
    values = values if spec.depth == "float32" else np.round(values)
    if spec.alpha:
        kind = numbers.integers(0, 4, (n, *spec.size))
        values[:, -1][kind == 0], values[:, -1][kind == 1] = spec.low, spec.high
        values[:, :-1] *= values[:, -1:] > 0  # as transparent pixels come back
    return torch.from_numpy(values.astype(spec.depth))


KINDS = {
    "RGBA": spec_of(4, alpha=True),
    "grey + alpha": spec_of(2, alpha=True),
    "12 bits": spec_of(1, depth="uint16", high=4095.0),
    "RGB, 16 bits": spec_of(3, depth="uint16"),
    "RGBA, 16 bits": spec_of(4, alpha=True, depth="uint16"),
    "float": spec_of(1, depth="float32"),
    "2 channels": spec_of(2),
    "5 channels, float": spec_of(5, depth="float32"),
    "13 channels": spec_of(13, depth="uint16", high=10000.0),
}


# --- adaptive augmentation


def matrix_of(channels: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    _, uniform, normal = ops.DRAWS["colour"]
    draws = ops.GroupDraws(
        torch.rand(6, 5), torch.rand(6, uniform, dtype=torch.float64), torch.randn(6, normal, dtype=torch.float64), None
    )
    return ops.colour_matrix(draws, torch.tensor(0.8), channels)


@pytest.mark.parametrize("colours", [1, 3, 5])
def test_colours_change_as_if_alpha_had_not_been_multiplied_in(colours):
    straight, opacity = random(6, colours, 4, 4), (random(6, 1, 4, 4) + 1) / 2
    matrix = matrix_of(colours)
    changed = ops.recolour(straight, matrix, alpha=False)

    def under(colour: torch.Tensor) -> torch.Tensor:
        return torch.cat([opacity * (colour + 1) - 1, opacity * 2 - 1], dim=1)

    found = ops.recolour(under(straight), matrix, alpha=True)
    torch.testing.assert_close(found, under(changed))
    opaque = torch.cat([straight, torch.ones_like(opacity)], dim=1)
    assert torch.equal(ops.recolour(opaque, matrix, alpha=True)[:, :-1], changed)
    assert not found[:, :-1][(opacity == 0).expand_as(straight)].add(1).any()


@pytest.mark.parametrize("channels", [2, 4, 5, 13])
def test_colour_operations_of_many_channels_one_after_the_other(channels):
    torch.manual_seed(1)
    _, uniform, normal = ops.DRAWS["colour"]
    draws = ops.GroupDraws(
        torch.rand(9, 5), torch.rand(9, uniform, dtype=torch.float64), torch.randn(9, normal, dtype=torch.float64), None
    )
    images, p = random(9, channels, 3, 3), 0.6
    found = ops.recolour(images, ops.colour_matrix(draws, torch.tensor(p), channels), alpha=False)
    for n, image in enumerate(images.numpy().copy()):
        happens = draws.chance[n].numpy() < p
        brightness, contrast, saturation = draws.normal[n].tolist()
        image = image + (0.2 * brightness if happens[0] else 0)
        image = image * (2 ** (0.5 * contrast) if happens[1] else 1)
        mean = image.mean(0, keepdims=True)
        if happens[2] and draws.uniform[n, 0] >= 0.5:
            image = image - 2 * mean
            mean = -mean
        if happens[4]:
            image = mean + (image - mean) * 2**saturation
        np.testing.assert_allclose(found[n], image, rtol=1e-9, atol=1e-9)


def ada_of(spec: ImageSpec, p: float) -> Ada:
    config = AdaConfig(mode="fixed" if p else "adaptive", p=p, operations=dict.fromkeys(ops.DRAWS, 1.0))
    return Ada(config, seed=0, channels=spec.channels, alpha=spec.alpha, device=CPU, schedule_images=1, transfer=False)


@pytest.mark.parametrize("name", KINDS)
def test_augmentation_leaves_every_bit_at_0_and_cuts_out_to_nothing(name):
    spec = KINDS[name]
    images = spec.to_float(stored(spec, 8))
    ada = ada_of(spec, 0.0)
    assert torch.equal(ada.apply(images, ada.draw(0, "real", spec.size, 8), slice(0, 8)), images)
    draws = ops.GroupDraws(torch.zeros(8, 1), torch.full((8, 2), 0.5), torch.zeros(8, 0), None)
    hidden = ops.cut_out(images, draws, P1, spec.alpha)[:, :, spec.height // 2, spec.width // 2]
    assert (hidden == (-1 if spec.alpha else 0)).all()


# --- pictures and files


@pytest.mark.parametrize("name", KINDS)
def test_what_people_see(name):
    spec = KINDS[name]
    images = stored(spec)
    kept = 3 if spec.colours > 2 else 1
    for ground in (None, 128):
        seen = visible(images, spec, ground)
        assert (seen.dtype, seen.shape) == (torch.uint8, (4, kept, 8, 8))
        for n, c, y, x in product(range(2), range(kept), range(8), range(8)):
            low, high = spec.low, spec.high
            value = (float(images[n, c, y, x]) - low) / (high - low) * 255
            if spec.alpha:
                opacity = round(float(images[n, -1, y, x]) / high * 255) / 255
                behind = (LIGHT if (x + y) % 2 else DARK) if ground is None else ground
                value = round(value) * opacity + behind * (1 - opacity)
            assert abs(float(seen[n, c, y, x]) - value) <= 0.5 + 1e-3
    assert grid(images, spec=spec).shape == (16, 16, kept)


@pytest.mark.parametrize("spec", [spec_of(1), spec_of(3), *KINDS.values()], ids=lambda spec: spec.words)
def test_a_sample_is_written_in_its_depth(spec, tmp_path):
    image = stored(spec, 1)[0].permute(1, 2, 0).numpy()
    save_image(image, spec, tmp_path / "a b", {"seed": "3", "class": "k\u00e4se"})
    (file,) = tmp_path.iterdir()
    if spec.colours not in (1, 3) or spec.depth == "float32":
        assert file.name == "a b.npy"
        found = np.load(file)
    else:
        from PIL import Image

        assert file.name == "a b.png"
        with Image.open(file) as opened:
            assert (opened.info["seed"], opened.info["class"]) == ("3", "k\u00e4se")
        found = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
        if spec.channels == 2:  # OpenCV makes four of grey and alpha
            found = found[..., 2:] if found.ndim == 3 else found
        elif spec.channels > 2:
            found = found[..., [2, 1, 0, 3][: spec.channels]]
        found = found.reshape(image.shape)
    assert found.dtype == image.dtype
    assert np.array_equal(found, image)


# --- what figures and classifiers see


def test_extractors_of_photographs_see_alpha_and_tell_what_they_see():
    brightness = Extractor("mean", 3, lambda x: x.float().expand(-1, 3, -1, -1).mean((2, 3)), CPU)
    spec = KINDS["RGBA"]
    images = stored(spec)
    images[:, :3] = 128  # on grey nobody sees how opaque they are
    seen = photographs(brightness, spec)
    clear, opaque = images.clone(), images.clone()
    clear[:, 3], opaque[:, 3] = 10, 255
    first, second = seen(clear), seen(opaque)
    assert (seen.name, seen.dim, first.shape) == ("mean, on grey and white", 6, (4, 6))
    assert torch.equal(first[:, :3], second[:, :3])
    assert ((first - second)[:, 3:].abs() > 50).all()
    assert photographs(brightness, spec_of(3)) is brightness
    names = {"13 channels": "mean, channels 1 to 3", "2 channels": "mean, channels 1 to 1", "12 bits": "mean"}
    assert {name: photographs(brightness, KINDS[name]).name for name in names} == names
    for kind in KINDS.values():
        assert pixel_features(kind)(stored(kind)).shape == (4, kind.channels * 64)
    hidden = stored(spec)
    other = hidden.clone()
    other[:, :3] = torch.where(hidden[:, 3:] == 0, 77, hidden[:, :3])  # under what nobody sees
    assert torch.equal(pixel_features(spec)(hidden), pixel_features(spec)(other))


def classifier_of(spec: ImageSpec, **config: Any) -> Classifier:
    shape: dict[str, Any] = {
        "channels": spec.channels,
        "resolution": spec.resolution,
        "pixel_format": spec.pixel_format,
    }
    torch.manual_seed(0)
    return Classifier(ModelConfig(name="resnet18", stem="small", **config), classes=2, **shape).eval()


@pytest.mark.parametrize(("name", "colours"), [("RGBA", 3), ("grey + alpha", 1)])
def test_a_pretrained_network_answers_to_an_opaque_image_as_without_alpha(name, colours):
    spec = KINDS[name]
    donor, taker = (classifier_of(each, normalise="imagenet") for each in (spec_of(3), spec))
    state = donor.network.state_dict()
    state["conv1.weight"], notes = fit_first(state["conv1.weight"], taker.network.conv1.weight, alpha=True)
    taker.network.load_state_dict(state)
    assert not taker.network.conv1.weight[:, -1].any()
    images = stored(spec_of(colours))
    opaque = torch.cat([images, torch.full((4, 1, 8, 8), 255, dtype=torch.uint8)], dim=1)
    mean = donor(spec_of(3).to_float(images.expand(-1, 3, -1, -1))) if colours == 3 else None
    found = taker(spec.to_float(opaque))
    if mean is None:  # grey takes the mean of the colours' normalisation
        grey = classifier_of(spec_of(1), normalise="imagenet")
        state["conv1.weight"] = state["conv1.weight"][:, :1]
        grey.network.load_state_dict(state)
        mean = grey(spec_of(1).to_float(images))
    torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6)
    assert notes == [f"first filters from 3 to {spec.channels} channels"]


def test_filters_of_many_channels_are_repeated_with_their_scale_kept():
    timm = pytest.importorskip("timm.models._manipulate")
    filters = torch.randn(4, 3, 3, 3)
    for channels in (1, 2, 4, 5, 13):
        found, _ = fit_first(filters, torch.empty(4, channels, 3, 3), alpha=False)
        torch.testing.assert_close(found, timm.adapt_input_conv(channels, filters))


def test_a_classifier_refuses_images_of_another_kind():
    for name, kind in (("RGBA", spec_of(3)), ("12 bits", spec_of(1)), ("13 channels", KINDS["5 channels, float"])):
        network = classifier_of(KINDS[name])
        assert_raises(
            UserError,
            re.escape(f"the classifier takes {network.spec.words}"),
            classifier_input,
            network,
            stored(kind),
        )
    assert classifier_input(classifier_of(spec_of(3)), stored(spec_of(1))).shape == (4, 3, 8, 8)


# --- everything, over kinds


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_generator_multiplies_its_own_colours_by_alpha(architecture):
    """What is transparent need not be painted black too: by that D would tell samples for thousands of steps."""
    config, outcomes = SMALL.get(architecture, SMALL["stylegan2"])[0], []
    for spec in (KINDS["RGBA"], spec_of(4)):
        torch.manual_seed(0)
        shape = {"channels": 4, "classes": 0, "resolution": 8, "pixel_format": spec.pixel_format}
        generator = ARCHITECTURES[architecture].build("generator", config, **shape).double()
        noise = [torch.randn(2, *each).double() for each in generator.noise_shapes()]
        outcomes.append((generator(torch.randn(2, 4).double(), noise=noise) + 1) / 2)
    found, straight = outcomes
    torch.testing.assert_close(found, torch.cat([straight[:, :3] * straight[:, 3:], straight[:, 3:]], 1))
    assert not torch.allclose(found, straight)
