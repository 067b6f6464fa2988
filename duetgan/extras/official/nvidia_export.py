"""Write and read the export format `nvidia`: StyleGAN2's weights with NVIDIA's names.

The format is a .safetensors file.
"""

import json
from pathlib import Path

from duetgan.extras.official import nvidia
from duetgan.extras.official.subject import load, networks, note_group_difference
from duetgan.inference.export.subject import Subject
from duetgan.inference.export.weights import write_tensors
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_log import say

__all__ = ["load", "write"]


def write(subject: Subject, path: Path) -> None:
    """Write the networks with NVIDIA's names to the .safetensors file `path`.

    The file's metadata entry `nvidia` has the keyword arguments of NVIDIA's classes. Raises
    UserError if NVIDIA's classes cannot build the networks.
    """
    gan = networks(subject.checkpoint)
    for name in ("generator", "discriminator"):
        base = getattr(gan, name)["channel_base"]
        if base < gan.shape["resolution"]:
            raise UserError(
                f"channel_base {base} leaves NVIDIA's {name} no channels; choose safetensors"
            )
    tensors, arguments = nvidia.to_official(gan)
    if not gan.generator["clamp_always"] and gan.generator["conv_clamp"] is not None:
        say(
            "note: without conv_clamp and fp16, because NVIDIA's program also clamps in fp32; "
            "the images are those of fp32"
        )
    note_group_difference(gan)
    classes = json.dumps(subject.checkpoint["classes"])
    write_tensors(path, tensors, {nvidia.ENTRY: json.dumps(arguments), "classes": classes})
