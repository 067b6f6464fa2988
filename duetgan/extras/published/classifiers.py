"""Read classifiers of other programs as checkpoints of Duet.

A source is one of these:

- `torchvision:NAME`, `torchvision:NAME.WEIGHTS` or `timm:NAME`. With `=FILE` at the end, the
  weights are read from this file;
- a file with the state dict of one of torchvision's networks;
- a folder that timm wrote for the Hugging Face hub (config.json, model.safetensors).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from duetgan.models import weights as weights_files  # which imports the registry, READERS
from duetgan.models.backbones import timm
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import backbone_of
from duetgan.models.restore import ENTRY, NETWORKS, READERS
from duetgan.utils import files
from duetgan.utils.checkpoint import (
    HUB_WEIGHTS,
    READY_MADE,
    SCHEMA,
    Checkpoint,
    checked,
    resolve,
)
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError

OPTION = "--checkpoint"
IMAGENET = 1000  # number of ImageNet's classes


def read(path: Path) -> Checkpoint | None:
    """Return a checkpoint of another program's classifier.

    `path` is the name of a published network, such as `torchvision:resnet50`, or a file with
    weights. Returns None for files of Duet, and for files that are no state dict.
    """
    if str(path).startswith(READY_MADE):
        return _ready_made(str(path))
    try:
        state, metadata = weights_files.read_state_dict(path, option=OPTION)
    except UserError:
        return None
    if ENTRY in metadata:  # Duet's own
        return None
    return _classifier(path, state, metadata, *_hub_config(path))


def _ready_made(source: str) -> Checkpoint:
    """Return a checkpoint of `torchvision:NAME` or `timm:NAME`.

    Its weights are the published ones, or those of FILE if the source ends in `=FILE`.
    """
    name, _, file = source.partition("=")
    weights = "DEFAULT"
    if not name.startswith(timm.PREFIX):
        name, _, member = name.removeprefix("torchvision:").partition(".")
        weights = member or weights
    path = (
        resolve(file)
        if file
        else weights_files.find_weights(weights, name, option=f"{OPTION} {source}:")
    )
    return _classifier(path, *weights_files.read_state_dict(path, option=OPTION), name)


def _hub_config(path: Path) -> tuple[str | None, list[object]]:
    """Return the network's name and the class names from timm's config.json.

    The file must lie next to the weights file `path`; without it, the result is None and []. Raises
    UserError if the file's normalisation of images is not that of the network.
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
    """Return a checkpoint of another program's classifier.

    Args:
        path, state: The file of the weights, and its state dict.
        metadata: The file's metadata, see `read_state_dict`.
        name: Name of the network; None to infer it from the names and shapes of the weights.
        labels: Names of the classes; empty if the file has none.
    """
    name = name or weights_files.network_of(state)
    if name is None:
        candidates = weights_files.similar_networks(state)
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
    weights = weights_files.fit_state(state, expected, path, name, option=OPTION)
    content = {
        "schema": SCHEMA,
        "task": "classifier",
        "step": 0,
        "config": {"model": model, "data": {"resolution": side}},
        "classes": _class_names(path, classes, labels),
        "shape": shape,
        # data/images/__init__.py reads this entry.
        "data": {"resize_filter": f"shorter-side-{shorter}+{resample}+centre-crop"},
        "lineage": weights_files.lineage_of(path, metadata).document(),
        "state": {
            NETWORKS["classifier"]: {f"network.{key}": value for key, value in weights.items()}
        },
    }
    return checked(content, str(path))


def _class_names(path: Path, count: int, labels: Sequence[object]) -> list[str]:
    """Return `count` class names.

    These are `labels` if they are `count` different names, else ImageNet's classes if `count` is
    1000, else numbers. Prints a line to stderr if they are numbers.
    """
    if len({str(label) for label in labels}) == count:
        return [str(label) for label in labels]
    if count == IMAGENET:
        from torchvision.models import ResNet18_Weights

        return list(ResNet18_Weights.DEFAULT.meta["categories"])
    print(f"{path}: names no classes; they are called 0 to {count - 1}", file=sys.stderr)
    return [str(number) for number in range(count)]


READERS.append(read)
