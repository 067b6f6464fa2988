"""Both networks at the stages of progressive growing."""

from typing import Any

import pytest
import torch

from duetgan.models.gan import ImageGenerator, ImageNetwork, generate
from duetgan.models.growing import GrowingDiscriminator, GrowingGenerator, StageGenerator
from tests.conftest import assert_raises
from tests.models import reference, test_discriminator, test_generator
from tests.models.helpers import close, draw

STAGES = [8, 16, 32]
ALPHAS = [0.0, 0.3, 1.0]


def build_generator(side=32, alpha: Any = 1.0, **more):
    generator = test_generator.build(32, 3, 2, kind=GrowingGenerator, channel_base=128, **more)
    generator.enter(side, alpha)
    return generator


def build_discriminator(architecture="residual", **more):
    with_stages: dict[str, Any] = {"channel_base": 128, "architecture": architecture, "kind": GrowingDiscriminator}
    return test_discriminator.build(32, 3, 2, **with_stages | more)


def tensor(alpha):
    return torch.tensor(alpha, dtype=torch.float64)


@pytest.mark.parametrize("resolution", STAGES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", [float, tensor])
def test_a_generators_stage_equals_the_reference(resolution, alpha, kind):
    generator = build_generator(resolution, kind(alpha))
    ws = draw(3, generator.num_ws, generator.w_dim, key="ws")
    maps = [draw(3, *shape, key=f"{shape}") for shape in generator.noise_shapes()]
    found = generator.synthesis(ws, maps)
    assert found.shape == (3, 3, resolution, resolution)
    drawn = [m.numpy() for m in maps]
    close(found, reference.synthesis(generator, ws.numpy(), drawn, resolution=resolution, alpha=alpha), 1e-10)


def test_what_is_of_no_stage_is_not_looked_at_or_refused():
    generator = build_generator(8)
    ws = draw(2, 8, generator.w_dim, key="ws")
    assert generator.synthesis(ws, "none").equal(generator.synthesis(ws[:, :4], "none"))
    network, labels = build_discriminator(), torch.tensor([0, 1])
    for resolution in (2, 12, 64):
        told = rf"of 32 px has no stage of {resolution} px; its stages are \[4, 8, 16,"
        assert_raises(ValueError, told, generator.enter, resolution, 1.0)
    for height, width in ((64, 64), (16, 8), (4, 4)):
        told = rf"images of shape \(3, {height}, {width}\) are of no stage"
        assert_raises(ValueError, told, network, draw(2, 3, height, width), labels)


def test_a_stage_can_be_sampled_from_like_a_generator_of_its_size():
    generator = build_generator(8, torch.tensor(0.25)).float()
    stage = StageGenerator(generator)
    assert (stage.resolution, stage.channels, stage.classes, stage.z_dim) == (32, 3, 2, 5)
    assert stage.noise_shapes() == generator.noise_shapes() == [(1, 4, 4), (1, 8, 8), (1, 8, 8)]
    z, labels = draw(2, 5).float(), torch.tensor([0, 1])
    maps = [draw(2, *shape).float() for shape in stage.noise_shapes()]
    for noise in ("const", "none", maps):
        found = stage(z, labels, noise=noise, truncation_psi=0.5, truncation_cutoff=2)
        ws = generator.truncate(generator.mapping(z, labels)[:, None].expand(-1, 4, -1), 0.5, 2, labels=labels)
        small = generator.synthesis(ws, noise)
        assert found.equal(small.repeat_interleave(4, 2).repeat_interleave(4, 3))
    assert generate(stage, labels=labels, indices=[3, 4], seed=0).shape == (2, 3, 32, 32)
    assert {id(p) for p in stage.parameters()} == {id(p) for p in generator.parameters()}


def test_a_stage_has_all_that_a_generator_says_about_its_images():
    """Every attribute that the interface declares, away from its default."""
    generator = build_generator(8)
    generator.label_sets = [[0], [0, 1]]
    generator.pixel_format = {"depth": "uint16", "low": 100.0, "high": 4000.0}
    stage = StageGenerator(generator)
    declared = {*ImageNetwork.__annotations__, *ImageGenerator.__annotations__} - {"has_styles"}
    assert declared >= {"channels", "resolution", "classes", "pixel_format", "z_dim", "label_sets"}
    for name in declared:
        assert getattr(stage, name) == getattr(generator, name), name
        assert getattr(stage, name) != getattr(ImageGenerator, name, None), name
    assert (stage.spec, stage.num_labels) == (generator.spec, 2)


@pytest.mark.parametrize("architecture", ["residual", "plain"])
@pytest.mark.parametrize("resolution", STAGES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", [float, tensor])
def test_a_discriminators_stage_equals_the_reference(architecture, resolution, alpha, kind):
    network = build_discriminator(architecture)
    images, labels = draw(2, 3, resolution, resolution), torch.tensor([1, 0])
    form: dict[str, Any] = {"residual": architecture == "residual", "group": 2, "alpha": alpha}
    network.enter(resolution, kind(alpha))
    close(network(images, labels), reference.discriminator(network, images.numpy(), labels, **form), 1e-10)
    close(network.hidden(images), reference.hidden(network, images.numpy(), **form), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("resolution", STAGES)
def test_stages_in_reduced_precision_are_close_to_fp32(dtype, resolution):
    # fp16 from 16 px up, so that a fade may join a block in fp16 and one in fp32
    alpha = torch.tensor(0.3)
    generator = build_generator(resolution, alpha, fp16_resolutions=2).float()
    network = build_discriminator(fp16_resolutions=2).float()
    network.enter(resolution, alpha)
    ws, labels = draw(4, 8, generator.w_dim).float(), torch.tensor([0, 1, 1, 0])
    images = draw(4, 3, resolution, resolution).float()

    def outputs():
        return generator.synthesis(ws, "const"), network(images, labels)

    expected = outputs()
    with torch.autocast("cpu", dtype=dtype):
        found = outputs()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 0.03
