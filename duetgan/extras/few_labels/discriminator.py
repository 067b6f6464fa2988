"""A GAN's discriminator as the backbone of a classifier.

The backbone ends with the discriminator's last feature maps, which have 4x4 pixels. The features
are the means of these maps; Radford et al. (1511.06434, section 5.1) also classify by a
discriminator's maps. The layers after these maps are left out, because they may use statistics of
the batch, and only separate real images from samples.
"""

from typing import Literal

import torch
from torch import nn

from duetgan.models.backbones.base import Backbone
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageDiscriminator
from duetgan.models.registry import DEFAULT, TRAINED_BACKBONES, TrainedBackbone, architecture_of
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.provenance import Lineage, join, recorded
from duetgan.utils.config.model import PositiveInt, Stored
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import Rectangle

NAME = "discriminator"


class Form(Stored):
    """The description of a discriminator: its architecture, configuration and image size."""

    architecture: str
    resolution: PositiveInt | Rectangle
    channels: Literal[1, 3]
    config: Tree


class Trunk(nn.Module):
    """A network that consists of a discriminator's stages, average pooling and a linear head.

    The stages are those up to the last feature maps.
    """

    def __init__(self, discriminator: ImageDiscriminator) -> None:
        super().__init__()
        for name, stage in discriminator.trunk().items():
            self.add_module(name, stage)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(discriminator.trunk_width, 2)


def discriminator_backbone(form: Tree) -> Backbone:
    """Return the `Backbone` that describes the trunk of a discriminator (see `Trunk`).

    `form` is a `Form` as a dict. Raises UserError if it is invalid.
    """
    with explained(ValueError, "{}; leave it out, the run of model.weights says it".format):
        described = Form.read(form, "model.discriminator")
    size = described.resolution
    trained_channels = described.channels

    def trunk(_name: str = NAME, channels: int = trained_channels) -> Trunk:
        if channels != trained_channels:
            raise UserError(
                f"model.weights: the discriminator has seen images of {trained_channels} channels, "
                f"these have {channels}; pack them with --channels {trained_channels}, or give "
                "another GAN"
            )
        discriminator = architecture_of(described.architecture).build(
            "discriminator",
            described.config,
            classes=0,
            resolution=size,
            channels=trained_channels,
        )
        return Trunk(discriminator)

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


def form_of(content: checkpoints.Checkpoint) -> Tree:
    """Return the `Form` of the discriminator in the checkpoint of a GAN, as a dict."""
    shape = content["shape"]
    config = content["config"]
    return {
        "architecture": config.get("architecture", DEFAULT),
        "config": dict(config["discriminator"]),
        "resolution": shape["resolution"],
        "channels": shape["channels"],
    }


def read_form(run: str) -> Tree:
    """Return the `Form` of the discriminator in a GAN's run, as a dict.

    `run` is a checkpoint file, or a run folder, whose last checkpoint is read. Raises UserError for
    a checkpoint that is not of a GAN.
    """
    content = checkpoints.load(checkpoints.resolve(run))
    if content["task"] != "gan":
        raise UserError(
            f"model.weights {run}: is of task {content['task']!r}; model.name {NAME} needs a GAN's "
            "run, whose discriminator it takes"
        )
    return form_of(content)


def load_discriminator(model: Classifier) -> str:
    """Copy the weights of a GAN's discriminator, except its head, to `model`; return a message.

    `model.config.weights` is the run of the GAN. The discriminator has seen samples of the GAN's
    generator. `model.lineage` is set to record this, so the classifier cannot evaluate that
    generator.

    Raises:
        UserError: The checkpoint is not of a GAN, or its discriminator differs from the one that
            the config describes.
    """
    # Imported here, because these modules import models.classifier.
    from duetgan.metrics.lineage import provenance_of
    from duetgan.models.restore import discriminator_from, generator_from

    run = model.config.weights
    assert run is not None
    path = checkpoints.resolve(run)
    content = checkpoints.load(path)
    state = Trunk(discriminator_from(content)).state_dict()
    weights = {name: value for name, value in state.items() if not name.startswith("fc.")}
    if form_of(content) != model.config.discriminator:
        raise UserError(
            f"model.weights {run}: its discriminator is not model.discriminator; leave that out"
        )
    model.network.load_state_dict(weights, strict=False)
    passport = provenance_of(
        generator_from(content), content, seed=content["config"].get("seed", 0)
    )
    model.lineage = join(recorded(content), Lineage.of(synthetic=[passport]))
    return f"weights from {path}: its discriminator up to 4 px, {len(weights)} tensors; head new"


TRAINED_BACKBONES[NAME] = TrainedBackbone(
    describe=read_form, backbone=discriminator_backbone, load=load_discriminator
)
