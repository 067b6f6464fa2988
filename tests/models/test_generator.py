from typing import Any

import numpy as np
import pytest
import torch

from duetgan.models.gan import sizes_up_to
from duetgan.models.stylegan2 import (
    DiscriminatorConfig,
    Generator,
    GeneratorConfig,
    MappingNetwork,
    channels_at,
)
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from duetgan.utils.seeding import generator as keyed_generator
from tests.conftest import assert_raises
from tests.models import reference
from tests.models.helpers import close, draw, randomised

TINY: dict[str, Any] = {"z_dim": 5, "w_dim": 6, "mapping_layers": 2, "channel_base": 64, "channel_max": 5}
FORMS = [(8, 1, 0), (16, 3, 3), (32, 1, 4)]  # resolution, channels, classes


def build(resolution=8, channels=1, classes=0, *, kind=Generator, **more):
    """A generator in float64 whose parameters are all away from their start, and a w_avg that is not zero."""
    with forked(0, "init", "test generator"):
        config = GeneratorConfig(**(TINY | more))
        generator = kind(config, resolution=resolution, channels=channels, classes=classes)
    generator = randomised(generator)
    generator.w_avg.copy_(draw(generator.w_dim, key="w_avg"))
    return generator


def maps(generator, count):
    return [draw(count, *shape, key=f"noise{i}") for i, shape in enumerate(generator.noise_shapes())]


