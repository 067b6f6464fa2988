"""The registry of backbones: another family is one more file (see base.py) and one more line here."""

from models.backbones.airbench import AIRBENCH
from models.backbones.base import Backbone
from models.backbones.timm import PREFIX, timm_backbone
from models.backbones.torchvision import CONVNEXT, EFFICIENTNET, RESNET
from utils.config.cli import did_you_mean
from utils.errors import UserError

FAMILIES = (RESNET, CONVNEXT, EFFICIENTNET, AIRBENCH)
BACKBONES = {name: family for family in FAMILIES for name in family.names}


def backbone_of(name: str) -> Backbone:
    """The description of the network of that name; UserError, with the near one, for an unknown name."""
    if name.startswith(PREFIX):
        return timm_backbone(name)
    if name not in BACKBONES:
        known = [*BACKBONES, "discriminator"]
        raise UserError(
            f"model {name!r} is unknown{did_you_mean(name, known)}; choose one of {', '.join(known)} or timm:NAME"
        )
    return BACKBONES[name]
