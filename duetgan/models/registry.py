"""The registries: another GAN (models/gan.py), or family of backbones (backbones/base.py), is a
file and a line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from duetgan.models import dcgan, r3gan, stylegan2
from duetgan.models.backbones import timm, torchvision
from duetgan.models.backbones.airbench import AIRBENCH
from duetgan.models.backbones.base import Backbone
from duetgan.utils.config.build import build
from duetgan.utils.config.cli import entry


@dataclass(frozen=True)
class Architecture:
    """Both networks' configurations and classes; a network is `cls(config, resolution=, channels=,
    classes=)`.
    """

    generator_config: type[Any]
    generator: Any  # type[ImageGenerator]
    discriminator_config: type[Any]
    discriminator: Any  # type[ImageDiscriminator]
    # section -> key -> default of a training
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def build(self, section: str, given: dict[str, Any], **shape: Any) -> Any:
        """The network of a section of a checkpoint's config. Raises UserError for a config that is
        none.
        """
        config = build(getattr(self, f"{section}_config"), given, source=f"checkpoint's {section}")
        return self.network(section, config, **shape)

    def network(self, section: str, config: Any, *, pixel_format: Any = None, **shape: Any) -> Any:
        """The generator or discriminator of a configuration, for images as a checkpoint's `shape`
        tells them.
        """
        network = getattr(self, section)(config, **shape)
        network.pixel_format = pixel_format
        return network


ARCHITECTURES = {
    "stylegan2": Architecture(
        stylegan2.GeneratorConfig,
        stylegan2.Generator,
        stylegan2.DiscriminatorConfig,
        stylegan2.Discriminator,
    ),
    "r3gan": Architecture(
        r3gan.R3GeneratorConfig,
        r3gan.R3Generator,
        r3gan.R3DiscriminatorConfig,
        r3gan.R3Discriminator,
        r3gan.RECIPE,
    ),
    "dcgan": Architecture(
        dcgan.DcganGeneratorConfig,
        dcgan.DcganGenerator,
        dcgan.DcganConfig,
        dcgan.DcganDiscriminator,
        dcgan.RECIPE,
    ),
}
DEFAULT = "stylegan2"  # of checkpoints that were written before there was a choice
FAMILIES = (torchvision.RESNET, torchvision.CONVNEXT, torchvision.EFFICIENTNET, AIRBENCH)
BACKBONES = {name: family for family in FAMILIES for name in family.names}


def architecture_of(name: str) -> Architecture:
    """The entry of that name; UserError, with the near one, for a name that is not in the registry."""
    return entry(ARCHITECTURES, name, "architecture")


def backbone_of(name: str) -> Backbone:
    """The description of the network of that name; UserError, with the near one, for an unknown
    name.
    """
    if name.startswith(timm.PREFIX):
        return timm.timm_backbone(name)
    return entry(BACKBONES, name, "model", "discriminator", "timm:NAME")
