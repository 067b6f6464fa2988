"""Models out of a checkpoint's dict; and any trained network as a checkpoint: of a run, of
export.py, or a classifier that somebody else trained.

The last is `torchvision:NAME` or `torchvision:NAME.WEIGHTS`, `timm:NAME`, either with `=FILE`; a
state dict of a network of torchvision's; or a folder as timm writes it for its hub (config.json,
model.safetensors).
"""

import hashlib
import json
import sys
from collections.abc import Sequence
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
    fitted,
    likeness,
    lineage_of,
    network_of,
    read_state_dict,
    read_tensors,
)
from duetgan.utils import bounded
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
from duetgan.utils.checkpoint.state_schema import FAULTS, loaded
from duetgan.utils.config import plugins
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError, explained
from duetgan.utils.provenance import Lineage, join, recorded


def _restored(
    checkpoint: dict[str, Any],
    section: str,
    part: str,
    device: torch.device | str,
    several: bool = True,
) -> Any:
    """The network of a section of the config, with the state of `part`, frozen, in evaluation mode
    on `device`.
    """
    file, task = (
        checkpoint.get("file", "the checkpoint"),
        "classifier" if section == "model" else "gan",
    )
    if checkpoint["task"] != task:
        raise UserError(
            f"{file}: is of task {checkpoint['task']!r}, but a {task!r} checkpoint is needed here"
        )
    if section not in checkpoint["config"]:
        raise UserError(f"{file}: config.{section} is missing; use another checkpoint")
    given: Any = checkpoint["config"][section]
    shape: dict[str, Any] = {
        key: checkpoint["shape"][key] for key in Shape.model_fields if key in checkpoint["shape"]
    }

    def built() -> Any:
        held = {name.partition(".")[0] for name in checkpoint["state"][part]}
        if task == "classifier":
            model: Any = Classifier(build(ModelConfig, given, source="checkpoint's model"), **shape)
            if "thresholds" in held:
                model.add_thresholds()
            return model
        architecture = architecture_of(checkpoint["config"].get("architecture", DEFAULT))
        model = architecture.build(
            section, given, **shape, **({"progressive": True} if "from_rgbs" in held else {})
        )
        if "auxiliary" in held:
            model.add_auxiliary()
        return model

    with plugins.hinting(lambda: checkpoint["config"]):
        model: Any = loaded(built, checkpoint, part, str(file))
    one = checkpoint.get("sets") is None and getattr(model, "thresholds", None) is None
    if not (one or several):
        raise UserError(
            f"{file}: is of several labels an image; a network of one label is needed here"
        )
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)


def generator_from(
    checkpoint: dict[str, Any], device: torch.device | str = "cpu", *, several: bool = False
) -> ImageGenerator:
    """The EMA generator of a GAN's checkpoint, of the architecture its config names, in evaluation
    mode. One that was saved while it grew makes images as its stage did, its pixels repeated up to
    the full resolution.

    Raises UserError for another task's checkpoint, for an architecture that is not in the registry,
    and for one of several labels an image unless the caller can do with `several`.
    """
    model = _restored(checkpoint, "generator", "generator_ema", device, several)
    model.sets = checkpoint.get("sets")
    full = model.spec.side
    side, alpha = checkpoint.get("stage", [full, 1.0])
    if (side, alpha) == (full, 1.0):
        return model
    stage = f"{checkpoint.get('file', 'the checkpoint')}: stage [{side}, {alpha}]"
    with explained(
        FAULTS, lambda why: f"{stage} is none of its network ({why}); use another checkpoint"
    ):
        return StageGenerator(model, side, alpha, shown=full).eval()


def discriminator_from(
    checkpoint: dict[str, Any], device: torch.device | str = "cpu"
) -> ImageDiscriminator:
    """The discriminator of a GAN's checkpoint, in evaluation mode. Raises UserError as
    `generator_from` does.
    """
    return _restored(checkpoint, "discriminator", "discriminator", device)


def classifier_from(
    checkpoint: dict[str, Any], device: torch.device | str = "cpu", *, several: bool = False
) -> Classifier:
    """The EMA classifier of a checkpoint, in evaluation mode. Raises UserError for another task's
    checkpoint, and for one of several labels an image unless the caller can do with `several`.
    """
    model = _restored(checkpoint, "model", "model_ema", device, several)
    model.lineage = recorded(checkpoint)
    model.class_names = tuple(checkpoint["classes"])
    return model


def fingerprint(module: nn.Module) -> str:
    """A short hash of a module's weights: two modules with one fingerprint give the same features."""
    digest = hashlib.sha256()
    for key, value in module.state_dict().items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()[:12]}"


def passed_on(checkpoint: Checkpoint) -> Lineage:
    """The lineage of weights that begin as a checkpoint's: a classifier is then one of their
    teachers.
    """
    known = recorded(checkpoint)
    if checkpoint["task"] != "classifier":
        return known
    return join(
        known, Lineage.of(teachers=[fingerprint(classifier_from(checkpoint, several=True))])
    )


OPTION = "--checkpoint"
ENTRY = "duet"  # of a file's metadata: what its weights are, as export.py writes it
# the part of a checkpoint's state that is used
NETWORKS = {"classifier": "model_ema", "gan": "generator_ema"}
KEYS = ("schema", "task", "step", "config", "classes", "shape")
IMAGENET = 1000  # classes


def open_checkpoint(given: str | Path, which: str) -> tuple[Path, Checkpoint]:
    """The file that a run folder, a file, a folder of the hub or a name means, and the checkpoint
    in it.
    """
    path = resolve(given, which)
    return path, read(path)


