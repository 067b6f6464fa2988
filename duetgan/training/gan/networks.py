"""The networks of a GAN, as a config describes them for a data set."""

import numpy as np
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.models.gan import ImageDiscriminator, ImageGenerator
from duetgan.models.registry import architecture_of
from duetgan.training.gan.config import GanConfig
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked


def build_networks(
    config: GanConfig, dataset: Dataset, device: torch.device
) -> tuple[ImageGenerator, ImageDiscriminator]:
    """Build the generator and the discriminator, each initialised from its own seed key."""
    shape = config.shape(dataset)
    networks = architecture_of(config.architecture)
    if config.progressive.start is not None:
        assert networks.growing is not None  # The config refuses other architectures.
        networks = networks.growing
    with forked(config.seed, "init", "generator"):
        generator = networks.network("generator", config.generator, **shape)
    with forked(config.seed, "init", "discriminator"):
        discriminator = networks.network("discriminator", config.discriminator, **shape)
    if config.loss.auxiliary_weight:
        if shape["classes"] < 2:
            raise UserError(
                "loss.auxiliary_weight needs images of two classes or more: leave it out"
            )
        with forked(config.seed, "init", "auxiliary"):
            discriminator.add_auxiliary()
    if dataset.meta.sets is not None and shape["classes"]:
        order = np.argsort(np.negative(dataset.meta.histogram), kind="stable")
        generator.label_sets = [dataset.meta.sets[label] for label in order]
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return (
        generator.to(device, memory_format=layout),
        discriminator.to(device, memory_format=layout),
    )
