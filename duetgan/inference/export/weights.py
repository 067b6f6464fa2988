"""Write and load the export format `safetensors`: weights, with a description of their network.

The description is in the file's metadata. The entry `duet` is the result of `contents` as JSON;
`models.restore.read_weights` needs it to return a checkpoint. The other entries are those of
`interface`.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from duetgan.inference.export.subject import Drawing, Runner, Subject, as_runner
from duetgan.models.restore import (
    ENTRY,
    KEYS,
    NETWORKS,
    classifier_from,
    generator_from,
    inherited_lineage,
    read_weights,
)
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.provenance import data_history
from duetgan.utils.errors import explained
from duetgan.utils.image_spec import ImageSpec


def write(subject: Subject, path: Path) -> None:
    """Write the EMA weights of the subject's checkpoint with a description of their network."""
    write_weights(path, subject.checkpoint)


def load(subject: Subject, path: Path) -> Runner:
    """Build the network from the file at `path` alone, and return it as a function.

    `subject` only tells whether the network is a classifier or a generator.
    """
    checkpoint = read_weights(path)
    if subject.is_classifier:
        return as_runner(classifier_from(checkpoint, several=True))
    return as_runner(Drawing(generator_from(checkpoint, several=True)))


# task -> the sections of the config that determine the network
SECTIONS = {"classifier": ("model",), "gan": ("architecture", "generator")}
OPTIONAL_KEYS = ("stage", "teachers", "sets")  # keys that not every checkpoint has


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a description of a checkpoint's network, ready for JSON, to store with its weights.

    It has the checkpoint's entries that are needed to build the network and to trace the origin of
    its weights. Paths and training settings are left out, because the file may be published.
    """
    task, config = checkpoint["task"], checkpoint["config"]
    sections = {name: config[name] for name in SECTIONS[task] if name in config}
    sections["data"] = {"resolution": (config.get("data") or {}).get("resolution")}
    data: dict[str, Any] = {
        "resize_filter": checkpoint.get("data", {}).get("resize_filter", "none")
    }
    if len(history := data_history(checkpoint)) > 1:
        data["history"] = [images.model_dump(exclude={"path"}) for images in history]
    entries = {name: checkpoint[name] for name in (*KEYS, *OPTIONAL_KEYS) if name in checkpoint}
    return entries | {
        "config": sections,
        "data": data,
        "lineage": inherited_lineage(checkpoint).document(),
    }


def interface(checkpoint: Checkpoint) -> dict[str, str]:
    """Return a dict of texts that tell people the inputs and outputs of a checkpoint's network.

    The entries are `input`, `output`, and `classes` as JSON. A multi-label classifier also has
    `thresholds` as JSON: for each label, the least probability at which an image has it.
    """
    shape, classes = checkpoint["shape"], list(checkpoint["classes"])
    size = (checkpoint["config"].get("data") or {}).get("resolution") or shape["resolution"]
    spec = ImageSpec.read({**shape, "resolution": size})
    rule = "pixels / 127.5 - 1"
    if not spec.plain:
        rule = f"(values - {spec.low:g}) / {(spec.high - spec.low) / 2:g} - 1"
    if spec.alpha:
        rule += "; then x becomes a (x + 1) - 1 in the colours, a alpha in [0, 1]"
    dimensions = ", ".join(map(str, spec.shape))
    images = f"images: float32 [N, {dimensions}] in [-1, 1], {spec.words}: {rule}"
    if checkpoint["task"] == "classifier":
        state = checkpoint["state"][NETWORKS["classifier"]]
        thresholds = state.get("thresholds")
        output = "logits: float32 [N, classes], in the order of `classes`; "
        entries = {"input": images, "output": "", "classes": json.dumps(classes)}
        if "temperature" in state:
            output += f"divided by the temperature {float(state['temperature']):.4g}; "
        if thresholds is None:
            entries["output"] = output + "softmax gives probabilities"
        else:
            entries["output"] = output + "sigmoid gives each label's probability"
            entries["thresholds"] = json.dumps(thresholds.tolist())
        return entries
    latents = "z: float32 [N, z_dim], normal"
    if checkpoint.get("sets"):
        latents += "; labels: float32 [N, classes], 1 for each label that the image has, else 0"
    elif classes:
        latents += "; labels: int64 [N], indices into `classes`"
    return {
        "input": latents,
        "output": images,
        "classes": json.dumps(classes),
    }


def write_weights(path: Path, checkpoint: Checkpoint) -> None:
    """Write the EMA weights of a checkpoint's network with a description of the network.

    Raises OSError.
    """
    state = checkpoint["state"][NETWORKS[checkpoint["task"]]]
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_tensors(path, tensors, {ENTRY: json.dumps(contents(checkpoint)), **interface(checkpoint)})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a .safetensors file of tensors. Raises OSError."""
    # safetensors raises an exception of its own for errors of the system.
    with explained(SafetensorError, lambda error: OSError(f"{path}: {error}")):
        save_file(tensors, str(path), {"format": "pt"} | metadata)
