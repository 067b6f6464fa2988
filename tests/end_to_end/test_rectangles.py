"""Images that are no squares, from the file to what is made of them: every shape works, or is refused in a line."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duetgan.data.images.decode import RandomCrop
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.inspect import verify
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.stages import at_resolution
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.gan import sizes_up_to
from duetgan.models.registry import ARCHITECTURES
from duetgan.training.gan.ada import Ada, AdaConfig
from duetgan.training.gan.ada.operations import DRAWS
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises

SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stylegan2": (
        {"z_dim": 4, "w_dim": 4, "channel_base": 32, "channel_max": 4},
        {"channel_base": 32, "channel_max": 4},
    ),
    "r3gan": ({"z_dim": 4, "width": 4, "cardinality": 2, "blocks": 1}, {"width": 4, "cardinality": 2, "blocks": 1}),
    "dcgan": ({"z_dim": 4, "width": 2, "width_max": 4}, {"width": 2, "width_max": 4}),
}
STARTS = {  # resolution -> height and width of the smallest maps, and the shorter sides from there
    "96x64": ((4, 6), [4, 8, 16, 32, 64]),
    "64x96": ((6, 4), [4, 8, 16, 32, 64]),
    "192x128": ((4, 6), [4, 8, 16, 32, 64, 128]),
    "160x96": ((6, 10), [6, 12, 24, 48, 96]),
    "16x8": ((4, 8), [4, 8]),
    "128x8": ((4, 64), [4, 8]),  # no smallest maps have more than 256 pixels
    "72x104": ((13, 9), [9, 18, 36, 72]),
    "64x64": ((4, 4), [4, 8, 16, 32, 64]),
    "96x96": ((6, 6), [6, 12, 24, 48, 96]),  # G4
    "48x48": ((6, 6), [6, 12, 24, 48]),
    "144x144": ((9, 9), [9, 18, 36, 72, 144]),
}


@pytest.mark.parametrize(("resolution", "expected"), STARTS.items())
def test_networks_begin_with_few_pixels_and_double(resolution, expected):
    (height, width), sides = expected
    spec = ImageSpec.of(3, resolution)
    assert sizes_up_to(resolution) == sides
    assert spec.at(sides[0]).size == (height, width)
    assert spec.size == (height << len(sides) - 1, width << len(sides) - 1)


@pytest.mark.parametrize(
    ("resolution", "near"),
    [
        ("132x8", "132x16 or 136x16"),
        ("86x14", "84x16 or 88x16"),
        ("90x60", "88x56 or 96x64"),
        ("100x75", "96x64 or 112x80"),
        ("9x7", "8x8 or 10x8"),
        ("1920x1080", "1792x1024"),
    ],
)
def test_sizes_that_doubling_does_not_lead_to_are_refused_with_near_ones(resolution, near):
    assert_raises(UserError, f"resolution {resolution}: .*--size {near}", sizes_up_to, resolution)
    for size in near.split(" or "):
        assert sizes_up_to(size if size != "8x8" else 8)
    assert_raises(UserError, "width x height such as 96x64", ImageSpec.of, 3, "96 x 64")
    assert_raises(ValueError, "cannot be scaled", ImageSpec.of(3, resolution).at, 1)


starts = st.tuples(st.integers(4, 8), st.integers(4, 8))


@settings(max_examples=12, deadline=None)
@given(start=starts, doublings=st.integers(1, 2), name=st.sampled_from(sorted(SMALL)), channels=st.sampled_from([1, 3]))
def test_one_step_of_each_network(start, doublings, name, channels):
    height, width = (side << doublings for side in start)
    shape: dict[str, Any] = {"resolution": ImageSpec(channels, height, width).resolution, "channels": channels}
    parts = zip(("generator", "discriminator"), SMALL[name], strict=True)
    torch.manual_seed(0)
    generator, discriminator = (
        ARCHITECTURES[name].build(section, config, classes=2, **shape) for section, config in parts
    )
    labels = torch.tensor([0, 1, 1, 0])
    noise = [torch.randn(4, *size) for size in generator.noise_shapes()]
    images = generator(torch.randn(4, 4), labels, noise=noise)
    assert images.shape == (4, channels, height, width)
    operations = dict.fromkeys(DRAWS, 1.0)
    ada = Ada(
        AdaConfig(mode="fixed", p=0.9, operations=operations),
        seed=0,
        channels=channels,
        device=torch.device("cpu"),
        schedule_images=1,
        alpha=False,
        transfer=False,
    )
    seen = ada.apply(images, ada.draw(0, "real", images.shape[2:], 4), slice(0, 4))
    assert seen.shape == images.shape
    real = seen.detach().requires_grad_()
    logits = discriminator(real, labels)
    (slope,) = torch.autograd.grad(logits.sum(), real, create_graph=True)
    (discriminator(seen, labels).sum() + slope.square().sum()).backward()
    for network in (generator, discriminator):
        missing = [key for key, p in network.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not missing
    transposed = images.detach().transpose(2, 3)
    if height != width:
        with pytest.raises(ValueError, match="images of"):
            discriminator(transposed, labels)


@settings(max_examples=15, deadline=None)
@given(
    size=st.tuples(st.integers(4, 12), st.integers(4, 12)),
    levels=st.integers(0, 2),
    channels=st.sampled_from([1, 3]),
    encoding=st.sampled_from(["raw", "png"]),
    asked=st.tuples(st.integers(4, 12), st.integers(4, 12)),
)
def test_what_is_packed_is_read(tmp_path_factory, size, levels, channels, encoding, asked):
    height, width = (side << levels for side in size)
    images = np.random.default_rng(0).integers(0, 256, (5, channels, height, width), dtype=np.uint8)
    path = tmp_path_factory.mktemp("packed") / "x.lmdb"
    meta = pack_arrays(path, images, encoding=encoding, smallest=min(size))
    spec = ImageSpec(channels, height, width)
    assert meta.spec == spec
    assert (meta.size is None) == (height == width)
    assert meta.resolutions == [min(size) << level for level in range(levels + 1)]
    with LMDBReader(path) as reader:
        assert not verify(reader, 1)
    with Dataset(path) as whole:
        assert np.array_equal(whole.read(range(5))[0], images)
        for level in range(levels):
            smaller = at_resolution(whole, min(size) << level)
            means = images.reshape(5, channels, size[0] << level, -1, size[1] << level, 1 << levels - level)
            found = smaller.read(range(5))[0].astype(float)
            assert np.abs(found - means.mean((3, 5))).max() <= levels - level  # each level is rounded
            smaller.close()
    if asked[0] > height or asked[1] > width:
        resolution = ImageSpec(channels, *asked).resolution
        assert_raises(UserError, "less than the", Dataset, path, resolution=resolution)


def test_a_random_crop_has_the_shape_that_is_asked_for_up_to_its_bounds():
    boxes = [
        RandomCrop(area=(0.1, 0.4), aspect=(3 / 4, 4 / 3)).box(400, 400, np.random.default_rng(seed), (64, 128))
        for seed in range(300)
    ]
    shapes = np.array([w / h for _, _, h, w in boxes]) / 2
    assert shapes.min() > 0.73
    assert shapes.max() < 1.37
    assert abs(np.log(shapes).mean()) < 0.05


def test_the_classifier_keeps_the_aspect_or_says_what_to_set():
    model = Classifier(
        ModelConfig(name="resnet18", stem="small", input_size=16), channels=3, classes=2, resolution="36x24"
    )
    images = torch.rand(2, 3, 24, 36)
    assert model.prepare(images).shape == (2, 3, 16, 24)
    assert model.eval()(images).shape == (2, 2)
