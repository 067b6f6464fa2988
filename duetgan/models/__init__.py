"""Networks of GANs and classifiers, and the registries that look them up by name."""

from typing import TYPE_CHECKING

from duetgan.lazy import lazily

if TYPE_CHECKING:
    from duetgan.models.backbones.base import Backbone
    from duetgan.models.gan import ImageDiscriminator, ImageGenerator
    from duetgan.models.registry import ARCHITECTURES, BACKBONES, Architecture

__all__ = [
    "ARCHITECTURES",
    "BACKBONES",
    "Architecture",
    "Backbone",
    "ImageDiscriminator",
    "ImageGenerator",
]
__getattr__ = lazily(
    "duetgan.models", {"registry": __all__, "backbones.base": ["Backbone"], "gan": __all__[4:]}
)
