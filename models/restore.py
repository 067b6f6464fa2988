"""Models out of a checkpoint's dict. No files are touched here: `utils.checkpoint.load` reads them."""

from typing import Any

import torch

from models.classifier import Classifier, ModelConfig
from models.gan import ImageGenerator, StageGenerator
from models.registry import DEFAULT, architecture_of
from utils.config import build
from utils.errors import UserError


def _require_task(checkpoint: dict[str, Any], task: str) -> None:
    if checkpoint["task"] != task:
        where = checkpoint.get("file", "the checkpoint")
        raise UserError(f"{where}: is of task {checkpoint['task']!r}, but a {task!r} checkpoint is needed here")


def generator_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> ImageGenerator:
    """The EMA generator of a GAN's checkpoint, of the architecture its config names, in evaluation mode. One that was
    saved while it grew makes images as its stage did, its pixels repeated up to the full resolution.

    Raises UserError for another task's checkpoint and for an architecture that is not in the registry.
    """
    _require_task(checkpoint, "gan")
    architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
    tree = checkpoint["config"]["generator"]
    config = build(architecture.generator_config, tree, source="checkpoint's generator")
    model = architecture.generator(config, **checkpoint["shape"])
    model.load_state_dict(checkpoint["state"]["generator_ema"])
    model = model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    side, alpha = checkpoint.get("stage", [model.resolution, 1.0])
    if (side, alpha) == (model.resolution, 1.0):
        return model
    return StageGenerator(model, side, alpha, shown=model.resolution).eval()


def classifier_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> Classifier:
    """The EMA classifier of a checkpoint, in evaluation mode. Raises UserError for another task's checkpoint."""
    _require_task(checkpoint, "classifier")
    config = build(ModelConfig, checkpoint["config"]["model"], source="checkpoint's model")
    model = Classifier(config, **checkpoint["shape"])
    model.load_state_dict(checkpoint["state"]["model_ema"])
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]
