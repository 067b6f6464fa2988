"""Paths from sample to sample, against their formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.inference.interpolate import Journey, draw_film, slerp
from duetgan.models.gan import draw
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.inference.conftest import draws, sampler_of, styled, without_w
from tests.models.helpers import to_uint8


def frames_of(sampler, keyframes, frames, space=None):
    """uint8 [n, C, H, W]."""
    journey = Journey(sampler, space, keyframes, frames)
    frames = np.stack(list(journey))
    assert len(frames) == len(journey)
    return torch.from_numpy(frames.transpose(0, 3, 1, 2))


def near(a, b):
    return int((a.int() - b.int()).abs().max()) <= 1


def test_slerp_is_shoemakes_formula():
    a, b, t = draws(5, 7), draws(5, 7, seed=1), torch.tensor([0.0, 0.25, 0.5, 0.9, 1.0])[:, None].double()
    found = slerp(a, b, t)
    for row in range(5):
        x, y, share = a[row].numpy(), b[row].numpy(), float(t[row])
        x_length, y_length = math.sqrt((x * x).sum()), math.sqrt((y * y).sum())
        x, y = x / x_length, y / y_length
        angle = math.acos(sum(p * q for p, q in zip(x, y, strict=True)))
        way = (math.sin((1 - share) * angle) * x + math.sin(share * angle) * y) / math.sin(angle)
        expected = way * ((1 - share) * x_length + share * y_length)
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[[0, 4]], torch.stack([a[0], b[4]]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [1.0, 3.0, -1.0])
def test_slerp_of_parallel_and_opposite_vectors_is_straight(factor):
    a = draws(1, 6)
    found = slerp(a, factor * a, torch.tensor([[0.25]]).double())
    length = a.norm() * (0.75 + 0.25 * abs(factor))
    torch.testing.assert_close(found, a / a.norm() * (0.75 + 0.25 * math.copysign(1, factor)) * length)


def test_between_samples_w_is_straight_and_z_follows_the_circle(generator):
    sampler = sampler_of(generator, noise_mode="const", chosen=[2, 1], truncation_psi=0.7)
    found = frames_of(sampler, keyframes=3, frames=4)
    w = [generator.mapping(draw(generator, [k], s)[0], torch.tensor([k])) for s, k in ((0, 2), (0, 1), (1, 2))]
    centres = generator.truncation_centre(torch.tensor([2, 1, 2]), "class")
    for number in range(12):
        share, first = number % 4 / 4, number // 4
        mixed = (1 - share) * w[first] + share * w[(first + 1) % 3]
        centre = (1 - share) * centres[first] + share * centres[(first + 1) % 3]
        styles = centre + 0.7 * (mixed - centre)
        assert near(found[number], to_uint8(generator.synthesis(styles[:, None].expand(-1, 4, -1), "const"))[0])
    sampler = sampler_of(generator, noise_mode="none", chosen=[0, 2], truncation_psi=0.7)
    found = frames_of(sampler, space="z", keyframes=2, frames=4)
    z = [draw(generator, [index], 0)[0] for index in (0, 2)]
    for number in range(8):
        share, first = number % 4 / 4, number // 4
        labels = [0, 2] if first == 0 else [2, 0]
        way = slerp(z[first], z[1 - first], torch.tensor([[share]]))
        centres = generator.truncation_centre(torch.tensor(labels), "class")
        w = [generator.mapping(way, torch.tensor([label])).lerp(centres[i], 0.3) for i, label in enumerate(labels)]
        styles = (1 - share) * w[0] + share * w[1]
        assert near(found[number], to_uint8(generator.synthesis(styles[:, None].expand(-1, 4, -1), "none"))[0])
    assert not near(found, frames_of(sampler, space="w", keyframes=2, frames=4))


def test_without_w_it_goes_through_z_and_the_classes_embeddings():
    generator = without_w()
    sampler = sampler_of(generator, chosen=[1, 0])
    found = frames_of(sampler, keyframes=2, frames=4)
    z = [draw(generator, [index], 0)[0] for index in (1, 0)]
    table = generator.embed(torch.eye(3))
    for number in range(8):
        share, first = number % 4 / 4, number // 4
        way = slerp(z[first], z[1 - first], torch.tensor([[share]]))
        labels = [1, 0] if first == 0 else [0, 1]
        embedded = (1 - share) * table[labels[0]] + share * table[labels[1]]
        start = generator.linear(torch.cat([way, embedded[None]], dim=1))[:, :, None, None] * generator.basis
        assert near(found[number], to_uint8(generator.to_rgb(generator.stages(start)))[0])
    assert near(found[::4], sampler.images([0, 1]))
    assert near(sampler.images([0, 1]), sampler.images(range(2)))  # nothing is left behind in the generator


@pytest.mark.parametrize("make", [styled, without_w])
def test_without_classes(make):
    sampler = sampler_of(make(classes=0), noise_mode="const")
    found = frames_of(sampler, space="z", keyframes=2, frames=2)
    assert near(found[::2], replace(sampler, sources=[0, 1]).images([0, 1]))
    z = [draw(sampler.generator, [0], seed)[0] for seed in (0, 1)]
    assert near(found[1], to_uint8(sampler.generator(slerp(z[0], z[1], torch.tensor([[0.5]])), None, noise="const"))[0])


def test_a_film_is_written_of_so_many_samples(generator, tmp_path):
    assert len(Journey(sampler_of(generator), None, keyframes=2, frames=30)) == 60
    assert len(Journey(sampler_of(generator), None, None, frames=1)) == 8
    assert len(Journey(sampler_of(styled(classes=12)), None, None, frames=2)) == 24
    assert len(Journey(sampler_of(styled(classes=20)), None, None, frames=1)) == 16
    sampler = sampler_of(generator, noise_mode="const")
    journey = Journey(sampler, None, keyframes=2, frames=3)
    assert draw_film(journey, tmp_path / "x.gif", fps=10) == 6
    with Image.open(tmp_path / "x.gif") as image:
        assert (getattr(image, "n_frames", 0), image.size, image.info["duration"]) == (6, (256, 256), 100)
    assert draw_film(journey, tmp_path / "x.mp4", fps=30, scale=2) == 6
    assert_raises(UserError, r"\.webm.* there are \.mp4, \.gif", draw_film, journey, tmp_path / "x.webm", fps=30)
