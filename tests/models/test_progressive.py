"""Both networks at the stages of progressive growing."""

from typing import Any

import pytest
import torch

from duetgan.models.gan import StageGenerator, generate
from tests.conftest import assert_raises
from tests.models import reference, test_discriminator, test_generator
from tests.models.helpers import close, draw

STAGES = [4, 8, 16, 32]
ALPHAS = [0.0, 0.3, 1.0]


def build_generator(**more):
    return test_generator.build(32, 3, 2, channel_base=128, **more)


def build_discriminator(architecture="residual", **more):
    with_stages: dict[str, Any] = {"channel_base": 128, "architecture": architecture, "progressive": True}
    return test_discriminator.build(32, 3, 2, **with_stages | more)


def tensor(alpha):
    return torch.tensor(alpha, dtype=torch.float64)


@pytest.mark.parametrize("resolution", STAGES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", [float, tensor])
def test_a_generators_stage_equals_the_reference(resolution, alpha, kind):
    generator = build_generator()
    ws = draw(3, generator.num_ws_at(resolution), generator.w_dim, key="ws")
    maps = [draw(3, *shape, key=f"{shape}") for shape in generator.noise_shapes(resolution)]
    found = generator.synthesis(ws, maps, resolution=resolution, alpha=kind(alpha))
    assert found.shape == (3, 3, resolution, resolution)
    drawn = [m.numpy() for m in maps]
    close(found, reference.synthesis(generator, ws.numpy(), drawn, resolution=resolution, alpha=alpha), 1e-10)


def test_what_is_of_no_stage_is_not_looked_at_or_refused():
    generator = build_generator()
    ws = draw(2, 8, generator.w_dim, key="ws")
    whole = generator.synthesis(ws, "none", resolution=8)
    assert whole.equal(generator.synthesis(ws[:, :4], "none", resolution=8))
    generator, network, labels = build_generator(), build_discriminator(), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="takes 4 styles, but 3 were given"):
        generator.synthesis(draw(2, 3, generator.w_dim), "none", resolution=8)
    for resolution in (2, 12, 64):
        for use in (generator.num_ws_at, generator.noise_shapes, lambda r: StageGenerator(generator, r)):
            told = rf"of 32 px has no stage of {resolution} px; its stages are \[4, 8, 16,"
            assert_raises(ValueError, told, use, resolution)
    for shape, told in (((64, 64), "images of 64x64 for a discriminator of 32"), ((16, 8), "images of 8x16")):
        assert_raises(ValueError, told, network, draw(2, 3, *shape), labels)


def test_a_stage_can_be_sampled_from_like_a_generator_of_its_size():
    generator = build_generator().float()
    stage = StageGenerator(generator, 8, alpha=torch.tensor(0.25))
    assert (stage.resolution, stage.channels, stage.classes, stage.z_dim, stage.num_ws) == (8, 3, 2, 5, 4)
    assert stage.noise_shapes() == generator.noise_shapes(8)
    z, labels = draw(2, 5).float(), torch.tensor([0, 1])
    maps = [draw(2, *shape).float() for shape in stage.noise_shapes()]
    for noise in ("const", "none", maps):
        found = stage(z, labels, noise=noise, truncation_psi=0.5, truncation_cutoff=2)
        ws = generator.truncate(generator.mapping(z, labels)[:, None].expand(-1, 4, -1), 0.5, 2, labels=labels)
        assert found.equal(generator.synthesis(ws, noise, resolution=8, alpha=0.25))
    assert generate(stage, labels=labels, indices=[3, 4], seed=0).shape == (2, 3, 8, 8)
    assert {id(p) for p in stage.parameters()} == {id(p) for p in generator.parameters()}


@pytest.mark.parametrize("architecture", ["residual", "plain"])
@pytest.mark.parametrize("resolution", STAGES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", [float, tensor])
def test_a_discriminators_stage_equals_the_reference(architecture, resolution, alpha, kind):
    network = build_discriminator(architecture)
    images, labels = draw(2, 3, resolution, resolution), torch.tensor([1, 0])
    form: dict[str, Any] = {"residual": architecture == "residual", "group": 2, "alpha": alpha}
    close(network(images, labels, kind(alpha)), reference.discriminator(network, images.numpy(), labels, **form), 1e-10)
    close(network.hidden(images, alpha=kind(alpha)), reference.hidden(network, images.numpy(), **form), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("resolution", STAGES)
def test_stages_in_reduced_precision_are_close_to_fp32(dtype, resolution):
    # fp16 from 16 px up, so that a fade may join a block in fp16 and one in fp32
    generator, network = build_generator(fp16_resolutions=2).float(), build_discriminator(fp16_resolutions=2).float()
    ws, labels = draw(4, 8, generator.w_dim).float(), torch.tensor([0, 1, 1, 0])
    images, alpha = draw(4, 3, resolution, resolution).float(), torch.tensor(0.3)

    def outputs():
        return (
            generator.synthesis(ws, "const", resolution=resolution, alpha=alpha),
            network(images, labels, alpha),
        )

    expected = outputs()
    with torch.autocast("cpu", dtype=dtype):
        found = outputs()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 0.03
