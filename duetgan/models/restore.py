"""Read trained networks as checkpoints, and build models from checkpoints.

The network may come from a run or from export.py; extras read networks of other programs.
"""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.gan import ImageDiscriminator, ImageGenerator
from duetgan.models.growing import StageGenerator
from duetgan.models.registry import DEFAULT, architecture_of
from duetgan.utils import extras, files
from duetgan.utils.checkpoint import (
    Checkpoint,
    Shape,
    checked,
    load,
    resolve,
)
from duetgan.utils.checkpoint.provenance import Lineage, join, recorded
from duetgan.utils.checkpoint.state_schema import FAULTS, load_network
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec


def _restored(
    checkpoint: Checkpoint,
    section: str,
    part: str,
    device: torch.device | str,
    several: bool,
    *,
    growing: bool = False,
) -> Any:
    """Build a network from a checkpoint and return it, frozen and in evaluation mode.

    Args:
        section: The section of the checkpoint's config that describes the network, e.g. generator.
        part: The entry of the checkpoint's state with the weights, e.g. generator_ema.
        several: Accept a network for images with several labels.
        growing: Build the network for progressive growing.

    Raises:
        UserError: The checkpoint is of another task, its config or weights are not valid, or its
            images have several labels and `several` is False.
    """
    file = checkpoint.get("file", "the checkpoint")
    task = "classifier" if section == "model" else "gan"
    if checkpoint["task"] != task:
        raise UserError(
            f"{file}: is of task {checkpoint['task']!r}, but a {task!r} checkpoint is needed here"
        )
    if section not in checkpoint["config"]:
        raise UserError(f"{file}: config.{section} is missing; use another checkpoint")
    config = checkpoint["config"][section]
    shape: Tree = {
        key: checkpoint["shape"][key] for key in Shape.model_fields if key in checkpoint["shape"]
    }

    def built() -> Any:
        modules = {name.partition(".")[0] for name in checkpoint["state"][part]}
        if task == "classifier":
            classifier = Classifier(
                build(ModelConfig, config, source="checkpoint's model"), **shape
            )
            if "thresholds" in modules:
                classifier.add_thresholds()
            if "temperature" in modules:
                classifier.add_temperature()
            return classifier
        architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
        if growing or "from_rgbs" in modules:
            architecture = architecture.growing or architecture
        network = architecture.build(section, config, **shape)
        if "auxiliary" in modules:
            network.add_auxiliary()
        return network

    model: Any = load_network(built, checkpoint, part, str(file))
    temperature = getattr(model, "temperature", None)
    if temperature is not None and not 0 < float(temperature) < math.inf:
        raise UserError(
            f"{file}: its temperature is {float(temperature):g}, not a positive number; use another "
            "checkpoint"
        )
    has_one_label = checkpoint.get("sets") is None and getattr(model, "thresholds", None) is None
    if not (has_one_label or several):
        raise UserError(
            f"{file}: is of several labels an image; a network of one label is needed here"
        )
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)


def generator_from(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", *, several: bool = False
) -> ImageGenerator:
    """Return the EMA generator of a GAN's checkpoint in evaluation mode.

    A generator that was saved while it was growing generates the images of its stage, enlarged to
    the full resolution by repeating pixels.

    Args:
        several: Accept a generator of images with several labels.

    Raises:
        UserError: The checkpoint is not of a GAN, its architecture is not in the registry, or its
            images have several labels and `several` is False.
    """
    stage = checkpoint.get("stage")
    if stage is not None:
        side, alpha = stage
        if (side, alpha) == (ImageSpec.of(1, checkpoint["shape"]["resolution"]).side, 1.0):
            stage = None
    model = _restored(
        checkpoint, "generator", "generator_ema", device, several, growing=stage is not None
    )
    model.label_sets = checkpoint.get("sets")
    if stage is None:
        return model
    name = f"{checkpoint.get('file', 'the checkpoint')}: stage {stage}"
    with explained(
        FAULTS, lambda error: f"{name} is none of its network ({error}); use another checkpoint"
    ):
        model.enter(side, alpha)
    return StageGenerator(model).eval()


