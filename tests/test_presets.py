"""The recipes configs/stylegan2_*.yaml: they parse, say what the papers say, and build nets of the papers' size."""

from pathlib import Path

import pytest
import torch

from duetgan.models.registry import architecture_of
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.yaml_files import read_yaml

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SIZES = [32, 64, 128, 256, 512, 1024]
# trainable parameters, unconditional, RGB. 256 and 1024 px: as the authors' code prints them
PARAMETERS = {
    32: (19_947_539, 20_720_641),
    64: (23_819_544, 23_407_361),
    128: (24_525_213, 23_882_369),
    256: (24_767_458, 24_001_089),
    512: (30_276_583, 28_982_849),
    1024: (30_370_060, 29_012_513),
}


def preset(size, *overrides) -> GanConfig:
    path = CONFIGS / f"stylegan2_{size}.yaml"
    config = build_run_config(read_yaml(path), list(overrides), str(path))
    assert isinstance(config, GanConfig)
    return config


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


def networks(config, size, classes=0):
    entry = architecture_of(config.architecture)
    shape = {"resolution": size, "channels": 3, "classes": classes}
    with torch.device("meta"):
        return entry.generator(config.generator, **shape), entry.discriminator(config.discriminator, **shape)


def test_there_is_a_preset_for_every_size_and_it_can_be_overridden():
    assert sorted(int(path.stem.split("_")[1]) for path in CONFIGS.glob("stylegan2_*.yaml")) == SIZES
    config = preset(1024, "--generator.activation_checkpointing", "true", "--loss.path_length_weight", "0")
    assert config.generator.activation_checkpointing
    assert not config.discriminator.activation_checkpointing
    assert config.loss.path_length_weight == 0


@pytest.mark.parametrize("size", SIZES)
def test_networks_have_the_papers_number_of_parameters(size):
    generator, discriminator = networks(preset(size), size)
    assert (count(generator), count(discriminator)) == PARAMETERS[size]
    assert generator.resolution == discriminator.resolution == size
    assert {p.device.type for p in generator.parameters()} == {"meta"}
    conditional = networks(preset(size), size, classes=10)
    assert all(count(network) > plain for network, plain in zip(conditional, PARAMETERS[size], strict=True))


@pytest.mark.parametrize("name", ["gan_64", "gan_128", "gan_256", "r3gan_256", "progressive_64"])
def test_a_recipe_named_by_a_size_asks_for_it(name):
    """J24: gan_128 took images of 64 px without a word."""
    assert read_yaml(CONFIGS / f"{name}.yaml")["data"]["resolution"] == int(name.partition("_")[2])
