"""A trained network in one .safetensors file that needs nothing else: the weights, and in the metadata what they are.

The metadata's entry `duet` is JSON with the keys of a checkpoint that building the network takes (`task`, `classes`,
`shape`, `config`, ...), so that what `read_weights` gives goes where a checkpoint goes: `models.restore`. The entries
`input`, `output` and `classes` (JSON) say how the network is called.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from duetgan.models.restore import ENTRY, KEYS, NETWORKS

SECTIONS = {"classifier": ("model",), "gan": ("architecture", "generator")}  # the part of its config that builds it
MORE = ("stage", "teachers", "lineage")  # keys that not every checkpoint has


def contents(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a weights file says about its weights: a checkpoint without its state, and without paths and settings of
    the training, since such files are given to others.
    """
    task, config = checkpoint["task"], checkpoint["config"]
    sections = {name: config[name] for name in SECTIONS[task] if name in config}
    sections["data"] = {"resolution": (config.get("data") or {}).get("resolution")}
    data = {"resize_filter": checkpoint.get("data", {}).get("resize_filter", "none")}
    about = {name: checkpoint[name] for name in (*KEYS, *MORE) if name in checkpoint}
    return about | {"config": sections, "data": data}


def interface(checkpoint: dict[str, Any]) -> dict[str, str]:
    """What a program that runs the network must know, for people and as metadata: `input`, `output`, and `classes`,
    which is JSON.
    """
    shape, classes = checkpoint["shape"], list(checkpoint["classes"])
    side = (checkpoint["config"].get("data") or {}).get("resolution") or shape["resolution"]
    sizes, colours = f"[N, {shape['channels']}, {side}, {side}]", "RGB" if shape["channels"] == 3 else "grey"
    images = f"images: float32 {sizes} in [-1, 1], {colours}: pixels / 127.5 - 1"
    if checkpoint["task"] == "classifier":
        output = "logits: float32 [N, classes], in the order of `classes`; softmax gives probabilities"
        return {"input": images, "output": output, "classes": json.dumps(classes)}
    names = "; labels: int64 [N], places in `classes`" if classes else ""
    return {"input": f"z: float32 [N, z_dim], normal{names}", "output": images, "classes": json.dumps(classes)}


def write_weights(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write the network that `checkpoint` is used for, its average one, and what it is. Raises OSError."""
    state = checkpoint["state"][NETWORKS[checkpoint["task"]]]
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_tensors(path, tensors, {ENTRY: json.dumps(contents(checkpoint)), **interface(checkpoint)})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, str(path), {"format": "pt"} | metadata)
    except SafetensorError as error:  # it hides the system's error in its text
        raise OSError(f"{path}: {error}") from error
