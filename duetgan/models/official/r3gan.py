"""R3GAN's networks (the authors' program): pickled module by module, without what they were built
with.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from duetgan.models.official.names import NETWORKS, Converted, Place, Source, number, renamed, sizes
from duetgan.models.official.unpickle import Inert, Refused, module_state

MAIN = "Model.MainLayers"
NAMES = {  # ours -> theirs, but for what is first or last in a stage
    "embed.weight": "Model.EmbeddingLayer.weight",
    "from_rgb.weight": "Model.ExtractionLayer.Layer.weight",
    "to_rgb.weight": "Model.AggregationLayer.Layer.weight",
    r"(.+)\.expand\.weight": r"\1.LinearLayer1.Layer.weight",
    r"(.+)\.group\.weight": r"\1.LinearLayer2.Layer.weight",
    r"(.+)\.reduce\.weight": r"\1.LinearLayer3.Layer.weight",
    r"(.+)\.expand\.bias": r"\1.NonLinearity1.Bias",
    r"(.+)\.group\.bias": r"\1.NonLinearity2.Bias",
}


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks `G`, `D`, `G_ema` of a file. Their sizes are read from the shapes of their
    weights.
    """
    for name in NETWORKS.values():
        if not isinstance(content.get(name), Inert):
            raise Refused(f"it holds no network {name!r}")
    about = content["G_ema"].state
    side, classes = about.get("img_resolution"), number(about.get("c_dim"), "c_dim")
    stages = len(sizes(side))
    gan = Converted("r3gan", {"resolution": side, "classes": classes}, {}, {}, {})
    for ours, theirs in NETWORKS.items():
        source = Source(module_state(content[theirs]), theirs)
        source.drop_filters("Resampler.Kernel")
        config = _sizes(source, stages, first=int(theirs != "D"))
        place = partial(_place, theirs == "D", stages - 1, config["blocks"])
        if classes:
            config["embed_dim"] = source.shape(NAMES["embed.weight"], 2)[0]
        if theirs == "D":
            gan.discriminator = config
        else:
            gan.generator = gan.generator or config | {"z_dim": number(about.get("z_dim"), "z_dim")}
            gan.shape["channels"] = source.shape(NAMES["to_rgb.weight"], 4)[0]
        gan.take(ours, source, place)
    return gan


def _place(back: bool, last: int, blocks: int, name: str) -> Place:
    """A generator's stage begins with the change of width, a discriminator's ends with it, where
    ours opens the next one; so does the layer at 4 px.
    """
    edge = f"{MAIN}.{last}.Layers.{blocks}" if back else f"{MAIN}.0.Layers.0"
    if name == "basis":
        return Place(f"{edge}.Basis.weight" if back else f"{edge}.Basis")
    if name in ("linear.weight", "output.weight"):
        return Place(f"{edge}.LinearLayer.weight")
    if match := re.fullmatch(r"stages\.(\d+)\.change\.weight", name):
        return Place(
            f"{MAIN}.{int(match[1]) - back}.Layers.{blocks * back}.LinearLayer.Layer.weight"
        )
    if match := re.fullmatch(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)", name):
        name = f"{MAIN}.{match[1]}.Layers.{int(match[2]) + (not back)}.{match[3]}"
    return Place(renamed(name, NAMES))


def _sizes(source: Source, stages: int, *, first: int) -> dict[str, Any]:
    """Our configuration. `first`: the place of a stage's first block; a generator's stages go
    upwards.
    """
    blocks = sum(
        f"{MAIN}.0.Layers.{first + n}.LinearLayer1.Layer.weight" in source.tensors
        for n in range(100)
    )
    if not blocks:
        raise Refused(f"{source.what} has no blocks of R3GAN's")

    def shape(stage: int, layer: int) -> tuple[int, ...]:
        return source.shape(f"{MAIN}.{stage}.Layers.{first}.LinearLayer{layer}.Layer.weight", 4)

    order = range(stages)[:: 1 if first else -1]  # from 4 px up
    widths = [shape(stage, 1)[1] for stage in order]
    inside, inputs, *_ = shape(order[0], 2)
    whole = 4 << max(place for place, width in enumerate(widths) if width == widths[0])
    expected = [widths[0] * whole // max(4 << place, whole) for place in range(stages)]
    if widths != expected or inside % widths[0] or inside % inputs:
        raise Refused(
            f"{source.what} has the widths {widths}; Duet's are whole up to one resolution, then halved"
        )
    config = {"width": widths[0], "blocks": blocks, "cardinality": inside // inputs}
    return config | {"expansion": inside // widths[0], "full_width_up_to": whole}
