"""Convert R3GAN's networks from the authors' files.

The files do not contain the arguments that the networks were built with.
"""

import re
from functools import partial

from duetgan.extras.official.names import NETWORKS, Converted, Place, Source, number, renamed, sizes
from duetgan.extras.official.unpickle import Inert, Refused, module_state
from duetgan.utils.config.yaml_files import Tree

MAIN = "Model.MainLayers"
NAMES = {  # our name -> R3GAN's, except for the first or last layers of stages
    "embed.weight": "Model.EmbeddingLayer.weight",
    "from_rgb.weight": "Model.ExtractionLayer.Layer.weight",
    "to_rgb.weight": "Model.AggregationLayer.Layer.weight",
    r"(.+)\.expand\.weight": r"\1.LinearLayer1.Layer.weight",
    r"(.+)\.group\.weight": r"\1.LinearLayer2.Layer.weight",
    r"(.+)\.reduce\.weight": r"\1.LinearLayer3.Layer.weight",
    r"(.+)\.expand\.bias": r"\1.NonLinearity1.Bias",
    r"(.+)\.group\.bias": r"\1.NonLinearity2.Bias",
}


def convert(content: Tree) -> Converted:
    """Convert the networks `G`, `D` and `G_ema` in `content`, the content of a file.

    The sizes of the networks are inferred from the shapes of their weights.
    """
    for name in NETWORKS.values():
        if not isinstance(content.get(name), Inert):
            raise Refused(f"it holds no network {name!r}")
    attributes = content["G_ema"].state
    side = attributes.get("img_resolution")
    classes = number(attributes.get("c_dim"), "c_dim")
    stages = len(sizes(side))
    gan = Converted("r3gan", {"resolution": side, "classes": classes}, {}, {}, {})
    for part, network in NETWORKS.items():
        is_discriminator = network == "D"
        source = Source(module_state(content[network]), network)
        source.drop_filters("Resampler.Kernel")
        config = _sizes(source, stages, is_discriminator)
        place = partial(_place, is_discriminator, stages - 1, config["blocks"])
        if classes:
            config["embed_dim"] = source.shape(NAMES["embed.weight"], 2)[0]
        if is_discriminator:
            gan.discriminator = config
        else:
            z_dim = number(attributes.get("z_dim"), "z_dim")
            gan.generator = gan.generator or {**config, "z_dim": z_dim}
            gan.shape["channels"] = source.shape(NAMES["to_rgb.weight"], 4)[0]
        gan.take(part, source, place)
    return gan


def _place(is_discriminator: bool, last: int, blocks: int, name: str) -> Place:
    """Return the `Place` of our tensor `name`.

    `last` is the index of the last stage, `blocks` the number of blocks per stage. In the
    generators of both programs, a stage begins with the layer that changes the width. In R3GAN's
    discriminator, this layer ends a stage; in ours, it begins the next one. The layers for 4 px,
    basis and linear, begin R3GAN's first stage in a generator, and end its last stage in a
    discriminator.
    """
    edge = f"{MAIN}.{last}.Layers.{blocks}" if is_discriminator else f"{MAIN}.0.Layers.0"
    if name == "basis":
        return Place(f"{edge}.Basis.weight" if is_discriminator else f"{edge}.Basis")
    if name in ("linear.weight", "output.weight"):
        return Place(f"{edge}.LinearLayer.weight")
    if match := re.fullmatch(r"stages\.(\d+)\.change\.weight", name):
        stage = int(match[1]) - is_discriminator
        layer = blocks * is_discriminator
        return Place(f"{MAIN}.{stage}.Layers.{layer}.LinearLayer.Layer.weight")
    if match := re.fullmatch(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)", name):
        layer = int(match[2]) + (not is_discriminator)
        name = f"{MAIN}.{match[1]}.Layers.{layer}.{match[3]}"
    return Place(renamed(name, NAMES))


def _sizes(source: Source, stages: int, is_discriminator: bool) -> Tree:
    """Return our configuration of a network, inferred from the shapes of its weights."""
    first = 0 if is_discriminator else 1  # index of the first block in a stage
    blocks = sum(
        f"{MAIN}.0.Layers.{first + n}.LinearLayer1.Layer.weight" in source.tensors
        for n in range(100)
    )
    if not blocks:
        raise Refused(f"{source.title} has no blocks of R3GAN's")

    def shape(stage: int, layer: int) -> tuple[int, ...]:
        return source.shape(f"{MAIN}.{stage}.Layers.{first}.LinearLayer{layer}.Layer.weight", 4)

    order = range(stages)[:: -1 if is_discriminator else 1]  # from 4 px up
    widths = [shape(stage, 1)[1] for stage in order]
    inside, inputs, *_ = shape(order[0], 2)
    # the largest size in px with the full width
    full = 4 << max(n for n, width in enumerate(widths) if width == widths[0])
    expected = [widths[0] * full // max(4 << n, full) for n in range(stages)]
    if widths != expected or inside % widths[0] or inside % inputs:
        raise Refused(
            f"{source.title} has the widths {widths}; Duet's are whole up to one resolution, then "
            "halved"
        )
    return {
        "width": widths[0],
        "blocks": blocks,
        "cardinality": inside // inputs,
        "expansion": inside // widths[0],
        "full_width_up_to": full,
    }