def test_mapping_stays_in_single_precision_under_autocast():
    with forked(0, "init", "mapping"):
        network = MappingNetwork(5, 6, 3, 2, 0.01)
    z, labels = draw(4, 5).float(), torch.tensor([0, 1, 2, 0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = network(z, labels)
    torch.testing.assert_close(found, network(z, labels), rtol=0, atol=0)


@pytest.mark.parametrize(("resolution", "channels", "classes"), FORMS)
@pytest.mark.parametrize("noise", ["given", "const", "none"])
def test_images_equal_the_reference(resolution, channels, classes, noise):
    generator = build(resolution, channels, classes)
    z, labels = draw(2, 5, key="z"), torch.tensor([1, 0]) if classes else None
    given = maps(generator, 2)
    found = generator(z, labels, noise=given if noise == "given" else noise)
    assert found.shape == (2, channels, resolution, resolution)
    w = reference.mapping(generator.mapping, z.numpy(), labels, lr_multiplier=0.01)
    layers = [
        {"given": m.numpy(), "const": layer.noise_const.numpy(), "none": None}[noise]
        for m, layer in zip(given, generator.styled_layers(), strict=True)
    ]
    ws = np.repeat(w[:, None], generator.num_ws, axis=1)
    close(found, reference.synthesis(generator, ws, layers), 1e-10)


def test_noise_and_cutoffs_that_are_refused():
    generator, z = build(16), draw(2, 5)
    for noise in ("random", maps(generator, 2)[:4], maps(generator, 2) + maps(generator, 2)[:1]):
        assert_raises(ValueError, "noise: const, none or 5 maps are needed", generator, z, noise=noise)
    assert_raises(ValueError, "cutoff -1 is a number of layers", generator, z, truncation_psi=0.5, truncation_cutoff=-1)


def class_mean(generator, row):
    """The mean w of the latents of the documented key, and the root mean squared distance from it."""
    z = torch.randn(10_000, generator.z_dim, generator=keyed_generator(0, "class mean")).double()
    w = generator.mapping(z, row.expand(10_000, *row.shape)).detach()
    return w.mean(0).numpy(), float((w - w.mean(0)).square().sum(1).mean().sqrt())


@pytest.mark.parametrize("psi", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("cutoff", [None, 0, 3, 6])
@pytest.mark.parametrize(("classes", "mean"), [(0, "class"), (3, "class"), (3, "global")])
def test_truncation(psi, cutoff, classes, mean):
    generator, labels = build(16, classes=classes), torch.tensor([2, 0]) if classes else None
    ws, centre = draw(2, 6, generator.w_dim, key="ws"), generator.w_avg.numpy()
    if classes and mean == "class":
        centre = np.stack([class_mean(generator, label)[0] for label in labels])[:, None]
    expected = ws.numpy().copy()
    expected[:, :cutoff] = centre + psi * (expected[:, :cutoff] - centre)
    close(generator.truncate(ws, psi, cutoff, labels=labels, mean=mean), expected)
    z, options = draw(2, 5, key="z"), {"truncation_psi": psi, "truncation_cutoff": cutoff, "truncation_mean": mean}
    ws = generator.mapping(z, labels)[:, None].expand(-1, 6, -1)
    truncated = generator.truncate(ws, psi, cutoff, labels=labels, mean=mean)
    close(generator(z, labels, **options), generator.synthesis(truncated, "const").detach().numpy())


def test_class_means_are_of_the_present_weights_and_of_several_labels():
    generator, drawn = build(classes=3), []
    generator.mapping.register_forward_hook(lambda *_: drawn.append(1))
    rows = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    for labels in (torch.tensor([1, 1, 0]), rows):
        drawn.clear()
        for _ in range(2):
            means, spreads = generator.class_styles(labels)
        assert len(drawn) == 2  # once for each label, whoever has it
        expected = [class_mean(generator, row) for row in labels]
        close(means, np.stack([mean for mean, _ in expected]))
        assert spreads.tolist() == pytest.approx([spread for _, spread in expected])
    with torch.no_grad():
        generator.mapping.embed.weight.mul_(2)
    close(generator.truncation_centre(rows, "class"), np.stack([class_mean(generator, row)[0] for row in rows]))
    other = draw(20_000, 5, key="others")  # the oracle of the means: other latents
    w = generator.mapping(other, torch.zeros(len(other), dtype=torch.int64)).detach()
    distance = (generator.class_styles(torch.tensor([0]))[0][0] - w.mean(0)).abs()
    assert (distance < 6 * w.std(0) / 100 * 1.5**0.5).all()
    assert_raises(ValueError, "needs labels", generator.truncate, w[:2, None], 0.5)
    assert_raises(ValueError, "mean 'all' is class or global", generator.truncate, w[:2, None], 1, mean="all")


def test_w_avg_moves_with_beta_and_channels_are_counted():
    generator = build(w_avg_beta=0.9)
    before = generator.w_avg.clone()
    mean = draw(6, key="mean").requires_grad_()
    generator.update_w_avg(mean)
    close(generator.w_avg, (0.9 * before + 0.1 * mean).detach().numpy())
    assert not generator.w_avg.requires_grad
    assert "w_avg" in generator.state_dict()
    assert [channels_at(r, 16384, 512) for r in (4, 32, 64, 96, 256)] == [512, 512, 256, 256, 64]
    assert channels_at(64, 32, 512) == 1
    assert build(16).constant.shape == (1, 5, 4, 4)
    assert [block.second.bias.numel() for block in build(32).blocks] == [5, 5, 4, 2]


@pytest.mark.parametrize(
    ("resolution", "near"), [(-8, "8"), (0, "8"), (1, "8"), (4, "8"), (50, "48 or 56"), (100, "96 or 112")]
)
def test_resolutions_that_do_not_work(resolution, near):
    """G4: a side need not be a power of two, and what works at once is named."""
    smaller = f"train with --data.resolution {near[:2]}, or " if resolution > 4 else ""
    told = rf"resolution {resolution}: doubling a few pixels never gives it; {smaller}pack the data with --size {near}$"
    assert_raises(UserError, told, sizes_up_to, resolution)
    with pytest.raises(UserError, match="doubling"):
        Generator(GeneratorConfig(**TINY), resolution=resolution, channels=1, classes=0)


@pytest.mark.parametrize(
    ("config", "bad"),
    [
        (GeneratorConfig, {"z_dim": 0, "mapping_layers": 0, "channel_max": 0, "w_avg_beta": 1.0, "conv_clamp": 0.0}),
        (DiscriminatorConfig, {"fp16_resolutions": -1, "conv_clamp": -1.0, "channel_base": 0, "mapping_layers": -1}),
        (DiscriminatorConfig, {"minibatch_std_group": 0}),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(config, bad):
    for key, value in bad.items():
        assert_raises(UserError, key, config, **{key: value})
