"""R3GAN's networks (the authors' program): pickled module by module, without what they were built with."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.official.names import Converted, Source, number, sizes
from models.official.unpickle import Inert, Refused, module_state

CONVOLUTIONS = {"expand": "LinearLayer1", "group": "LinearLayer2", "reduce": "LinearLayer3"}
BIASES = {"expand": "NonLinearity1", "group": "NonLinearity2"}


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks `G`, `D`, `G_ema` of a file. Their sizes are read from the shapes of their weights."""
    networks = {}
    for name in ("G", "D", "G_ema"):
        if not isinstance(content.get(name), Inert):
            raise Refused(f"it holds no network {name!r}")
        networks[name] = content[name]
    held = networks["G_ema"].state
    side, classes = held.get("img_resolution"), number(held.get("c_dim"), "c_dim")
    stages, conditional = len(sizes(side)), classes > 0
    generator: dict[str, Any] = {}
    state = {}
    for ours, theirs in (("generator", "G"), ("generator_ema", "G_ema")):
        source = Source(module_state(networks[theirs]), theirs)
        generator = _sizes(source, stages, top_first=False) | {"z_dim": number(held.get("z_dim"), "z_dim")}
        source.drop_filters("Resampler.Kernel")
        found = {"basis": source.take("Model.MainLayers.0.Layers.0.Basis")[None]}
        found["linear.weight"] = source.take("Model.MainLayers.0.Layers.0.LinearLayer.weight")
        if conditional:
            found["embed.weight"] = source.take("Model.EmbeddingLayer.weight")
            generator["embed_dim"] = len(found["embed.weight"])
        for s in range(stages):
            _change(source, found, f"stages.{s}", f"Model.MainLayers.{s}.Layers.0")
            _blocks(source, found, s, generator["blocks"], first=1)
        found["to_rgb.weight"] = source.take("Model.AggregationLayer.Layer.weight")
        source.done()
        state[ours] = found
    source = Source(module_state(networks["D"]), "D")
    discriminator = _sizes(source, stages, top_first=True)
    source.drop_filters("Resampler.Kernel")
    blocks, last = discriminator["blocks"], f"Model.MainLayers.{stages - 1}.Layers.{discriminator['blocks']}"
    found = {"from_rgb.weight": source.take("Model.ExtractionLayer.Layer.weight")}
    for s in range(stages):
        _blocks(source, found, s, blocks, first=0)
        if s < stages - 1:  # their transition closes a stage, ours opens the next one
            _change(source, found, f"stages.{s + 1}", f"Model.MainLayers.{s}.Layers.{blocks}")
    found["basis"] = source.take(f"{last}.Basis.weight").permute(1, 0, 2, 3).contiguous()
    found["output.weight"] = source.take(f"{last}.LinearLayer.weight")
    if conditional:
        found["embed.weight"] = source.take("Model.EmbeddingLayer.weight")
        discriminator["embed_dim"] = len(found["embed.weight"])
    source.done()
    state["discriminator"] = found
    shape = {"resolution": side, "channels": len(state["generator_ema"]["to_rgb.weight"]), "classes": classes}
    return Converted("r3gan", shape, generator, discriminator, state)


def _sizes(source: Source, stages: int, *, top_first: bool) -> dict[str, Any]:
    """Width, blocks, cardinality, expansion, and up to which resolution the width is whole.

    Refused where the width of a stage is another than ours would have.
    """
    first = 0 if top_first else 1  # number of a stage's first block among its layers
    blocks = sum(
        f"Model.MainLayers.0.Layers.{n + first}.LinearLayer1.Layer.weight" in source.tensors for n in range(100)
    )
    if not blocks:
        raise Refused(f"{source.what} has no blocks of R3GAN's")

    def weight(stage: int, layer: int) -> Tensor:
        name = f"Model.MainLayers.{stage}.Layers.{first}.LinearLayer{layer}.Layer.weight"
        if name not in source.tensors or source.tensors[name].ndim != 4 or not source.tensors[name].numel():
            raise Refused(f"{source.what} has no {name}")
        return source.tensors[name]

    order = range(stages)[:: -1 if top_first else 1]  # from 4 px up
    widths = [weight(stage, 1).shape[1] for stage in order]
    inside, inputs = weight(order[0], 2).shape[:2]
    whole = 4 << max(place for place, width in enumerate(widths) if width == widths[0])
    expected = [widths[0] * whole // max(4 << place, whole) for place in range(stages)]
    if widths != expected or inside % widths[0] or inside % inputs:
        raise Refused(f"{source.what} has the widths {widths}; Duet's are whole up to one resolution, then halved")
    found = {"width": widths[0], "blocks": blocks, "cardinality": inside // inputs}
    return found | {"expansion": inside // widths[0], "full_width_up_to": whole}


def _change(source: Source, found: dict[str, Tensor], ours: str, theirs: str) -> None:
    """The 1x1 convolution between two resolutions, which is there where the width changes."""
    if f"{theirs}.LinearLayer.Layer.weight" in source.tensors:
        found[f"{ours}.change.weight"] = source.take(f"{theirs}.LinearLayer.Layer.weight")


def _blocks(source: Source, found: dict[str, Tensor], stage: int, blocks: int, *, first: int) -> None:
    for n in range(blocks):
        ours, theirs = f"stages.{stage}.blocks.{n}", f"Model.MainLayers.{stage}.Layers.{n + first}"
        for name, layer in CONVOLUTIONS.items():
            found[f"{ours}.{name}.weight"] = source.take(f"{theirs}.{layer}.Layer.weight")
        for name, layer in BIASES.items():
            found[f"{ours}.{name}.bias"] = source.take(f"{theirs}.{layer}.Bias")