def discriminator_from(
    checkpoint: Checkpoint, device: torch.device | str = "cpu"
) -> ImageDiscriminator:
    """Return the discriminator of a GAN's checkpoint in evaluation mode.

    Raises UserError for a checkpoint that is not of a GAN, or an unknown architecture.
    """
    return _restored(checkpoint, "discriminator", "discriminator", device, several=True)


def classifier_from(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", *, several: bool = False
) -> Classifier:
    """Return the EMA classifier of a checkpoint in evaluation mode.

    Args:
        several: Accept a classifier that gives an image several labels.

    Raises:
        UserError: The checkpoint is not of a classifier, or the classifier gives several labels and
            `several` is False.
    """
    model = _restored(checkpoint, "model", "model_ema", device, several)
    model.lineage = recorded(checkpoint)
    model.class_names = tuple(checkpoint["classes"])
    return model


def fingerprint(module: nn.Module) -> str:
    """Return a short hash of a module's weights; modules with equal hashes give equal features.

    A classifier's temperature is left out, so that a calibrated copy has the hash of the original.
    """
    digest = hashlib.sha256()
    state = module.state_dict()
    state.pop("temperature", None)
    for key, value in state.items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()[:12]}"


def inherited_lineage(checkpoint: Checkpoint) -> Lineage:
    """Return the lineage that weights inherit if they are initialised from a checkpoint.

    A lineage lists the data and the networks from which weights have learnt. If the checkpoint is a
    classifier's, the classifier is added to these networks, as one of the `teachers`.
    """
    lineage = recorded(checkpoint)
    if checkpoint["task"] != "classifier":
        return lineage
    teacher = fingerprint(classifier_from(checkpoint, several=True))
    return join(lineage, Lineage.of(teachers=[teacher]))


ENTRY = "duet"  # metadata key of export.py's files: description of the weights
# task -> the entry of a checkpoint's state that is used
NETWORKS = {"classifier": "model_ema", "gan": "generator_ema"}
KEYS = ("schema", "task", "step", "config", "classes", "shape")
# Each returns a checkpoint for a path or name of another program's network, or None.
READERS: list[Callable[[Path], Checkpoint | None]] = []


def open_checkpoint(source: str | Path, which: str) -> tuple[Path, Checkpoint]:
    """Find and read the checkpoint that `source` names; return its path and its content.

    `source` is a run folder, a file, a folder of the Hugging Face hub, or the name of a published
    network. `which`, "last" or "best", selects a checkpoint of a run folder.
    """
    path = resolve(source, which)
    return path, read(path)


def read(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`, the result of `resolve`: a file, or the name of a network.

    The tensors are on the CPU. No code in the file is run. Raises UserError for a missing or
    damaged file, and for weights that are not exactly those of a known network.
    """
    try:
        return read_weights(path) if path.suffix == ".safetensors" else load(path)
    except UserError:
        for reader in READERS:
            if (checkpoint := reader(path)) is not None:
                return checkpoint
        raise


def read_tensors(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a `.safetensors` file, on the CPU, and its metadata.

    Raises UserError, with the advice `remedy`, for a file that is missing, too large or damaged.
    """
    with files.reading(path, remedy, SafetensorError):
        files.check(path, files.WEIGHTS)
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def read_weights(path: Path) -> Checkpoint:
    """Return the checkpoint in a .safetensors file that export.py wrote.

    Raises UserError if the file is missing, damaged or was not written by export.py.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    tensors, metadata = read_tensors(path, "export it again")
    with files.reading(path, "export it again", ValueError, RecursionError):
        content = json.loads(metadata.get(ENTRY, "null"))
    if (
        not isinstance(content, dict)
        or any(key not in content for key in KEYS)
        or content["task"] not in tuple(NETWORKS)
    ):
        raise UserError(
            f"{path}: does not say what its weights are; write it with export.py --format "
            "safetensors"
        )
    return checked(content | {"state": {NETWORKS[content["task"]]: tensors}}, str(path))


extras.attach(__name__)
