"""Prepare the networks of a checkpoint for an export to another program."""

from pathlib import Path

from duetgan.extras.official.convert import checkpoint_of, read
from duetgan.extras.official.names import Converted
from duetgan.inference.export.subject import Drawing, Runner, Subject, as_runner
from duetgan.models.registry import DEFAULT
from duetgan.models.restore import generator_from
from duetgan.models.stylegan2 import DiscriminatorConfig, GeneratorConfig
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config
from duetgan.utils.errors import refuse
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_log import say

# parts of a discriminator that other programs do not have
EXTRA_HEADS = ("auxiliary", "from_rgbs")


def networks(checkpoint: Checkpoint) -> Converted:
    """Return the networks of a checkpoint as a `Converted` with complete configurations.

    The parts of the discriminator in EXTRA_HEADS are left out, with a note. Raises UserError unless
    the networks are a fully grown StyleGAN2 for square images of 2^n px that are 8-bit grey or RGB.
    """
    config, shape = checkpoint["config"], dict(checkpoint["shape"])
    name, size = config.get("architecture", DEFAULT), shape["resolution"]
    refuse(
        (
            name != "stylegan2",
            f"this format is for stylegan2, the checkpoint has {name}; choose safetensors",
        ),
        (
            isinstance(size, str),
            f"this format is for squares, the checkpoint draws {size} px; choose safetensors",
        ),
    )
    is_grown = tuple(checkpoint.get("stage", (size, 1.0))) == (size, 1.0)
    refuse(
        (
            size & (size - 1),
            f"this format is for sides of 8, 16, 32, ... px, not {size}; choose safetensors",
        ),
        (
            not is_grown,
            "this format is for networks at their full resolution, this one still grows; train it "
            "on",
        ),
    )
    ImageSpec.read(shape).need_plain("this format")
    sections: dict[str, type[Config]] = {
        "generator": GeneratorConfig,
        "discriminator": DiscriminatorConfig,
    }
    configs = {}
    for name, config_class in sections.items():
        configs[name] = build(config_class, config.get(name, {}), source=name).model_dump()
    state = {}
    for name, weights in checkpoint["state"].items():
        if name.removesuffix("_ema") in sections:
            state[name] = weights
    if "discriminator" not in config:  # a file of weights has only the generator
        state.pop("discriminator", None)
    heads, discriminator = set(), {}
    for name, tensor in state.get("discriminator", {}).items():
        head = name.partition(".")[0]
        if head in EXTRA_HEADS:
            heads.add(head)
        else:
            discriminator[name] = tensor
    if heads:
        state["discriminator"] = discriminator
        parts = " and ".join(sorted(heads))
        say(f"note: without the discriminator's {parts}, which those programs do not have")
    return Converted("stylegan2", shape, configs["generator"], configs["discriminator"], state)


def note_group_difference(gan: Converted) -> None:
    """Print a note if NVIDIA's program groups samples differently for the minibatch standard
    deviation.
    """
    group = gan.discriminator["minibatch_std_group"]
    order = gan.discriminator["minibatch_std_order"]
    if "discriminator" in gan.state and group > 1 and order != "strided":
        say(
            f"note: D's minibatch standard deviation is over groups of {group} {order} samples; "
            f"theirs of {group} samples, N / {group} apart"
        )


def load(subject: Subject, path: Path) -> Runner:
    """Read the exported file `path`, and return the generator as a function of its inputs."""
    content = checkpoint_of(read(path), list(subject.checkpoint["classes"]))
    return as_runner(Drawing(generator_from(content)))
