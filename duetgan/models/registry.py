"""Registries of GANs and of classifiers' backbones.

To add a GAN (models/gan.py) or a family of backbones (backbones/base.py), write a file and add an
entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from duetgan.models import dcgan, growing, r3gan, stylegan2
from duetgan.models.backbones import timm, torchvision
from duetgan.models.backbones.airbench import AIRBENCH
from duetgan.models.backbones.base import Backbone
from duetgan.utils import extras
from duetgan.utils.config.build import build
from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import Config
from duetgan.utils.config.yaml_files import Tree

if TYPE_CHECKING:
    from duetgan.models.classifier import Classifier


@dataclass(frozen=True)
class Architecture:
    """A GAN: classes of its networks and of their configurations."""

    generator_config: type[Config]
    generator: type[Any]  # an ImageGenerator
    discriminator_config: type[Config]
    discriminator: type[Any]  # an ImageDiscriminator
    # defaults of the training config: section -> key -> value
    recipe: Mapping[str, Tree] = field(default_factory=dict)
    # the networks for progressive growing; None if it cannot grow
    growing: "Architecture | None" = None

    def build(self, section: str, tree: Tree, **shape: Any) -> Any:
        """Build a network from a section of a checkpoint's config.

        Args:
            section: "generator" or "discriminator".
            tree: Keys and values of the section.
            shape: The checkpoint's `shape`: resolution, channels, classes, pixel_format.

        Raises:
            UserError: The section is no valid config.
        """
        config = build(getattr(self, f"{section}_config"), tree, source=f"checkpoint's {section}")
        return self.network(section, config, **shape)

    def network(
        self,
        section: str,
        config: Config,
        *,
        pixel_format: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Any:
        """Build the network of a section from its `config`; see `build` for the arguments."""
        network = getattr(self, section)(config, **shape)
        network.pixel_format = pixel_format
        return network


ARCHITECTURES = {
    "stylegan2": Architecture(
        stylegan2.GeneratorConfig,
        stylegan2.Generator,
        stylegan2.DiscriminatorConfig,
        stylegan2.Discriminator,
        growing=Architecture(
            stylegan2.GeneratorConfig,
            growing.GrowingGenerator,
            stylegan2.DiscriminatorConfig,
            growing.GrowingDiscriminator,
        ),
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
DEFAULT = "stylegan2"  # architecture of old checkpoints, which do not name it
FAMILIES = (torchvision.RESNET, torchvision.CONVNEXT, torchvision.EFFICIENTNET, AIRBENCH)
BACKBONES = {name: family for family in FAMILIES for name in family.names}


@dataclass(frozen=True, kw_only=True)
class TrainedBackbone:
    """A backbone that is taken from another run's trained network, e.g. a discriminator."""

    describe: Callable[[str], Tree]  # run -> description of the network, which the config keeps
    backbone: Callable[[Tree], Backbone]  # builds the backbone of a description
    load: Callable[["Classifier"], str]  # copies the run's weights, and returns a message


TRAINED_BACKBONES: dict[str, TrainedBackbone] = {}  # value of model.name -> backbone, for extras


def architecture_of(name: str) -> Architecture:
    """Return the architecture `name`.

    Raises UserError, which suggests a similar name, if there is none.
    """
    return entry(ARCHITECTURES, name, "architecture")


def backbone_of(name: str) -> Backbone:
    """Return the description of the classifier network `name`.

    Raises UserError, which suggests a similar name, if there is none.
    """
    if name.startswith(timm.PREFIX):
        return timm.timm_backbone(name)
    return entry(BACKBONES, name, "model", *TRAINED_BACKBONES, "timm:NAME")


extras.attach(__name__)
