"""The registry of GANs: a third one is one more file and one more line here."""

from dataclasses import dataclass
from typing import Any

from models.progressive import StageGenerator
from models.r3gan import R3Discriminator, R3DiscriminatorConfig, R3Generator, R3GeneratorConfig
from models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from utils.cli import did_you_mean
from utils.errors import UserError

AnyGenerator = Generator | R3Generator | StageGenerator
AnyDiscriminator = Discriminator | R3Discriminator


@dataclass(frozen=True)
class Architecture:
    """Both networks' configs and classes; a network is `cls(config, resolution=, channels=, classes=)`."""

    generator_config: type[GeneratorConfig] | type[R3GeneratorConfig]
    generator: Any  # type[Generator] | type[R3Generator], whose first argument is the config above
    discriminator_config: type[DiscriminatorConfig] | type[R3DiscriminatorConfig]
    discriminator: Any  # likewise


ARCHITECTURES = {
    "stylegan2": Architecture(GeneratorConfig, Generator, DiscriminatorConfig, Discriminator),
    "r3gan": Architecture(R3GeneratorConfig, R3Generator, R3DiscriminatorConfig, R3Discriminator),
}
DEFAULT = "stylegan2"  # of checkpoints that were written before there was a choice


def architecture_of(name: str) -> Architecture:
    """The entry of that name; UserError, with the near one, for a name that is not in the registry."""
    if name not in ARCHITECTURES:
        known = list(ARCHITECTURES)
        raise UserError(f"architecture {name!r} is unknown{did_you_mean(name, known)}; there are {', '.join(known)}")
    return ARCHITECTURES[name]
