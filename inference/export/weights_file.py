"""A trained network in one .safetensors file that needs nothing else: the weights, and in the metadata what they are.

The metadata's entry `duet` is JSON with the keys of a checkpoint that building the network takes (`task`, `classes`,
`shape`, `config`, ...), so that what `read_weights` gives goes where a checkpoint goes: `models.restore`. The entries
`input`, `output` and `classes` (JSON) say how the network is called.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from duetgan.utils import bounded
from duetgan.utils.checkpoint import checked, load, resolve
from duetgan.utils.errors import UserError

ENTRY = "duet"
NETWORKS = {"classifier": "model_ema", "gan": "generator_ema"}  # the part of a checkpoint's state that is used
SECTIONS = {"classifier": ("model",), "gan": ("architecture", "generator")}  # the part of its config that builds it
MORE = ("stage", "teachers", "lineage")  # keys that not every checkpoint has
KEYS = ("schema", "task", "step", "config", "classes", "shape")


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
    """Write a .safetensors file. Raises OSError."""
    try:
        save_file(tensors, str(path), {"format": "pt"} | metadata)
    except SafetensorError as error:  # it hides the system's error in its text
        raise OSError(f"{path}: {error}") from error


def open_checkpoint(given: str | Path, which: str) -> tuple[Path, dict[str, Any]]:
    """The file that a run folder, a checkpoint file or a file of `write_weights` means, and the checkpoint in it."""
    path = Path(given)
    if path.suffix == ".safetensors":
        return path, read_weights(path)
    path = resolve(given, which)
    return path, load(path)


def read_weights(path: Path) -> dict[str, Any]:
    """The checkpoint in a file of `write_weights`, its tensors on the CPU. Nothing in the file is executed.

    Raises UserError if it is missing, damaged or was not written by export.py.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with bounded.reading(path, "export it again", SafetensorError, ValueError, RecursionError):
        bounded.check(path, bounded.WEIGHTS)
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(ENTRY, "null"))
        tensors = load_file(str(path))
    if not isinstance(about, dict) or any(key not in about for key in KEYS) or about["task"] not in tuple(NETWORKS):
        raise UserError(f"{path}: does not say what its weights are; write it with export.py --format safetensors")
    return checked(about | {"state": {NETWORKS[about["task"]]: tensors}}, str(path))
