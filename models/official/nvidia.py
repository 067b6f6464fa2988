"""StyleGAN2 networks of NVIDIA's PyTorch programs: stylegan2-ada-pytorch, and stylegan3's own StyleGAN2."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.official.names import Converted, Place, Source, Table, by_their_names, number, sizes
from models.official.unpickle import Inert, Refused, module_state
from utils import bounded

FILTER = [1, 3, 3, 1]
ENTRY = "nvidia"  # of a .safetensors file's metadata: JSON of the keyword arguments


class Arguments:
    """Keyword arguments that a network was built with. Each must be asked for: one that is not known is refused."""

    def __init__(self, given: Any, what: str) -> None:
        if not isinstance(given, dict):
            raise Refused(f"{what} are no dictionary")
        self.given, self.what = dict(given), what

    def take(self, name: str, default: Any = None) -> Any:
        """The argument, or its default."""
        return self.given.pop(name, default)

    def number(self, name: str, default: int) -> int:
        """The argument, which must be a whole number from 0 up."""
        return number(self.take(name, default), name)

    def ignore(self, *names: str) -> None:
        """Take arguments that change nothing."""
        for name in names:
            self.take(name)

    def inner(self, name: str) -> "Arguments":
        """The arguments of a part."""
        return Arguments(self.given.pop(name, {}) or {}, f"{self.what}.{name}")

    def only(self, name: str, *allowed: Any) -> None:
        """The argument must be one of `allowed`, the first of which is its default."""
        value = self.given.pop(name, allowed[0])
        if value not in allowed:
            raise Refused(f"{self.what}.{name} is {str(value)[:60]!r}; Duet's networks have {allowed[0]!r}")

    def done(self) -> None:
        """Refused where arguments are left over."""
        if self.given:
            raise Refused(f"{self.what} has {', '.join(map(str, self.given))}, which Duet does not know")


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks of a PyTorch file: `G`, `D`, `G_ema`."""
    networks: dict[str, Any] = {name: content.get(name) for name in ("G", "D", "G_ema")}
    for name, network in networks.items():
        if not isinstance(network, Inert):
            raise Refused(f"it holds no network {name!r}")
        if network.name != ("Discriminator" if name == "D" else "Generator") or "_init_kwargs" not in network.state:
            raise Refused(f"{name} is a {network.name!r}, none of StyleGAN2's networks")
    states = {name: module_state(network) for name, network in networks.items()}
    g, d = (networks[name].state["_init_kwargs"] for name in ("G_ema", "D"))
    return converted(g, d, states)


def converted(generator: Any, discriminator: Any, states: Mapping[str, Mapping[str, Tensor]]) -> Converted:
    """Networks `G_ema`, and where they are there `G` and `D`, in NVIDIA's names, built with these keyword arguments,
    in ours.
    """
    g, shape, noise = _generator_arguments(Arguments(generator, "the generator's arguments"))
    side, conditional = shape["resolution"], shape["classes"] > 0
    state = {}
    for ours, theirs in (("generator", "G"), ("generator_ema", "G_ema")):
        if theirs in states:
            source = Source(states[theirs], theirs)
            source.drop_filters("resample_filter")
            table = _generator_table(side, g["mapping_layers"], conditional)
            state[ours] = _taken(source, table, () if noise else ("noise_strength", "noise_const"))
    if "D" not in states:  # a new one will be as wide as the generator
        return Converted("stylegan2", shape, g, {name: g[name] for name in ("channel_base", "channel_max")}, state)
    d, there, multiplier, notes = _discriminator_arguments(Arguments(discriminator, "the discriminator's arguments"))
    if shape != there:
        raise Refused(f"the generator draws {shape}, the discriminator looks at {there}")
    source = Source(states["D"], "D")
    source.drop_filters("resample_filter")
    table = _discriminator_table(side, d["mapping_layers"], conditional, d["architecture"] == "residual")
    state["discriminator"] = _taken(source, table)
    for name, value in state["discriminator"].items():
        if name.startswith("label_mapping."):
            value.mul_(multiplier / 0.01)
    return Converted("stylegan2", shape, g, d, state, notes)


def from_file(path: Path) -> Converted:
    """The networks of a .safetensors file of `theirs`. Raises UserError if it is missing, too large or damaged."""
    states: dict[str, dict[str, Tensor]] = {}
    with bounded.reading(path, "export it again", SafetensorError, ValueError, RecursionError):
        bounded.check(path, bounded.WEIGHTS)
        with safe_open(str(path), framework="pt") as file:
            about, names = json.loads((file.metadata() or {}).get(ENTRY, "null")), list(file.keys())
            for name in names if isinstance(about, dict) else ():
                network, _, theirs = name.partition(".")
                states.setdefault(network, {})[theirs] = file.get_tensor(name)
    if "G_ema" not in states or not states.keys() <= {"G", "G_ema", "D"}:
        raise Refused("it holds no networks in NVIDIA's names (export.py --format nvidia writes such files)")
    return converted(about.get("G"), about.get("D"), states)


