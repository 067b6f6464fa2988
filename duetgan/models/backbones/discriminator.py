"""A GAN's discriminator as a backbone: what it has learnt to see, up to its last maps of 4x4
pixels.

Radford et al. (1511.06434, section 5.1) classify by a discriminator's maps; here their means are
the features. What follows them in the discriminator is not taken: it may look at the batch, and
asks one question only.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from duetgan.models.backbones.base import Backbone
from duetgan.models.registry import DEFAULT, architecture_of
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.config.model import PositiveInt, Stored
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import Rectangle

NAME = "discriminator"


class Form(Stored):
    """What is known of the discriminator."""

    architecture: str
    resolution: PositiveInt | Rectangle
    channels: Literal[1, 3]
    config: dict[str, Any]


class Trunk(nn.Module):
    """A discriminator's stages, the means of the last maps, and a head for classes."""

    def __init__(self, discriminator: Any) -> None:
        super().__init__()
        for name, stage in discriminator.trunk().items():
            self.add_module(name, stage)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(discriminator.trunk_width, 2)


def discriminator_backbone(form: Mapping[str, Any]) -> Backbone:
    """The description of a discriminator's trunk. Raises UserError for a form that is none."""
    with explained(ValueError, "{}; leave it out, the run of model.weights says it".format):
        about = Form.read(form, "model.discriminator")
    size, given = about.resolution, about.channels

    def trunk(_name: str = NAME, channels: int = given) -> Trunk:
        if channels != given:
            raise UserError(
                f"model.weights: the discriminator has seen images of {given} channels, these have {channels}; pack "
                f"them with --channels {given}, or give another GAN"
            )
        shape = {"classes": 0, "resolution": size, "channels": given}
        return Trunk(
            architecture_of(about.architecture).build("discriminator", about.config, **shape)
        )

    with torch.device("meta"):
        *stages, _pool, _fc = dict(trunk().named_children())
    return Backbone(
        names=(NAME,),
        network=trunk,
        stems=False,
        stages={stage: (stage,) for stage in stages},
        pool=("pool",),
        first="stem",
        head="fc",
        maps=stages[-1],
        side=size if isinstance(size, int) else None,
    )


def form_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a GAN's checkpoint says of its discriminator."""
    shape, config = content["shape"], content["config"]
    about = {
        "architecture": config.get("architecture", DEFAULT),
        "config": dict(config["discriminator"]),
    }
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
