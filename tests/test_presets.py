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


def test_there_is_a_preset_for_every_size():
    assert sorted(int(path.stem.split("_")[1]) for path in CONFIGS.glob("stylegan2_*.yaml")) == SIZES


@pytest.mark.parametrize("size", SIZES)
def test_networks_have_the_papers_number_of_parameters(size):
    generator, discriminator = networks(preset(size), size)
    assert (count(generator), count(discriminator)) == PARAMETERS[size]
    assert generator.resolution == discriminator.resolution == size
    assert {p.device.type for p in generator.parameters()} == {"meta"}
    conditional = networks(preset(size), size, classes=10)
    assert all(count(network) > plain for network, plain in zip(conditional, PARAMETERS[size], strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_numbers_of_every_preset(size):
    config = preset(size)
    assert config.generator.channel_base == config.discriminator.channel_base == (32768 if size >= 512 else 16384)
    assert config.generator.channel_max == config.discriminator.channel_max == 512
    assert config.generator.fp16_resolutions == config.discriminator.fp16_resolutions == 4
    assert config.generator.conv_clamp == config.discriminator.conv_clamp == 256
    for optimizer in (config.generator_optimizer, config.discriminator_optimizer):
        assert (optimizer.name, optimizer.lr) == ("adam", 0.002 if size == 1024 else 0.0025)
        assert (optimizer.betas, optimizer.eps, optimizer.schedule) == ([0.0, 0.99], 1e-8, "constant")
    assert (config.loss.r1_interval, config.ema.ema_rampup, config.generator.w_avg_beta) == (16, 0.05, 0.995)
    assert config.precision == "fp16"
    for processes in (1, 2):
        config.check_batches(config.stages(size), processes)


@pytest.mark.parametrize("size", SIZES[1:])
def test_presets_with_path_length(size):
    config = preset(size)
    assert (config.loss.path_length_weight, config.loss.path_length_interval) == (2, 4)
    assert config.loss.style_mixing == 0.9
    assert config.loss.r1_gamma == pytest.approx(0.0002 * size**2 / config.batch_size, rel=0.01)
    assert config.ema.ema_kimg == config.batch_size * 10 / 32
    assert (config.generator.mapping_layers, config.discriminator.architecture) == (8, "residual")
    assert (config.batch_size, config.discriminator.group) == (32, 4)
    assert config.steps * config.batch_size == 25_000_000


def test_preset_of_32_px():
    config = preset(32)
    assert (config.batch_size, config.generator.mapping_layers, config.discriminator.group) == (64, 2, 32)
    assert (config.loss.path_length_weight, config.loss.style_mixing, config.loss.r1_gamma) == (0, 0, 0.01)
    assert (config.discriminator.architecture, config.ema.ema_kimg) == ("plain", 500)
    assert config.steps * config.batch_size == 100_000_000
    # P5: stylegan2-ada's `cifar`: ADA, no mirror images
    assert (config.ada.mode, config.ada.target, config.augment.flip) == ("adaptive", 0.6, False)


def test_presets_can_be_overridden():
    config = preset(1024, "--generator.activation_checkpointing", "true", "--loss.path_length_weight", "0")
    assert config.generator.activation_checkpointing
    assert not config.discriminator.activation_checkpointing
    assert config.loss.path_length_weight == 0
