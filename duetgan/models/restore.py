"""Read trained networks as checkpoints, and build models from checkpoints.

The network may come from a run, from export.py, or be a classifier of another program. Such a
classifier is `torchvision:NAME`, `torchvision:NAME.WEIGHTS` or `timm:NAME`, each optionally with
`=FILE`; a state dict of one of torchvision's networks; or a folder that timm wrote for its hub
(config.json, model.safetensors).
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duetgan.models.backbones import timm
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.gan import ImageDiscriminator, ImageGenerator, StageGenerator
from duetgan.models.registry import DEFAULT, architecture_of, backbone_of
from duetgan.models.weights import (
    find_weights,
    fit_state,
    lineage_of,
    network_of,
    read_state_dict,
    read_tensors,
    similar_networks,
)
from duetgan.utils import files
from duetgan.utils.checkpoint import (
    HUB_WEIGHTS,
    READY_MADE,
    SCHEMA,
    Checkpoint,
    CorruptCheckpoint,
    Shape,
    checked,
    load,
    resolve,
)
from duetgan.utils.checkpoint.provenance import Lineage, join, recorded
from duetgan.utils.checkpoint.state_schema import FAULTS, load_network
from duetgan.utils.config import plugins
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError, explained


def _restored(
    checkpoint: Checkpoint,
    section: str,
    part: str,
    device: torch.device | str,
    several: bool = True,
) -> Any:
    """Build a network from a checkpoint and return it, frozen and in evaluation mode.

    Args:
        section: The section of its config that describes the network, e.g. generator.
        part: The entry of its state with the weights, e.g. generator_ema.
        several: Accept a network for images with several labels.
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
            return classifier
        architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
        if "from_rgbs" in modules:
            network = architecture.build(section, config, **shape, progressive=True)
        else:
            network = architecture.build(section, config, **shape)
        if "auxiliary" in modules:
            network.add_auxiliary()
        return network

    with plugins.hinting(lambda: checkpoint["config"]):
        model: Any = load_network(built, checkpoint, part, str(file))
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
    model = _restored(checkpoint, "generator", "generator_ema", device, several)
    model.label_sets = checkpoint.get("sets")
    full = model.spec.side
    side, alpha = checkpoint.get("stage", [full, 1.0])
    if (side, alpha) == (full, 1.0):
        return model
    stage = f"{checkpoint.get('file', 'the checkpoint')}: stage [{side}, {alpha}]"
    with explained(
        FAULTS, lambda error: f"{stage} is none of its network ({error}); use another checkpoint"
    ):
        return StageGenerator(model, side, alpha, display_size=full).eval()


def discriminator_from(
    checkpoint: Checkpoint, device: torch.device | str = "cpu"
) -> ImageDiscriminator:
    """Return the discriminator of a GAN's checkpoint in evaluation mode.

    Raises UserError for a checkpoint that is not of a GAN, or an unknown architecture.
    """
    return _restored(checkpoint, "discriminator", "discriminator", device)


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
    """Return a short hash of a module's weights; modules with equal hashes give equal features."""
    digest = hashlib.sha256()
    for key, value in module.state_dict().items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()[:12]}"


def inherited_lineage(checkpoint: Checkpoint) -> Lineage:
    """Return the lineage (data and networks learnt from) of weights initialised from a checkpoint.

    If the checkpoint is a classifier's, the classifier is one of the lineage's teachers.
    """
    lineage = recorded(checkpoint)
    if checkpoint["task"] != "classifier":
        return lineage
    teacher = fingerprint(classifier_from(checkpoint, several=True))
    return join(lineage, Lineage.of(teachers=[teacher]))


OPTION = "--checkpoint"
ENTRY = "duet"  # metadata key of export.py's files: description of the weights
# task -> the entry of a checkpoint's state that is used
NETWORKS = {"classifier": "model_ema", "gan": "generator_ema"}
KEYS = ("schema", "task", "step", "config", "classes", "shape")
IMAGENET = 1000  # number of ImageNet's classes


def open_checkpoint(source: str | Path, which: str) -> tuple[Path, Checkpoint]:
    """Return the path and checkpoint of a run folder, file, hub's folder or network name."""
    path = resolve(source, which)
    return path, read(path)


def read(path: Path) -> Checkpoint:
    """Return the checkpoint of a path or name that `resolve` returned, its tensors on the CPU.

    No code in the file is run. Raises UserError if it is missing or damaged, and for weights that
    are not exactly those of a known network.
    """
    if str(path).startswith(READY_MADE):
        return _ready_made(str(path))
    if path.suffix == ".safetensors":
        state, metadata = read_state_dict(path, option=OPTION)
        if ENTRY in metadata:
            return read_weights(path)
        return _classifier(path, state, metadata, *_hub_config(path))
    try:
        return load(path)
    except CorruptCheckpoint as error:
        try:
            state, metadata = read_state_dict(path, option=OPTION)
        except UserError:
            raise error from None
    return _classifier(path, state, metadata, *_hub_config(path))


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


