"""Models out of a checkpoint's dict. No files are touched here: `utils.checkpoint.load` reads them."""

from typing import Any

import torch

from models.resnet import Classifier, ResNetConfig
from models.stylegan2 import Generator, GeneratorConfig
from utils.config import build
from utils.errors import UserError


def _require_task(checkpoint: dict[str, Any], task: str) -> None:
    if checkpoint["task"] != task:
        raise UserError(
            f"this is a checkpoint of task {checkpoint['task']!r}, but a {task!r} checkpoint is needed here"
        )


def generator_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> Generator:
    """The EMA generator of a GAN's checkpoint, in evaluation mode. Raises UserError for another task's checkpoint."""
    _require_task(checkpoint, "gan")
    config = build(GeneratorConfig, checkpoint["config"]["generator"], source="checkpoint's generator")
    model = Generator(config, **checkpoint["shape"])
    model.load_state_dict(checkpoint["state"]["generator_ema"])
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]


def classifier_from(checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> Classifier:
    """The EMA classifier of a checkpoint, in evaluation mode. Raises UserError for another task's checkpoint."""
    _require_task(checkpoint, "classifier")
    config = build(ResNetConfig, checkpoint["config"]["model"], source="checkpoint's model")
    model = Classifier(config, **checkpoint["shape"])
    model.load_state_dict(checkpoint["state"]["model_ema"])
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]
