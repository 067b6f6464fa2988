"""rosinality's StyleGAN2 (stylegan2-pytorch): `.pt` files of plain tensors, unconditional, RGB."""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.official.names import Converted, Source, sizes
from models.official.unpickle import Refused
from models.stylegan2 import Generator, GeneratorConfig
from utils import door
from utils.errors import UserError
from utils.seeding import generator as keyed
from utils.state_schema import check_tensors

DRAWS = 4096  # of z, for the mean w that training files lack
NAMES = ("g_ema", "g", "d")


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
    state, notes = {"generator_ema": _generator(average, "g_ema", side, layers)}, []
    if "g" in content:
        state["generator"] = _generator(content["g"], "g", side, layers)
    if "d" in content:
        state["discriminator"] = _discriminator(content["d"], side)
    mean = content.get("latent_avg")
    if mean is None:
        notes.append(f"the file has no mean w; it was taken over {DRAWS:,} draws")
    for name, part in state.items():
        if name.startswith("generator"):
            part["w_avg"] = (
                _mean(part, g, shape) if mean is None else Source({"latent_avg": mean}, "it").take("latent_avg")
            )
    return Converted("stylegan2", shape, g, d, state, notes)


def read(path: Path) -> Any:
    """What torch.save wrote of names, tensors and numbers; of the options of their training the values.

    Raises UserError for a file that is missing, too large, damaged, or holds more than that; nothing in it is run.
    """
    try:
        door.check(path, door.WEIGHTS)
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a network's .pkl or .pt file") from error
    except Exception as error:  # a damaged file makes torch's reader and unpickler raise a dozen kinds
        told = "damaged, or holds more than names and tensors; nothing in it was run"
        raise UserError(f"{path}: refused, {told}; fetch it again") from error


def _width(state: Mapping[str, Tensor], name: str) -> int:
    """The layer's inputs: of ToRGB's [1, 3, C, 1, 1] and of input and matrix [., C, ...]."""
    if name not in state or state[name].ndim < 2:
        raise Refused(f"g_ema has no {name}")
    return state[name].shape[2 if name.startswith("to_rgbs") else 1]


@torch.no_grad()
def _mean(part: Mapping[str, Tensor], config: Mapping[str, Any], shape: Mapping[str, int]) -> Tensor:
    """The mean w of draws of z, as their `mean_latent`."""
    network = Generator(GeneratorConfig(**config), **shape).mapping
    prefix = "mapping."
    network.load_state_dict(
        {name.removeprefix(prefix): value for name, value in part.items() if name.startswith(prefix)}
    )
    z = torch.randn(DRAWS, config["z_dim"], generator=keyed(0, "eval", "mean w"))
    return network(z, None).mean(dim=0)


def _generator(state: Mapping[str, Tensor], what: str, side: int, layers: int) -> dict[str, Tensor]:
    source = Source(state, what)
    source.drop_filters(".kernel", (1.0, 4.0))
    found = {"constant": source.take("input.input")}
    for k in range(layers):
        for part in ("weight", "bias"):
            found[f"mapping.layers.{k}.{part}"] = source.take(f"style.{k + 1}.{part}")
    for i in range(len(sizes(side))):
        places = (
            [("second", "conv1", 0)]
            if i == 0
            else [
                ("first", f"convs.{2 * i - 2}", 2 * i - 1),
                ("second", f"convs.{2 * i - 1}", 2 * i),
            ]
        )
        for name, theirs, noise in places:
            ours = f"blocks.{i}.{name}"
            _modulated(source, found, f"{ours}.conv", f"{theirs}.conv")
            found[f"{ours}.noise_strength"] = source.take(f"{theirs}.noise.weight").reshape([])
            found[f"{ours}.bias"] = source.take(f"{theirs}.activate.bias")
            found[f"{ours}.noise_const"] = source.take(f"noises.noise_{noise}")
        theirs = "to_rgb1" if i == 0 else f"to_rgbs.{i - 1}"
        _modulated(source, found, f"blocks.{i}.to_rgb.conv", f"{theirs}.conv")
        found[f"blocks.{i}.to_rgb.bias"] = source.take(f"{theirs}.bias").flatten()
    source.done()
    return found


def _modulated(source: Source, found: dict[str, Tensor], ours: str, theirs: str) -> None:
    found[f"{ours}.weight"] = source.take(f"{theirs}.weight").squeeze(0)
    for part in ("weight", "bias"):
        found[f"{ours}.affine.{part}"] = source.take(f"{theirs}.modulation.{part}")


def _discriminator(state: Mapping[str, Tensor], side: int) -> dict[str, Tensor]:
    source = Source(state, "d")
    source.drop_filters(".kernel")
    names = {"from_rgb.weight": "convs.0.0.weight", "from_rgb.bias": "convs.0.1.bias"}
    for j in range(len(sizes(side)) - 1):
        theirs = f"convs.{j + 1}"
        names |= {f"blocks.{j}.first.weight": f"{theirs}.conv1.0.weight"}
        names |= {f"blocks.{j}.first.bias": f"{theirs}.conv1.1.bias"}
        names |= {f"blocks.{j}.second.weight": f"{theirs}.conv2.1.weight"}
        names |= {f"blocks.{j}.second.bias": f"{theirs}.conv2.2.bias"}
        names |= {f"blocks.{j}.skip.weight": f"{theirs}.skip.1.weight"}
    names |= {"last_conv.weight": "final_conv.0.weight", "last_conv.bias": "final_conv.1.bias"}
    for place, ours in enumerate(("last_linear", "output")):
        names |= {f"{ours}.{part}": f"final_linear.{place}.{part}" for part in ("weight", "bias")}
    found = {ours: source.take(theirs) for ours, theirs in names.items()}
    source.done()
    return found
