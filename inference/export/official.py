"""StyleGAN2 for other programs: by the names of NVIDIA's programs in a .safetensors file, and of rosinality's in a .pt
file of plain tensors. `models.convert` reads both, which is how they are checked.
"""

import json
from pathlib import Path
from typing import Any

import torch

from duetgan.inference.export.subject import Drawing, Runner, Subject, as_runner
from duetgan.inference.export.weights_file import write_tensors
from duetgan.models.convert import checkpoint_of, read
from duetgan.models.official import nvidia, rosinality
from duetgan.models.official.names import Converted
from duetgan.models.official.unpickle import Refused
from duetgan.models.registry import DEFAULT
from duetgan.models.restore import generator_from
from duetgan.models.stylegan2 import DiscriminatorConfig, GeneratorConfig, channels_at
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config
from duetgan.utils.errors import UserError, explained
from duetgan.utils.runlog.run_log import say

WIDTHS = 512  # of rosinality's networks at 4 to 32 px; further up they are halved with each resolution


def networks(checkpoint: dict[str, Any]) -> Converted:
    """The checkpoint's networks with their whole configurations. Raises UserError for what is no grown StyleGAN2."""
    config, shape = checkpoint["config"], dict(checkpoint["shape"])
    if (name := config.get("architecture", DEFAULT)) != "stylegan2":
        raise UserError(f"this format is for stylegan2, the checkpoint has {name}; choose safetensors")
    if tuple(checkpoint.get("stage", (shape["resolution"], 1.0))) != (shape["resolution"], 1.0):
        raise UserError("this format is for networks at their full resolution, this one still grows; train it on")
    sections: dict[str, type[Config]] = {"generator": GeneratorConfig, "discriminator": DiscriminatorConfig}
    whole = {name: build(kind, config.get(name, {}), source=name).model_dump() for name, kind in sections.items()}
    state = {name: part for name, part in checkpoint["state"].items() if name.removesuffix("_ema") in sections}
    if "discriminator" not in config:  # a file of weights: of the generator alone
        state.pop("discriminator", None)
    if heads := {name.partition(".")[0] for name in state.get("discriminator", {})} & {"auxiliary", "from_rgbs"}:
        part = state["discriminator"]
        state["discriminator"] = {name: x for name, x in part.items() if name.partition(".")[0] not in heads}
        say(f"note: without the discriminator's {' and '.join(sorted(heads))}, which those programs have not")
    return Converted("stylegan2", shape, whole["generator"], whole["discriminator"], state)


def write_nvidia(subject: Subject, path: Path) -> None:
    """Their state dicts, and in the metadata's entry `nvidia` the keyword arguments of their classes."""
    gan = networks(subject.checkpoint)
    for name in ("generator", "discriminator"):
        base = getattr(gan, name)["channel_base"]
        if base < gan.shape["resolution"]:
            raise UserError(f"channel_base {base} leaves NVIDIA's {name} no channels; choose safetensors")
    tensors, arguments = nvidia.theirs(gan)
    if not gan.generator["clamp_always"] and gan.generator["conv_clamp"] is not None:
        say("note: without conv_clamp and fp16, which here act together and there apart: the images are fp32's")
    _tell_of_groups(gan)
    classes = json.dumps(subject.checkpoint["classes"])
    write_tensors(path, tensors, {nvidia.ENTRY: json.dumps(arguments), "classes": classes})


def write_rosinality(subject: Subject, path: Path) -> None:
    """What their torch.save would hold, without optimizers."""
    gan = networks(subject.checkpoint)
    with explained(Refused, lambda why: f"{why}; choose safetensors or nvidia"):
        content = rosinality.theirs(gan)
    config, side = gan.generator, gan.shape["resolution"]
    base, top = config["channel_base"], config["channel_max"]
    if top != WIDTHS or base % 16384:
        widths = {r: channels_at(r, base, top) for r in (2**k for k in range(2, side.bit_length()))}
        say(f"note: the widths are not rosinality's; put these in model.py as self.channels: {widths}")
    if "discriminator" in gan.state and "d" not in content:
        say("note: without the discriminator, which rosinality's class cannot be (plain, or minibatch_std_group 1)")
    elif "d" in content:
        _tell_of_groups(gan, only=4)
    torch.save(content, path)


def _tell_of_groups(gan: Converted, only: int | None = None) -> None:
    group, order = gan.discriminator["minibatch_std_group"], gan.discriminator["minibatch_std_order"]
    if "discriminator" in gan.state and group > 1 and (order != "strided" or only not in (None, group)):
        theirs = f"{only or group} samples, N / {only or group} apart"
        say(f"note: D's minibatch standard deviation is over groups of {group} {order} samples; theirs of {theirs}")


def open_official(subject: Subject, path: Path) -> Runner:
    """The generator that `models.convert` makes of the file, as a function of its inputs."""
    content = checkpoint_of(read(path), list(subject.checkpoint["classes"]))
    return as_runner(Drawing(generator_from(content)))
