"""rosinality's StyleGAN2 (stylegan2-pytorch): `.pt` files of plain tensors, unconditional, RGB."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from duetgan.models.official.names import Converted, Place, Source, by_their_names, renamed, sizes
from duetgan.models.official.unpickle import Refused
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.checkpoint.state_schema import check_tensors
from duetgan.utils.seeding import generator as keyed

DRAWS = 4096  # of z, for the mean w that training files lack
# a part of our state -> theirs
NETWORKS = {"generator_ema": "g_ema", "generator": "g", "discriminator": "d"}
LR_MULTIPLIER = 0.01  # of their mapping network's learning rate
STYLED = {  # ours -> theirs
    r"conv\.affine\.(.+)": r"conv.modulation.\1",
    "noise_strength": "noise.weight",
    "bias": "activate.bias",
}
DISCRIMINATOR = {
    r"from_rgb\.weight": "convs.0.0.weight",
    r"from_rgb\.bias": "convs.0.1.bias",
    r"last_conv\.weight": "final_conv.0.weight",
    r"last_conv\.bias": "final_conv.1.bias",
    r"last_linear\.(.+)": r"final_linear.0.\1",
    r"output\.(.+)": r"final_linear.1.\1",
}
BLOCK = {  # of the discriminator
    r"first\.weight": "conv1.0.weight",
    r"first\.bias": "conv1.1.bias",
    r"second\.weight": "conv2.1.weight",
    r"second\.bias": "conv2.2.bias",
    r"skip\.weight": "skip.1.weight",
}


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks `g_ema`, and where the file has them `g` and `d`."""
    for name in NETWORKS.values():
        if name in content or name == "g_ema":
            check_tensors(name, content.get(name))
    average = Source(content["g_ema"], "g_ema")
    side = 4 << sum(
        re.fullmatch(r"to_rgbs\.\d+\.bias", name) is not None for name in average.tensors
    )
    layers = sum(re.fullmatch(r"style\.\d+\.weight", name) is not None for name in average.tensors)
    last = average.shape(f"to_rgbs.{len(sizes(side)) - 2}.conv.weight", 5)[2]
    base: dict[str, Any] = {
        "channel_base": last * side,
        "channel_max": average.shape("input.input", 4)[1],
    }
    base |= {"fp16_resolutions": 0, "conv_clamp": None}
    dims = average.shape("style.1.weight", 2)[1]
    g = base | {"z_dim": dims, "w_dim": dims, "mapping_layers": layers}
    d = base | {
        "architecture": "residual",
        "minibatch_std_group": 4,
        "minibatch_std_order": "strided",
    }
    gan = Converted("stylegan2", {"resolution": side, "channels": 3, "classes": 0}, g, d, {})
    if (mean := content.get("latent_avg")) is None:
        gan.notes.append(f"the file has no mean w; it was taken over {DRAWS:,} draws")
    for ours, theirs in NETWORKS.items():
        if theirs in content:
            given = (
                {} if theirs == "d" else {"latent_avg": torch.zeros(dims) if mean is None else mean}
            )
            source = Source(content[theirs] | given, theirs)
            source.drop_filters(".kernel", (1.0,) if theirs == "d" else (1.0, 4.0))
            state = gan.take(
                ours, source, _discriminator_place if theirs == "d" else _generator_place
            )
            if mean is None and theirs != "d":
                state["w_avg"] = _mean(state, g, gan.shape)
    return gan


def theirs(gan: Converted) -> dict[str, Any]:
    """What their torch.save would hold: `g_ema`, `latent_avg`, and where they are there `g` and
    `d`. One mean w serves both generators. Raises Refused for networks that theirs cannot be.
    """
    shape, g, d = gan.shape, gan.generator, gan.discriminator
    if shape["classes"] or shape["channels"] != 3:
        raise Refused(
            f"rosinality's networks are RGB and without classes, this one has {shape['channels']} channels and "
            f"{shape['classes']} classes"
        )
    if g["z_dim"] != g["w_dim"] or g["mapping_lr_multiplier"] != LR_MULTIPLIER:
        raise Refused(
            f"rosinality's networks have z_dim = w_dim and a mapping_lr_multiplier of {LR_MULTIPLIER}"
        )
    rest = range(len(sizes(shape["resolution"])) - 1)
    filters = [
        name
        for n in rest
        for name in (f"convs.{2 * n}.conv.blur.kernel", f"to_rgbs.{n}.upsample.kernel")
    ]
    content: dict[str, Any] = {}
    for ours, name in (("generator_ema", "g_ema"), ("generator", "g")):
        if ours in gan.state:
            content[name] = by_their_names(gan.state[ours], _generator_place, filters, gain=4.0)
            content["latent_avg"] = content[name].pop("latent_avg")
    if (
        "discriminator" in gan.state
        and d["architecture"] == "residual"
        and d["minibatch_std_group"] > 1
    ):
        filters = [
            name
            for n in rest
            for name in (f"convs.{n + 1}.conv2.0.kernel", f"convs.{n + 1}.skip.0.kernel")
        ]
        content["d"] = by_their_names(gan.state["discriminator"], _discriminator_place, filters)
    return content


@torch.no_grad()
def _mean(
    part: Mapping[str, Tensor], config: Mapping[str, Any], shape: Mapping[str, int]
) -> Tensor:
    """The mean w of draws of z, as their `mean_latent`."""
    network = Generator(GeneratorConfig(**config), **shape).mapping
    held = {
        name.partition(".")[2]: value for name, value in part.items() if name.startswith("mapping.")
    }
    network.load_state_dict(held)
    return network(
        torch.randn(DRAWS, config["z_dim"], generator=keyed(0, "eval", "mean w")), None
    ).mean(dim=0)


def _generator_place(name: str) -> Place:
    """`latent_avg` is no part of their network, but beside it."""
    if match := re.fullmatch(r"mapping\.layers\.(\d+)\.(.+)", name):
        return Place(f"style.{int(match[1]) + 1}.{match[2]}")
    if match := re.fullmatch(r"blocks\.(\d+)\.(first|second|to_rgb)\.(.+)", name):
        n, layer, part = int(match[1]), match[2], match[3]
        if part == "noise_const":
            return Place(f"noises.noise_{2 * n - (layer == 'first')}")
        styled = f"convs.{2 * n - (2 if layer == 'first' else 1)}" if n else "conv1"
        theirs = styled if layer != "to_rgb" else f"to_rgbs.{n - 1}" if n else "to_rgb1"
        if layer == "to_rgb" and part == "bias":
            return Place(f"{theirs}.bias", (None, slice(None), None, None))
        return Place(
            f"{theirs}.{renamed(part, STYLED)}",
            (None,) if part in ("conv.weight", "noise_strength") else (),
        )
    return Place({"w_avg": "latent_avg", "constant": "input.input"}[name])


def _discriminator_place(name: str) -> Place:
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
        return Place(f"convs.{int(match[1]) + 1}.{renamed(match[2], BLOCK)}")
    return Place(renamed(name, DISCRIMINATOR))
