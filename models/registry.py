"""The registry of GANs: another one is one more file and one more line here (see models/gan.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models import dcgan, r3gan, stylegan2
from utils.config.cli import did_you_mean
from utils.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """Both networks' configurations and classes; a network is `cls(config, resolution=, channels=, classes=)`."""

    generator_config: type[Any]
    generator: Any  # type[ImageGenerator]
    discriminator_config: type[Any]
    discriminator: Any  # type[ImageDiscriminator]
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # section -> key -> default of a training


ARCHITECTURES = {
    "stylegan2": Architecture(
        stylegan2.GeneratorConfig, stylegan2.Generator, stylegan2.DiscriminatorConfig, stylegan2.Discriminator
    ),
    "r3gan": Architecture(
        r3gan.R3GeneratorConfig, r3gan.R3Generator, r3gan.R3DiscriminatorConfig, r3gan.R3Discriminator, r3gan.RECIPE
    ),
    "dcgan": Architecture(
        dcgan.DcganGeneratorConfig,
        dcgan.DcganGenerator,
        dcgan.DcganDiscriminatorConfig,
        dcgan.DcganDiscriminator,
        dcgan.RECIPE,
    ),
}
DEFAULT = "stylegan2"  # of checkpoints that were written before there was a choice


def architecture_of(name: str) -> Architecture:
    """The entry of that name; UserError, with the near one, for a name that is not in the registry."""
    if name not in ARCHITECTURES:
        known = list(ARCHITECTURES)
        raise UserError(f"architecture {name!r} is unknown{did_you_mean(name, known)}; there are {', '.join(known)}")
    return ARCHITECTURES[name]
