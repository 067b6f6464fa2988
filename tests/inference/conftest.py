"""Untrained generators whose noise and mean w are not those of the start, so that every setting shows."""

from typing import Any

import pytest
import torch

from duetgan.inference.samples import Sampler
from duetgan.models.registry import architecture_of
from duetgan.models.restore import generator_from
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.seeding import forked
from duetgan.utils.seeding import generator as keyed_generator
from tests.metrics.conftest import CLASSES, SIDE, TINY, classifier_run, make_run

DCGAN: dict[str, Any] = {"architecture": "dcgan", "sizes": {"z_dim": 4, "width": 2}}
R3: dict[str, Any] = {"z_dim": 4, "width": 8, "cardinality": 2, "blocks": 1}


@pytest.fixture(scope="module", autouse=True)
def slim_classifiers(slim_resnet18):
    """Nothing here depends on its size."""


def styled(*, classes=3, channels=1, side=SIDE, seed=0):
    """A StyleGAN2 generator whose noise counts and whose w_avg is about the mean of w."""
    with forked(seed, "init", "styled"):
        generator = Generator(GeneratorConfig(**TINY), resolution=side, channels=channels, classes=classes)
        z = torch.randn(200, generator.z_dim)
        with torch.no_grad():
            labels = torch.arange(200) % classes if classes else None
            generator.w_avg.copy_(generator.mapping(z, labels).mean(0))
            for layer in generator.styled_layers():
                layer.noise_strength.fill_(0.3)
    return generator.eval().requires_grad_(False)


def without_w(*, classes=3, architecture="r3gan", sizes=R3):
    """A generator without styles."""
    entry = architecture_of(architecture)
    with forked(0, "init", "r3"):
        config = entry.generator_config(**sizes)
        generator = entry.generator(config, resolution=SIDE, channels=1, classes=classes)
    return generator.eval().requires_grad_(False)


def sampler_of(generator, **options):
    """All classes, unless said."""
    return Sampler(generator=generator, **{"chosen": list(range(generator.classes)), **options})


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=keyed_generator(seed, "test"), dtype=torch.float64)


def gan_run(folder, generator, *, architecture="stylegan2", sizes=TINY, resize_filter="none"):
    """A run folder with that generator; returns the folder."""
    shape = {"channels": generator.channels, "classes": generator.classes, "resolution": generator.resolution}
    config, state = {"architecture": architecture, "generator": sizes}, {"generator_ema": generator.state_dict()}
    more = {"classes": CLASSES[: generator.classes], "resize_filter": resize_filter}
    return make_run(folder, task="gan", config=config, shape=shape, state=state, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, slim_classifiers):
    """Run folders: grey with three classes, RGB without any, R3GAN, DCGAN, and a classifier."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "grey": gan_run(folder / "grey", styled(), resize_filter="zero-pad"),
        "plain": gan_run(folder / "plain", styled(classes=0, channels=3)),
        "r3": gan_run(folder / "r3", without_w(), architecture="r3gan", sizes=R3),
        "dcgan": gan_run(folder / "dcgan", without_w(**DCGAN), **DCGAN),
        "classifier": classifier_run(folder / "classifier"),
    }


@pytest.fixture(scope="module")
def checkpoint(runs):
    return load(resolve(runs["grey"]))


@pytest.fixture
def generator(checkpoint):
    return generator_from(checkpoint)


@pytest.fixture
def no_weights(monkeypatch):
    """No ResNet-50 weights are found on this machine."""
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", ())
    monkeypatch.delenv("DUET_WEIGHTS", raising=False)