def read(path: Path) -> Checkpoint:
    """The checkpoint in what `resolve` gave, its tensors on the CPU. Nothing in it is executed.

    Raises UserError if it is missing or damaged, and for weights that are not exactly those of a
    known network.
    """
    if str(path).startswith(READY_MADE):
        return _named(str(path))
    if path.suffix == ".safetensors":
        state, about = read_state_dict(path, option=OPTION)
        return (
            read_weights(path)
            if ENTRY in about
            else _classifier(path, state, about, *_hub_config(path))
        )
    try:
        return load(path)
    except CorruptCheckpoint as error:
        try:
            state, about = read_state_dict(path, option=OPTION)
        except UserError:
            raise error from None
    return _classifier(path, state, about, *_hub_config(path))


def read_weights(path: Path) -> Checkpoint:
    """The checkpoint in a .safetensors file of export.py.

    Raises UserError if it is missing, damaged or was not written by export.py.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    tensors, metadata = read_tensors(path, "export it again")
    with bounded.reading(path, "export it again", ValueError, RecursionError):
        about = json.loads(metadata.get(ENTRY, "null"))
    if (
        not isinstance(about, dict)
        or any(key not in about for key in KEYS)
        or about["task"] not in tuple(NETWORKS)
    ):
        raise UserError(
            f"{path}: does not say what its weights are; write it with export.py --format safetensors"
        )
    return checked(about | {"state": {NETWORKS[about["task"]]: tensors}}, str(path))


def _named(given: str) -> Checkpoint:
    """The checkpoint of a name, its weights from the file that it gives, else the published ones."""
    name, _, file = given.partition("=")
    member = "DEFAULT"
    if not name.startswith(timm.PREFIX):
        name, _, chosen = name.removeprefix("torchvision:").partition(".")
        member = chosen or member
    path = resolve(file) if file else find_weights(member, name, option=f"{OPTION} {given}:")
    return _classifier(path, *read_state_dict(path, option=OPTION), name)


def _hub_config(path: Path) -> tuple[str | None, list[Any]]:
    """The network and the classes that the config.json beside a model.safetensors names, as timm
    writes it.
    """
    beside = path.with_name("config.json")
    if path.name not in HUB_WEIGHTS or not beside.is_file():
        return None, []
    with bounded.reading(
        beside, "fetch the folder again", ValueError, RecursionError, KeyError, TypeError
    ):
        config = json.loads(bounded.read_file(beside, bounded.CONFIG))
        about = config.get("pretrained_cfg") or {}
        tag = f".{about['tag']}" if about.get("tag") else ""
        name = f"{timm.PREFIX}{config['architecture']}{tag}"
        labels = list(config.get("label_names") or about.get("label_names") or [])
    known = backbone_of(name)
    for key, ours in (("mean", known.mean), ("std", known.std)):
        if tuple(about.get(key) or ours) != tuple(ours):
            raise UserError(
                f"{beside}: its images have {key} {about[key]}, timm's of {name} {list(ours)}; mend it"
            )
    return name, labels


def _classifier(
    path: Path,
    state: dict[str, Tensor],
    about: dict[str, str],
    name: str | None = None,
    labels: Sequence[Any] = (),
) -> Checkpoint:
    """The checkpoint of a classifier with these weights; `labels`: of its classes, if the file
    comes with any.
    """
    name = name or network_of(state)
    if name is None:
        near, share = max(likeness(state), key=lambda found: found[1], default=("none", 0.0))
        raise UserError(
            f"{path}: these {len(state)} tensors are no known network's (nearest: {near}, {share:.0%} match); name it "
            f"as {OPTION} timm:NAME={path}, or give a file of export.py"
        )
    backbone = backbone_of(name)
    if backbone.network is not None and backbone.images is None:
        raise UserError(
            f"{path}: {name} is neither torchvision's nor timm's; give its run folder or checkpoint"
        )
    head = state.get(f"{backbone.head}.weight", torch.empty(0))
    classes = max(2, *head.shape[:1])
    side, shorter, resample = backbone.images_of(name, path.name)
    strides = about.get("stride", "").startswith("conv1")  # He's own, as such a file says
    model = {"name": name, "he_strides": strides, "normalise": "imagenet", "input_size": side}
    shape = {"channels": 3, "classes": classes, "resolution": side}
    with torch.device("meta"):
        expected = Classifier(
            build(ModelConfig, model, source=str(path)), **shape
        ).network.state_dict()
    weights = fitted(state, expected, path, name, option=OPTION)
    content = {
        "schema": SCHEMA,
        "task": "classifier",
        "step": 0,
        "config": {"model": model, "data": {"resolution": side}},
        "classes": _class_names(path, classes, labels),
        "shape": shape,
        # data/images.py reads it
        "data": {"resize_filter": f"shorter-side-{shorter}+{resample}+centre-crop"},
        "lineage": lineage_of(path, about).document(),
        "state": {
            NETWORKS["classifier"]: {f"network.{key}": value for key, value in weights.items()}
        },
    }
    return checked(content, str(path))


def _class_names(path: Path, count: int, labels: Sequence[Any]) -> list[str]:
    """The classes' names: those of the file, ImageNet's for as many outputs, else numbers, which is
    told.
    """
    if len({str(label) for label in labels}) == count:
        return [str(label) for label in labels]
    if count == IMAGENET:
        from torchvision.models import ResNet18_Weights

        return list(ResNet18_Weights.DEFAULT.meta["categories"])
    print(f"{path}: names no classes; they are called 0 to {count - 1}", file=sys.stderr)
    return [str(number) for number in range(count)]
