"""A GAN's config, whatever its architecture: it travels to other processes and can be copied."""

import copy
import multiprocessing

import pytest

from models.registry import ARCHITECTURES
from training.gan.config import GanConfig, config_of


def lr_of(config: GanConfig) -> tuple[str, float, str]:
    """What another process sees of a config."""
    return config.architecture, config.generator_optimizer.lr, type(config.generator).__name__


@pytest.fixture(scope="module")
def another_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_travels_to_another_process_and_copies_are_its_own(architecture, another_process):
    config = config_of(architecture)()
    config.generator_optimizer.lr = 0.125
    assert another_process.apply(lr_of, (config,)) == lr_of(config)
    other = copy.deepcopy(config)
    assert type(other) is type(config)
    assert other == config
    other.generator_optimizer.lr = 0.25
    assert config.generator_optimizer.lr == 0.125