def theirs(gan: Converted) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """NETWORK.NAME -> tensor of `G`, `G_ema`, `D` (those that are there) as NVIDIA's state dicts have them, and the
    keyword arguments of `G` and `D` in stylegan2-ada-pytorch.
    """
    shape, g, d = gan.shape, gan.generator, gan.discriminator
    side, conditional = shape["resolution"], shape["classes"] > 0
    image = {theirs: shape[ours] for ours, theirs in SHAPE.items()}
    mapping = {"num_layers": g["mapping_layers"], "lr_multiplier": g["mapping_lr_multiplier"]}
    mapping["w_avg_beta"] = g["w_avg_beta"]
    given = {"z_dim": g["z_dim"], "w_dim": g["w_dim"], **image, "mapping_kwargs": mapping}
    arguments = {"G": given | {"synthesis_kwargs": _sizes_of(g)}}
    residual, layers = d.get("architecture") == "residual", d.get("mapping_layers", 0)
    if "discriminator" in gan.state:
        group = d["minibatch_std_group"]
        last = {"mbstd_group_size": group, "mbstd_num_channels": int(group > 1)}
        arguments["D"] = image | {"architecture": "resnet" if residual else "orig", **_sizes_of(d)}
        arguments["D"] |= {"mapping_kwargs": {"num_layers": layers, "lr_multiplier": 0.01}, "epilogue_kwargs": last}
    tensors: dict[str, Tensor] = {}
    for ours, part in (("generator", "G"), ("generator_ema", "G_ema"), ("discriminator", "D")):
        if ours in gan.state:
            table = _generator_table(side, g["mapping_layers"], conditional)
            filters = _generator_filters(side)
            if part == "D":
                table = _discriminator_table(side, layers, conditional, residual)
                filters = _discriminator_filters(side, residual)
            named = by_their_names(gan.state[ours], table, filters)
            tensors |= {f"{part}.{name}": x for name, x in named.items()}
    return tensors, arguments


def _taken(source: Source, table: Table, absent: tuple[str, ...] = ()) -> dict[str, Tensor]:
    taken = {}
    for ours, place in table.items():
        if place.name.endswith(absent or ("\0",)):  # a network without noise: the same as noise of strength 0
            side = int(re.findall(r"\.b(\d+)\.", place.name)[0])
            taken[ours] = torch.zeros(()) if ours.endswith("strength") else torch.zeros(1, 1, side, side)
        else:
            taken[ours] = place.from_theirs(source.take(place.name))
    source.done()
    return taken


# --- what they were built with

SHAPE = {"resolution": "img_resolution", "channels": "img_channels", "classes": "c_dim"}  # ours -> theirs


def _generator_arguments(given: Arguments) -> tuple[dict[str, Any], dict[str, int], bool]:
    """Our configuration, the shape, and whether there is noise."""
    shape, mapping = _shape(given), given.inner("mapping_kwargs")
    for name, value in given.inner("synthesis_kwargs").given.items():  # stylegan3's program has them at the top level
        given.given.setdefault(name, value)
    config: dict[str, Any] = {"z_dim": given.number("z_dim", 512), "w_dim": given.number("w_dim", 512)}
    config |= {"mapping_layers": mapping.number("num_layers", 8)}
    config |= {"mapping_lr_multiplier": mapping.take("lr_multiplier", 0.01), **_sizes(given)}
    beta = mapping.take("w_avg_beta", 0.995)
    config["w_avg_beta"] = 0.995 if beta in (None, 1) else beta
    _mapping_as_ours(mapping, config["w_dim"])
    mapping.done()
    given.only("architecture", "skip")
    given.only("resample_filter", FILTER)
    given.only("activation", "lrelu")
    noise = bool(given.take("use_noise", True))
    given.ignore("fp16_channels_last", "fused_modconv_default")  # how fast, not what
    given.done()
    return config, shape, noise


