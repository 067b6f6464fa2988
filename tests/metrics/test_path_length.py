from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.functional.image import perceptual_path_length

from metrics.extractors import PixelFeatures
from metrics.path_length import EPSILON, path_length, steps, trimmed
from models.restore import generator_from
from models.sampling import draw
from utils.checkpoint import load, resolve
from utils.seeding import generator as keyed_generator

PIXELS = PixelFeatures(1)


@pytest.fixture(scope="module")
def generator(runs):
    return generator_from(load(resolve(runs["gan"])))


class Library(nn.Module):
    """Our generator as torchmetrics takes one: its latents are our w, and the way starts at the first end."""

    num_classes = 0

    def __init__(self, start, end):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 64), nn.Tanh()).double()
        self.ends = [start, end]

    def sample(self, num_samples):
        return self.ends.pop(0)[:num_samples]

    def forward(self, w):
        return (self.network(w).reshape(-1, 1, 8, 8) + 1) * 127.5


class Squares(nn.Module):
    """Squared distance of features, in place of LPIPS; torchmetrics gives it images in [-1, 1]."""

    def forward(self, first, second):
        return sum(sign * self.of(images) for images, sign in ((first, 1), (second, -1))).square().sum(1)

    @staticmethod
    def of(images):
        return (images.flatten(1) + 1).sin()


def test_equal_to_torchmetrics():
    """In float64: the quotient of a small difference."""
    start, end = torch.randn(2, 300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    library: Any = Library(start, end)
    mean, _, kept = perceptual_path_length(library, num_samples=300, sim_net=Squares(), resize=None)
    with torch.no_grad():
        found = steps(library.forward, lambda x: Squares.of(2 * (x / 255) - 1), start, end, torch.zeros(300))
    assert float(trimmed(found).mean()) == pytest.approx(float(mean), rel=1e-6)
    assert len(trimmed(found)) == len(kept)


def test_ways_of_a_generator(generator):
    """Step by step for one way, in whichever batch it is."""
    labels = torch.arange(12) % 3
    value, interval = path_length(generator, PIXELS, labels=labels, n=12, seed=4, batch_size=5)
    again = path_length(generator, PIXELS, labels=labels, n=12, seed=4, batch_size=64)
    assert value == pytest.approx(again[0], rel=0.05)  # of float32's differences
    assert interval[0] < value < interval[1]
    found = []
    for i in range(12):
        z, maps = draw(generator, [2 * i, 2 * i + 1], 4)
        t = float(torch.rand(1, generator=keyed_generator(4, "eval", "path length", i)))
        with torch.no_grad():
            w = generator.mapping(z, labels[i].expand(2))
            images = []
            for position in (t, t + EPSILON):
                styles = w[0].lerp(w[1], position).expand(1, generator.num_ws, -1)
                images.append(generator.synthesis(styles, [each[:1] for each in maps]))
        first, second = (PIXELS(((image + 1) * 127.5).clamp(0, 255)).double() for image in images)
        found.append(float((first - second).square().sum()) / EPSILON**2)
    assert value == pytest.approx(float(trimmed(torch.tensor(found)).mean()), rel=0.05)


def test_a_generator_that_ignores_its_latents_has_none(generator, monkeypatch):
    shown = generator.synthesis(torch.zeros(1, generator.num_ws, generator.w_avg.shape[0]), "none").detach()
    monkeypatch.setattr(generator, "synthesis", lambda ws, noise: shown.expand(len(ws), -1, -1, -1))
    assert path_length(generator, PIXELS, labels=torch.zeros(4, dtype=torch.int64), n=4, seed=0) == (0.0, [0.0, 0.0])
