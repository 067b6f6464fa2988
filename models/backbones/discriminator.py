"""A GAN's discriminator as a backbone: what it has learnt to see, up to its last maps of 4x4 pixels.

Radford et al. (1511.06434, section 5.1) classify by a discriminator's maps; here their means are the features. What
follows them in the discriminator is not taken: it may look at the batch, and asks one question only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.backbones.base import Backbone
from models.registry import DEFAULT, architecture_of
from utils import checkpoint as checkpoints
from utils.config.build import build
from utils.errors import UserError
from utils.schema import anything, mapping, one_of, record, text, whole

NAME = "discriminator"
Form = Mapping[str, Any]  # architecture, resolution, channels, and the network's config
check_form = record(
    {"architecture": text, "resolution": whole(1), "channels": one_of(1, 3), "config": mapping(anything)}
)


class Trunk(nn.Module):
    """A discriminator's stages, the means of the last maps, and a head for classes."""

    def __init__(self, discriminator: Any) -> None:
        super().__init__()
        for name, stage in discriminator.trunk().items():
            self.add_module(name, stage)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(discriminator.trunk_width, 2)


@dataclass(frozen=True, kw_only=True)
class DiscriminatorBackbone(Backbone):
    """The discriminator that `form` describes."""

    form: Form

    def discriminator(self) -> Any:
        """It, with new weights; what belongs to classes is left out."""
        entry = architecture_of(self.form["architecture"])
        config = build(entry.discriminator_config, dict(self.form["config"]), source="model.discriminator")
        shape = {key: self.form[key] for key in ("resolution", "channels")}
        return entry.discriminator(config, classes=0, **shape)

    def build(self, name: str, *, channels: int = 3, stem: str = "imagenet", he_strides: bool = False) -> Any:
        if stem != "imagenet" or he_strides:
            raise UserError("model.stem and model.he_strides are not for a discriminator: leave them out")
        if channels != (own := self.form["channels"]):
            raise UserError(
                f"model.weights: the discriminator has seen images of {own} channels, these have {channels}; pack them "
                f"with --channels {own}, or give another GAN"
            )
        return Trunk(self.discriminator())

    def published(self, name: str) -> dict[str, str]:
        return {}


def discriminator_backbone(form: Form) -> DiscriminatorBackbone:
    """The description of a discriminator's trunk. Raises UserError for a form that is none."""
    try:
        check_form("model.discriminator", form)
    except ValueError as error:
        raise UserError(f"{error}; leave it out, the run of model.weights says it") from None
    common: dict[str, Any] = {"names": (NAME,), "pool": ("pool",), "first": "stem", "head": "fc", "form": form}
    plain = DiscriminatorBackbone(stages={}, maps="stem", side=form["resolution"], **common)
    with torch.device("meta"):
        stages = list(plain.discriminator().trunk())
    return DiscriminatorBackbone(
        stages={stage: (stage,) for stage in stages}, maps=stages[-1], side=form["resolution"], **common
    )


def form_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a GAN's checkpoint says of its discriminator."""
    shape, config = content["shape"], content["config"]
    about = {"architecture": config.get("architecture", DEFAULT), "config": dict(config["discriminator"])}
    return about | {key: shape[key] for key in ("resolution", "channels")}


def read_form(run: str) -> dict[str, Any]:
    """`form_of` the run's last checkpoint, or a file's. Raises UserError for another task's."""
    content = checkpoints.load(checkpoints.resolve(run))
    if content["task"] != "gan":
        raise UserError(
            f"model.weights {run}: is of task {content['task']!r}; model.name {NAME} needs a GAN's run, whose "
            "discriminator it takes"
        )
    return form_of(content)