def _ready_made(source: str) -> Checkpoint:
    """Return the checkpoint of `torchvision:NAME` or `timm:NAME`: published weights, or =FILE's."""
    name, _, file = source.partition("=")
    weights = "DEFAULT"
    if not name.startswith(timm.PREFIX):
        name, _, member = name.removeprefix("torchvision:").partition(".")
        weights = member or weights
    path = resolve(file) if file else find_weights(weights, name, option=f"{OPTION} {source}:")
    return _classifier(path, *read_state_dict(path, option=OPTION), name)


def _hub_config(path: Path) -> tuple[str | None, list[object]]:
    """Return the network's name and the labels in timm's config.json next to a model.safetensors.

    Returns None and an empty list if there is no such file.
    """
    config_path = path.with_name("config.json")
    if path.name not in HUB_WEIGHTS or not config_path.is_file():
        return None, []
    faults = (ValueError, RecursionError, KeyError, TypeError)
    with files.reading(config_path, "fetch the folder again", *faults):
        config = json.loads(files.read_file(config_path, files.CONFIG))
        pretrained = config.get("pretrained_cfg") or {}
        tag = f".{pretrained['tag']}" if pretrained.get("tag") else ""
        name = f"{timm.PREFIX}{config['architecture']}{tag}"
        labels = list(config.get("label_names") or pretrained.get("label_names") or [])
    backbone = backbone_of(name)
    for key, expected in (("mean", backbone.mean), ("std", backbone.std)):
        if tuple(pretrained.get(key) or expected) != tuple(expected):
            raise UserError(
                f"{config_path}: its images have {key} {pretrained[key]}, timm's of {name} "
                f"{list(expected)}; mend it"
            )
    return name, labels


def _classifier(
    path: Path,
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    name: str | None = None,
    labels: Sequence[object] = (),
) -> Checkpoint:
    """Return the checkpoint of a classifier of another program.

    Args:
        path, state: The weights' file and state dict.
        metadata: The file's metadata, see `read_state_dict`.
        name: Name of the network; None to find it by the weights' names and shapes.
        labels: Names of its classes; empty if the file has none.
    """
    name = name or network_of(state)
    if name is None:
        candidates = similar_networks(state)
        nearest, fraction = max(candidates, key=lambda pair: pair[1], default=("none", 0.0))
        raise UserError(
            f"{path}: these {len(state)} tensors are no known network's (nearest: {nearest}, "
            f"{fraction:.0%} match); name it as {OPTION} timm:NAME={path}, or give a file of "
            "export.py"
        )
    backbone = backbone_of(name)
    if backbone.network is not None and backbone.images is None:
        raise UserError(
            f"{path}: {name} is neither torchvision's nor timm's; give its run folder or checkpoint"
        )
    head = state.get(f"{backbone.head}.weight", torch.empty(0))
    classes = max(2, *head.shape[:1])
    side, shorter, resample = backbone.images_of(name, path.name)
    he_strides = metadata.get("stride", "").startswith("conv1")
    model = {"name": name, "he_strides": he_strides, "normalise": "imagenet", "input_size": side}
    shape = {"channels": 3, "classes": classes, "resolution": side}
    with torch.device("meta"):
        expected = Classifier(
            build(ModelConfig, model, source=str(path)), **shape
        ).network.state_dict()
    weights = fit_state(state, expected, path, name, option=OPTION)
    content = {
        "schema": SCHEMA,
        "task": "classifier",
        "step": 0,
        "config": {"model": model, "data": {"resolution": side}},
        "classes": _class_names(path, classes, labels),
        "shape": shape,
        # data/images.py reads this entry.
        "data": {"resize_filter": f"shorter-side-{shorter}+{resample}+centre-crop"},
        "lineage": lineage_of(path, metadata).document(),
        "state": {
            NETWORKS["classifier"]: {f"network.{key}": value for key, value in weights.items()}
        },
    }
    return checked(content, str(path))


def _class_names(path: Path, count: int, labels: Sequence[object]) -> list[str]:
    """Return `count` class names: the file's labels, ImageNet's for 1000 classes, or else numbers.

    A line on stderr says so if they are numbers.
    """
    if len({str(label) for label in labels}) == count:
        return [str(label) for label in labels]
    if count == IMAGENET:
        from torchvision.models import ResNet18_Weights

        return list(ResNet18_Weights.DEFAULT.meta["categories"])
    print(f"{path}: names no classes; they are called 0 to {count - 1}", file=sys.stderr)
    return [str(number) for number in range(count)]
