"""rosinality's StyleGAN2 (stylegan2-pytorch): `.pt` files of plain tensors, unconditional, RGB."""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.official.names import Converted, Place, Source, Table, by_their_names, sizes
from models.official.unpickle import Refused
from models.stylegan2 import Generator, GeneratorConfig
from utils import bounded
from utils.checkpoint.state_schema import check_tensors
from utils.errors import UserError
from utils.seeding import generator as keyed

DRAWS = 4096  # of z, for the mean w that training files lack
NAMES = ("g_ema", "g", "d")
LR_MULTIPLIER = 0.01  # of their mapping network's learning rate


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks `g_ema`, and where the file has them `g` and `d`."""
    for name in NAMES:
        if name in content or name == "g_ema":
            check_tensors(name, content.get(name))
    average = content["g_ema"]
    side = 4 << sum(re.fullmatch(r"to_rgbs\.\d+\.bias", name) is not None for name in average)
    sizes(side)
    layers = sum(re.fullmatch(r"style\.\d+\.weight", name) is not None for name in average)
    widths = [_width(average, name) for name in ("input.input", f"to_rgbs.{len(sizes(side)) - 2}.conv.weight")]
    dims = _width(average, "style.1.weight")
    base = {"channel_base": widths[1] * side, "channel_max": widths[0], "fp16_resolutions": 0, "conv_clamp": None}
    g = base | {"z_dim": dims, "w_dim": dims, "mapping_layers": layers}
    d = base | {"architecture": "residual", "minibatch_std_group": 4, "minibatch_std_order": "strided"}
    shape = {"resolution": side, "channels": 3, "classes": 0}
    mean, notes = content.get("latent_avg"), []
    if mean is None:
        notes.append(f"the file has no mean w; it was taken over {DRAWS:,} draws")
    state = {}
    for ours, theirs in (("generator_ema", "g_ema"), ("generator", "g"), ("discriminator", "d")):
        if theirs not in content:
            continue
        source = Source(content[theirs], theirs)
        source.drop_filters(".kernel", (1.0,) if theirs == "d" else (1.0, 4.0))
        state[ours] = source.take_all(_discriminator_table(side) if theirs == "d" else _generator_table(side, layers))
        source.done()
        if theirs != "d":
            taken = None if mean is None else Source({"latent_avg": mean}, "it").take("latent_avg")
            state[ours]["w_avg"] = _mean(state[ours], g, shape) if taken is None else taken
    return Converted("stylegan2", shape, g, d, state, notes)


def read(path: Path) -> Any:
    """What torch.save wrote of names, tensors and numbers; of the options of their training the values.

    Raises UserError for a file that is missing, too large, damaged, or holds more than that; nothing in it is run.
    """
    try:
        bounded.check(path, bounded.WEIGHTS)
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a network's .pkl or .pt file") from error
    except Exception as error:  # a damaged file makes torch's reader and unpickler raise a dozen kinds
        reason = "damaged, or holds more than names and tensors; nothing in it was run"
        raise UserError(f"{path}: refused, {reason}; fetch it again") from error


def theirs(gan: Converted) -> dict[str, Any]:
    """What their torch.save would hold: `g_ema`, `latent_avg`, and where they are there `g` and `d`. One mean w serves
    both generators. Raises Refused for networks that theirs cannot be.
    """
    shape, g, d = gan.shape, gan.generator, gan.discriminator
    if shape["classes"] or shape["channels"] != 3:
        here = f"{shape['channels']} channels and {shape['classes']} classes"
        raise Refused(f"rosinality's networks are RGB and without classes, this one has {here}")
    if g["z_dim"] != g["w_dim"] or g["mapping_lr_multiplier"] != LR_MULTIPLIER:
        raise Refused(f"rosinality's networks have z_dim = w_dim and a mapping_lr_multiplier of {LR_MULTIPLIER}")
    side = shape["resolution"]
    rest = range(len(sizes(side)) - 1)
    filters = [name for n in rest for name in (f"convs.{2 * n}.conv.blur.kernel", f"to_rgbs.{n}.upsample.kernel")]
    content: dict[str, Any] = {}
    for ours, name in (("generator_ema", "g_ema"), ("generator", "g")):
        if ours in gan.state:
            table = _generator_table(side, g["mapping_layers"])
            content[name] = by_their_names(gan.state[ours], table, filters, gain=4.0)
    if "discriminator" in gan.state and d["architecture"] == "residual" and d["minibatch_std_group"] > 1:
        filters = [name for n in rest for name in (f"convs.{n + 1}.conv2.0.kernel", f"convs.{n + 1}.skip.0.kernel")]
        content["d"] = by_their_names(gan.state["discriminator"], _discriminator_table(side), filters)
    return content | {"latent_avg": gan.state["generator_ema"]["w_avg"].detach().cpu().float().clone()}


def _width(state: Mapping[str, Tensor], name: str) -> int:
    """The layer's inputs: of ToRGB's [1, 3, C, 1, 1] and of input and matrix [., C, ...]."""
    if name not in state or state[name].ndim < 2:
        raise Refused(f"g_ema has no {name}")
    return state[name].shape[2 if name.startswith("to_rgbs") else 1]


@torch.no_grad()
def _mean(part: Mapping[str, Tensor], config: Mapping[str, Any], shape: Mapping[str, int]) -> Tensor:
    """The mean w of draws of z, as their `mean_latent`."""
    network = Generator(GeneratorConfig(**config), **shape).mapping
    held = {name.partition(".")[2]: value for name, value in part.items() if name.startswith("mapping.")}
    network.load_state_dict(held)
    return network(torch.randn(DRAWS, config["z_dim"], generator=keyed(0, "eval", "mean w")), None).mean(dim=0)


# --- names


def _generator_table(side: int, layers: int) -> Table:
    """All but `w_avg`, which is no part of their network."""
    table = {"constant": Place("input.input")}
    for k in range(layers):
        for part in ("weight", "bias"):
            table[f"mapping.layers.{k}.{part}"] = Place(f"style.{k + 1}.{part}")
    for i in range(len(sizes(side))):
        places = {"second": ("conv1", 0)}
        if i:
            places = {"first": (f"convs.{2 * i - 2}", 2 * i - 1), "second": (f"convs.{2 * i - 1}", 2 * i)}
        for name, (theirs, noise) in places.items():
            ours = f"blocks.{i}.{name}"
            table |= _modulated(f"{ours}.conv", f"{theirs}.conv")
            table[f"{ours}.noise_strength"] = Place(f"{theirs}.noise.weight", 1)
            table[f"{ours}.bias"] = Place(f"{theirs}.activate.bias")
            table[f"{ours}.noise_const"] = Place(f"noises.noise_{noise}")
        theirs = f"to_rgbs.{i - 1}" if i else "to_rgb1"
        table |= _modulated(f"blocks.{i}.to_rgb.conv", f"{theirs}.conv")
        table[f"blocks.{i}.to_rgb.bias"] = Place(f"{theirs}.bias", 1, 2)
    return table


def _modulated(ours: str, theirs: str) -> Table:
    affine = {f"{ours}.affine.{part}": Place(f"{theirs}.modulation.{part}") for part in ("weight", "bias")}
    return {f"{ours}.weight": Place(f"{theirs}.weight", 1)} | affine


def _discriminator_table(side: int) -> Table:
    layers = {"from_rgb": ("convs.0.0", "convs.0.1"), "last_conv": ("final_conv.0", "final_conv.1")}
    layers |= {ours: (f"final_linear.{n}",) * 2 for n, ours in enumerate(("last_linear", "output"))}
    for j in range(len(sizes(side)) - 1):
        theirs = f"convs.{j + 1}"
        layers[f"blocks.{j}.first"] = (f"{theirs}.conv1.0", f"{theirs}.conv1.1")
        layers[f"blocks.{j}.second"] = (f"{theirs}.conv2.1", f"{theirs}.conv2.2")
    skips = {f"blocks.{j}.skip.weight": Place(f"convs.{j + 1}.skip.1.weight") for j in range(len(sizes(side)) - 1)}
    weights = {f"{ours}.weight": Place(f"{there}.weight") for ours, (there, _) in layers.items()}
    return weights | {f"{ours}.bias": Place(f"{there}.bias") for ours, (_, there) in layers.items()} | skips
