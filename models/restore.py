"""Models out of a checkpoint's dict. No files are touched here: `utils.checkpoint.load` reads them."""

from typing import Any

import torch

from models.classifier import Classifier, ModelConfig
from models.gan import ImageDiscriminator, ImageGenerator, StageGenerator
from models.registry import DEFAULT, architecture_of
from utils.checkpoint import SHAPE
from utils.checkpoint.state_schema import FAULTS, loaded
from utils.config.build import build
from utils.errors import UserError
from utils.passport import recorded


def _file(checkpoint: dict[str, Any]) -> str:
    return str(checkpoint.get("file", "the checkpoint"))


def _section(checkpoint: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in checkpoint["config"]:
        raise UserError(f"{_file(checkpoint)}: config.{name} is missing; use another checkpoint")
    return checkpoint["config"][name]


def _require_task(checkpoint: dict[str, Any], task: str) -> None:
    if checkpoint["task"] != task:
        raise UserError(
            f"{_file(checkpoint)}: is of task {checkpoint['task']!r}, but a {task!r} checkpoint is needed here"
        )


def generator_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> ImageGenerator:
    """The EMA generator of a GAN's checkpoint, of the architecture its config names, in evaluation mode. One that was
    saved while it grew makes images as its stage did, its pixels repeated up to the full resolution.

    Raises UserError for another task's checkpoint and for an architecture that is not in the registry.
    """
    _require_task(checkpoint, "gan")
    architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
    config = build(architecture.generator_config, _section(checkpoint, "generator"), source="checkpoint's generator")
    shape = {key: checkpoint["shape"][key] for key in SHAPE}
    model: Any = loaded(lambda: architecture.generator(config, **shape), checkpoint, "generator_ema", _file(checkpoint))
    model = model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    side, alpha = checkpoint.get("stage", [model.resolution, 1.0])
    if (side, alpha) == (model.resolution, 1.0):
        return model
    try:
        return StageGenerator(model, side, alpha, shown=model.resolution).eval()
    except FAULTS as error:
        told = f"stage [{side}, {alpha}] is none of its network ({error})"
        raise UserError(f"{_file(checkpoint)}: {told}; use another checkpoint") from error


def discriminator_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> ImageDiscriminator:
    """The discriminator of a GAN's checkpoint, in evaluation mode. Raises UserError as `generator_from` does."""
    _require_task(checkpoint, "gan")
    architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
    section = _section(checkpoint, "discriminator")
    config = build(architecture.discriminator_config, section, source="checkpoint's discriminator")
    shape: dict[str, Any] = {key: checkpoint["shape"][key] for key in SHAPE}
    parts = {name.partition(".")[0] for name in checkpoint["state"].get("discriminator", {})}
    if "from_rgbs" in parts:
        shape["progressive"] = True

    def built() -> ImageDiscriminator:
        network: ImageDiscriminator = architecture.discriminator(config, **shape)
        if "auxiliary" in parts:
            network.add_auxiliary()
        return network

    model: Any = loaded(built, checkpoint, "discriminator", _file(checkpoint))
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)


def classifier_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> Classifier:
    """The EMA classifier of a checkpoint, in evaluation mode. Raises UserError for another task's checkpoint."""
    _require_task(checkpoint, "classifier")
    config = build(ModelConfig, _section(checkpoint, "model"), source="checkpoint's model")
    shape = {key: checkpoint["shape"][key] for key in SHAPE}
    model: Any = loaded(lambda: Classifier(config, **shape), checkpoint, "model_ema", _file(checkpoint))
    model.lineage = recorded(checkpoint)
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
