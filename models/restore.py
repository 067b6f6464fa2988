"""Models out of a checkpoint's dict. No files are touched here: `utils.checkpoint.load` reads them."""

from typing import Any

import torch

from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.gan import ImageDiscriminator, ImageGenerator, StageGenerator
from duetgan.models.registry import DEFAULT, architecture_of
from duetgan.utils.checkpoint import Shape
from duetgan.utils.checkpoint.state_schema import FAULTS, loaded
from duetgan.utils.config import plugins
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError
from duetgan.utils.provenance import recorded


def _restored(checkpoint: dict[str, Any], section: str, part: str, device: torch.device | str) -> Any:
    """The network of a section of the config, with the state of `part`, in evaluation mode on `device`."""
    file, task = checkpoint.get("file", "the checkpoint"), "classifier" if section == "model" else "gan"
    if checkpoint["task"] != task:
        raise UserError(f"{file}: is of task {checkpoint['task']!r}, but a {task!r} checkpoint is needed here")
    if section not in checkpoint["config"]:
        raise UserError(f"{file}: config.{section} is missing; use another checkpoint")
    given: Any = checkpoint["config"][section]
    shape: dict[str, Any] = {key: checkpoint["shape"][key] for key in Shape.model_fields}

    def built() -> Any:
        if task == "classifier":
            return Classifier(build(ModelConfig, given, source="checkpoint's model"), **shape)
        held = {name.partition(".")[0] for name in checkpoint["state"][part]}
        architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
        model = architecture.build(section, given, **shape, **({"progressive": True} if "from_rgbs" in held else {}))
        if "auxiliary" in held:
            model.add_auxiliary()
        return model

    with plugins.hinting(lambda: checkpoint["config"]):
        model: Any = loaded(built, checkpoint, part, str(file))
    return model.to(device, memory_format=torch.channels_last).eval()


def generator_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> ImageGenerator:
    """The EMA generator of a GAN's checkpoint, of the architecture its config names, in evaluation mode. One that was
    saved while it grew makes images as its stage did, its pixels repeated up to the full resolution.

    Raises UserError for another task's checkpoint and for an architecture that is not in the registry.
    """
    model = _restored(checkpoint, "generator", "generator_ema", device).requires_grad_(False)
    side, alpha = checkpoint.get("stage", [model.resolution, 1.0])
    if (side, alpha) == (model.resolution, 1.0):
        return model
    try:
        return StageGenerator(model, side, alpha, shown=model.resolution).eval()
    except FAULTS as error:
        file = checkpoint.get("file", "the checkpoint")
        raise UserError(
            f"{file}: stage [{side}, {alpha}] is none of its network ({error}); use another checkpoint"
        ) from error


def discriminator_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> ImageDiscriminator:
    """The discriminator of a GAN's checkpoint, in evaluation mode. Raises UserError as `generator_from` does."""
    return _restored(checkpoint, "discriminator", "discriminator", device).requires_grad_(False)


def classifier_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> Classifier:
    """The EMA classifier of a checkpoint, in evaluation mode. Raises UserError for another task's checkpoint."""
    model = _restored(checkpoint, "model", "model_ema", device).requires_grad_(False)
    model.lineage = recorded(checkpoint)
    return model
