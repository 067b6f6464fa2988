"""The format `rosinality`: a .pt file of plain tensors with rosinality's names."""

from pathlib import Path

import torch

from duetgan.extras.official import rosinality
from duetgan.extras.official.subject import load, networks, note_group_difference
from duetgan.extras.official.unpickle import Refused
from duetgan.inference.export.subject import Subject
from duetgan.models.stylegan2 import channels_at
from duetgan.utils.errors import explained
from duetgan.utils.runlog.run_log import say

__all__ = ["load", "write"]
# channels of rosinality's networks at 4 to 32 px; above, they are halved with each resolution
WIDTHS = 512


def write(subject: Subject, path: Path) -> None:
    """Write a checkpoint for rosinality's program, without the state of optimizers."""
    gan = networks(subject.checkpoint)
    with explained(Refused, lambda error: f"{error}; choose safetensors or nvidia"):
        content = rosinality.to_official(gan)
    base, top = gan.generator["channel_base"], gan.generator["channel_max"]
    if top != WIDTHS or base % 16384:
        sides = [2**k for k in range(2, gan.shape["resolution"].bit_length())]
        widths = {side: channels_at(side, base, top) for side in sides}
        say(
            "note: the widths are not rosinality's; put these in model.py as self.channels: "
            f"{widths}"
        )
    if "discriminator" in gan.state and "d" not in content:
        say(
            "note: without the discriminator, which rosinality's class does not support (plain, or "
            "minibatch_std_group 1)"
        )
    elif "d" in content:
        note_group_difference(gan, fixed_group=4)
    torch.save(content, path)
