from typing import Any

import pytest
import torch

from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.training.gan.context import GanDraws
from duetgan.utils.seeding import forked

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"z_dim": 5, "w_dim": 4, "mapping_layers": 1, "channel_base": 64, "channel_max": 4}


@pytest.fixture(scope="module")
def model():
    with forked(0, "init", "test draws"):
        return Generator(GeneratorConfig(**SIZES), resolution=16, channels=1, classes=3)


class Draws(GanDraws):
    """Of one model and batch size."""

    def __init__(self, model, batch_size=12, seed=0, histogram=(1, 1, 1)):
        super().__init__(seed, CPU, list(histogram))
        self.model, self.batch_size = model, batch_size

    def drawn(self, step, phase, mixing):
        return self.latents(step, phase, self.batch_size, self.model.z_dim, mixing=mixing, num_ws=self.model.num_ws)

    def maps(self, step, phase):
        return self.noise(step, phase, self.batch_size, self.model.noise_shapes())


def same(one, other):
    names = ("z", "z_mixed", "crossover", "labels")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_a_draw_depends_on_its_key_alone(model):
    once, noise = Draws(model).drawn(3, "generator", 0.9), Draws(model).maps(3, "generator")
    assert once.z.shape == once.z_mixed.shape == (12, 5)
    assert once.labels.shape == once.crossover.shape == (12,)
    assert [layer.shape for layer in noise] == [(12, *shape) for shape in model.noise_shapes()]
    first, second = (layer for layer in noise if layer.shape[-1] == 16)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.cat([layer.flatten() for layer in noise]).std().item() == pytest.approx(1, abs=0.05)
    used = Draws(model)
    used.drawn(2, "generator", 0.9)
    used.maps(3, "generator")
    torch.manual_seed(5)
    assert same(used.drawn(3, "generator", 0.9), once)
    state = torch.random.get_rng_state()
    used.drawn(4, "generator", 0.9)
    assert torch.random.get_rng_state().equal(state)


@pytest.mark.parametrize(("seed", "step", "phase"), [(1, 3, "generator"), (0, 4, "generator"), (0, 3, "discriminator")])
def test_seeds_steps_and_phases_differ(model, seed, step, phase):
    one, other = Draws(model).drawn(3, "generator", 0.9), Draws(model, seed=seed).drawn(step, phase, 0.9)
    assert not torch.equal(one.z, other.z)
    assert not torch.equal(one.z_mixed, other.z_mixed)
    assert not torch.equal(one.z, one.z_mixed)
    for a, b in zip(Draws(model).maps(3, "generator"), Draws(model, seed=seed).maps(step, phase), strict=True):
        assert not torch.equal(a, b)


def test_without_mixing_the_first_style_is_the_same(model):
    latents, mixed = Draws(model).drawn(3, "generator", 0.0), Draws(model).drawn(3, "generator", 0.9)
    assert latents.z_mixed is None
    assert latents.crossover is None
    assert torch.equal(latents.z, mixed.z)
    assert torch.equal(latents.labels, mixed.labels)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 1.0])
def test_share_of_mixed_samples_and_range_of_the_crossover(model, probability):
    crossover = Draws(model, batch_size=4000).drawn(0, "generator", probability).crossover
    assert model.num_ws == 6
    mixed = crossover[crossover < 6]
    assert len(mixed) / 4000 == pytest.approx(probability, abs=0.03)
    assert crossover.max() <= 6
    counts = torch.bincount(mixed, minlength=6).double() / len(mixed)
    assert counts[0] == 0  # one style at least comes from z itself
    torch.testing.assert_close(counts[1:], torch.full((5,), 0.2, dtype=torch.float64), rtol=0, atol=0.07)


def test_labels_are_as_frequent_as_in_the_data(model):
    labels = Draws(model, batch_size=4000, histogram=(10, 0, 30)).drawn(0, "generator", 0).labels
    shares = torch.bincount(labels, minlength=3).double() / 4000
    torch.testing.assert_close(shares, torch.tensor([0.25, 0, 0.75], dtype=torch.float64), rtol=0, atol=0.03)
    assert shares[1] == 0
    assert Draws(model, histogram=()).drawn(0, "generator", 0).labels.eq(0).all()


def test_offsets_of_wrong_labels(model):
    offsets = Draws(model).label_offsets(3, 2000)
    assert torch.bincount(offsets, minlength=3)[0] == 0  # never the true label
    assert torch.bincount(offsets).tolist()[1:] == pytest.approx([1000, 1000], abs=120)
    assert torch.equal(Draws(model).label_offsets(3, 2000), offsets)
    assert not torch.equal(Draws(model).label_offsets(4, 2000), offsets)


def test_path_noise_is_of_the_step_alone():
    numbers = GanDraws(0, CPU, [])
    noise = numbers.path_noise(8, 50, (3, 8, 8))
    assert noise.shape == (50, 3, 8, 8)
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(noise, GanDraws(0, CPU, [1, 2]).path_noise(8, 50, (3, 8, 8)))
    assert not torch.equal(noise, numbers.path_noise(12, 50, (3, 8, 8)))
    assert not torch.equal(noise, GanDraws(1, CPU, []).path_noise(8, 50, (3, 8, 8)))