def _discriminator_arguments(given: Arguments) -> tuple[dict[str, Any], dict[str, int], float, list[str]]:
    """Our configuration, the shape, the label mapping's multiplier of the learning rate, and notes."""
    shape, notes = _shape(given), []
    forms = {"resnet": "residual", "orig": "plain"}
    form = given.take("architecture", "resnet")
    if form not in forms:
        raise Refused(f"the discriminator is of architecture {str(form)[:30]!r}; Duet has {', '.join(forms)}")
    config = {"architecture": forms[form], **_sizes(given)}
    width = min(config["channel_base"] // 4, config["channel_max"])
    given.only("cmap_dim", None, width)
    block, mapping, last = (given.inner(f"{name}_kwargs") for name in ("block", "mapping", "epilogue"))
    block.only("activation", "lrelu")
    block.only("resample_filter", FILTER)
    block.ignore("freeze_layers", "fp16_channels_last")
    multiplier, layers = mapping.take("lr_multiplier", 0.01), mapping.number("num_layers", 8)
    _mapping_as_ours(mapping, width)
    mapping.ignore("w_avg_beta")
    group, channels = last.take("mbstd_group_size", 4), last.take("mbstd_num_channels", 1)
    last.only("activation", "lrelu")
    if channels not in (0, 1):
        raise Refused(f"the discriminator has {channels!r} maps of minibatch standard deviation; Duet has 0 or 1")
    if group is None and channels:
        notes.append("D's minibatch standard deviation was over whole batches; here it is over groups of 4")
    config |= {"minibatch_std_group": number(group or 4, "mbstd_group_size") if channels else 1}
    config |= {"minibatch_std_order": "strided", "mapping_layers": layers if shape["classes"] else 0}
    for part in (block, mapping, last, given):
        part.done()
    return config, shape, multiplier, notes


def _shape(given: Arguments) -> dict[str, int]:
    side = given.take("img_resolution")
    sizes(side)
    return {"resolution": side, "channels": given.number("img_channels", 3), "classes": given.number("c_dim", 0)}


def _sizes(given: Arguments) -> dict[str, Any]:
    limit = given.take("conv_clamp")
    return {
        "channel_base": given.number("channel_base", 32768),
        "channel_max": given.number("channel_max", 512),
        "fp16_resolutions": given.number("num_fp16_res", 0),
        "conv_clamp": limit if limit is None else float(limit),
        "clamp_always": limit is not None,  # theirs clamps in fp32 as well
    }


def _sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Theirs clamps in fp32, too: a clamp of ours that acts in fp16 alone is left out, and fp16 with it."""
    everywhere = config["clamp_always"] or config["conv_clamp"] is None
    sizes = {"channel_base": config["channel_base"], "channel_max": config["channel_max"]}
    sizes["num_fp16_res"] = config["fp16_resolutions"] if everywhere else 0
    return sizes | {"conv_clamp": config["conv_clamp"] if everywhere else None}


def _mapping_as_ours(mapping: Arguments, width: int) -> None:
    mapping.only("activation", "lrelu")
    mapping.only("embed_features", None, width)
    mapping.only("layer_features", None, width)


# --- names


def _generator_table(resolution: int, layers: int, conditional: bool) -> Table:
    table = {"w_avg": Place("mapping.w_avg"), "constant": Place("synthesis.b4.const", -1)}
    for part in ("weight", "bias"):
        if conditional:
            table[f"mapping.embed.{part}"] = Place(f"mapping.embed.{part}")
        for k in range(layers):
            table[f"mapping.layers.{k}.{part}"] = Place(f"mapping.fc{k}.{part}")
    for i, r in enumerate(sizes(resolution)):
        pairs = {f"blocks.{i}.second": "conv1"} | ({f"blocks.{i}.first": "conv0"} if r > 4 else {})
        for ours, theirs in pairs.items():
            theirs = f"synthesis.b{r}.{theirs}"
            table |= {f"{ours}.{part}": Place(f"{theirs}.{part}") for part in ("bias", "noise_strength")}
            table[f"{ours}.noise_const"] = Place(f"{theirs}.noise_const", -2)
        table[f"blocks.{i}.to_rgb.bias"] = Place(f"synthesis.b{r}.torgb.bias")
        for ours, theirs in (pairs | {f"blocks.{i}.to_rgb": "torgb"}).items():
            for part in ("weight", "affine.weight", "affine.bias"):
                table[f"{ours}.conv.{part}"] = Place(f"synthesis.b{r}.{theirs}.{part}")
    return table


def _discriminator_table(resolution: int, layers: int, conditional: bool, residual: bool) -> Table:
    pairs = {"from_rgb": f"b{resolution}.fromrgb"}
    for j, r in enumerate(sizes(resolution)[:0:-1]):
        pairs |= {f"blocks.{j}.first": f"b{r}.conv0", f"blocks.{j}.second": f"b{r}.conv1"}
    pairs |= {"last_conv": "b4.conv", "last_linear": "b4.fc", "output": "b4.out"}
    if conditional:
        pairs |= {"embed": "mapping.embed"} | {f"label_mapping.{k}": f"mapping.fc{k}" for k in range(layers)}
    table = {f"{a}.{part}": Place(f"{b}.{part}") for a, b in pairs.items() for part in ("weight", "bias")}
    if residual:
        blocks = enumerate(sizes(resolution)[:0:-1])
        table |= {f"blocks.{j}.skip.weight": Place(f"b{r}.skip.weight") for j, r in blocks}
    return table


def _generator_filters(resolution: int) -> list[str]:
    """Where their generator keeps the resampling filter: in each block and each of its 3x3 convolutions."""
    parts = [(r, part) for r in sizes(resolution) for part in ("", ".conv0", ".conv1") if r > 4 or part != ".conv0"]
    return [f"synthesis.b{r}{part}.resample_filter" for r, part in parts]


def _discriminator_filters(resolution: int, residual: bool) -> list[str]:
    """Where their discriminator keeps it: in each block and each convolution."""
    parts = ["", ".conv0", ".conv1", *([".skip"] if residual else [])]
    places = [f"b{r}{part}" for r in sizes(resolution)[1:] for part in parts]
    return [f"{place}.resample_filter" for place in (f"b{resolution}.fromrgb", *places, "b4.conv")]
