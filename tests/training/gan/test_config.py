"""A GAN's config, whatever its architecture: it travels to other processes and can be copied."""

import copy
import pickle

import pytest

from duetgan.models.registry import ARCHITECTURES
from duetgan.training.gan.config import config_of


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_travels_to_another_process_and_copies_are_its_own(architecture):
    config = config_of(architecture)()
    config.generator_optimizer.lr = 0.125
    sent = pickle.dumps(config)
    config_of.cache_clear()  # as in a process that has not made this architecture's class
    for other in (pickle.loads(sent), copy.deepcopy(config)):
        assert (other.architecture, other.generator_optimizer.lr) == (architecture, 0.125)
        assert type(other.generator) is type(config.generator)
        other.generator_optimizer.lr = 0.25
    assert config.generator_optimizer.lr == 0.125
