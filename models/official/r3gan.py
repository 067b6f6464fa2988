"""R3GAN's networks (the authors' program): pickled module by module, without what they were built with."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.official.names import Converted, Place, Source, Table, number, sizes
from models.official.unpickle import Inert, Refused, module_state

PARTS = {  # of a block: ours -> theirs
    "expand.weight": "LinearLayer1.Layer.weight",
    "group.weight": "LinearLayer2.Layer.weight",
    "reduce.weight": "LinearLayer3.Layer.weight",
    "expand.bias": "NonLinearity1.Bias",
    "group.bias": "NonLinearity2.Bias",
}
MAIN = "Model.MainLayers"


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks `G`, `D`, `G_ema` of a file. Their sizes are read from the shapes of their weights."""
    for name in ("G", "D", "G_ema"):
        if not isinstance(content.get(name), Inert):
            raise Refused(f"it holds no network {name!r}")
    about = content["G_ema"].state
    side, classes = about.get("img_resolution"), number(about.get("c_dim"), "c_dim")
    stages = len(sizes(side))
    configs: dict[str, dict[str, Any]] = {}
    state = {}
    for ours, theirs in (("generator", "G"), ("generator_ema", "G_ema"), ("discriminator", "D")):
        source = Source(module_state(content[theirs]), theirs)
        source.drop_filters("Resampler.Kernel")
        config = configs[theirs] = _sizes(source, stages, first=int(theirs != "D"))
        state[ours] = source.take_all(_table(source, stages, config["blocks"], classes > 0))
        source.done()
        if classes:
            config["embed_dim"] = len(state[ours]["embed.weight"])
    basis = state["discriminator"]["basis"]
    state["discriminator"]["basis"] = basis.permute(1, 0, 2, 3).contiguous()
    configs["G_ema"]["z_dim"] = number(about.get("z_dim"), "z_dim")
    shape = {"resolution": side, "channels": len(state["generator_ema"]["to_rgb.weight"]), "classes": classes}
    return Converted("r3gan", shape, configs["G_ema"], configs["D"], state)


def _table(source: Source, stages: int, blocks: int, conditional: bool) -> Table:
    """Our names of the network's tensors. A generator's stage begins with the change of width, a discriminator's ends
    with it, where ours opens the next one.
    """
    back = source.what == "D"
    table: Table = {}
    for s in range(stages):
        for n in range(blocks):
            layer = f"{MAIN}.{s}.Layers.{n + (not back)}"
            table |= {f"stages.{s}.blocks.{n}.{part}": Place(f"{layer}.{name}") for part, name in PARTS.items()}
        change = f"{MAIN}.{s - back}.Layers.{blocks * back}.LinearLayer.Layer.weight"
        if change in source.tensors:  # where the width changes
            table[f"stages.{s}.change.weight"] = Place(change)
    if conditional:
        table["embed.weight"] = Place("Model.EmbeddingLayer.weight")
    if back:
        last = f"{MAIN}.{stages - 1}.Layers.{blocks}"
        table |= {
            "from_rgb.weight": Place("Model.ExtractionLayer.Layer.weight"),
            "basis": Place(f"{last}.Basis.weight"),
        }
        return table | {"output.weight": Place(f"{last}.LinearLayer.weight")}
    first = f"{MAIN}.0.Layers.0"
    table |= {"to_rgb.weight": Place("Model.AggregationLayer.Layer.weight"), "basis": Place(f"{first}.Basis", -1)}
    return table | {"linear.weight": Place(f"{first}.LinearLayer.weight")}


def _sizes(source: Source, stages: int, *, first: int) -> dict[str, Any]:
    """Our configuration. `first`: the place of a stage's first block; a generator's stages go upwards."""
    blocks = sum(f"{MAIN}.0.Layers.{first + n}.LinearLayer1.Layer.weight" in source.tensors for n in range(100))
    if not blocks:
        raise Refused(f"{source.what} has no blocks of R3GAN's")

    def weight(stage: int, layer: int) -> Tensor:
        name = f"{MAIN}.{stage}.Layers.{first}.LinearLayer{layer}.Layer.weight"
        if name not in source.tensors or source.tensors[name].ndim != 4 or not source.tensors[name].numel():
            raise Refused(f"{source.what} has no {name}")
        return source.tensors[name]

    order = range(stages)[:: 1 if first else -1]  # from 4 px up
    widths = [weight(stage, 1).shape[1] for stage in order]
    inside, inputs = weight(order[0], 2).shape[:2]
    whole = 4 << max(place for place, width in enumerate(widths) if width == widths[0])
    expected = [widths[0] * whole // max(4 << place, whole) for place in range(stages)]
    if widths != expected or inside % widths[0] or inside % inputs:
        raise Refused(f"{source.what} has the widths {widths}; Duet's are whole up to one resolution, then halved")
    config = {"width": widths[0], "blocks": blocks, "cardinality": inside // inputs}
    return config | {"expansion": inside // widths[0], "full_width_up_to": whole}
