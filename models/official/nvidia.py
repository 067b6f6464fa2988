"""StyleGAN2 networks of NVIDIA's PyTorch programs: stylegan2-ada-pytorch, and stylegan3's own StyleGAN2."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.official.names import Converted, Source, number, sizes
from models.official.unpickle import Inert, Refused, module_state

FILTER = [1, 3, 3, 1]
Table = dict[str, tuple[str, int]]  # our name -> theirs, and the dimensions of size 1 to put before it


class Arguments:
    """Keyword arguments that a network was built with. Each must be asked for: one that is not known is refused."""

    def __init__(self, given: Any, what: str) -> None:
        if not isinstance(given, dict):
            raise Refused(f"{what} are no dictionary")
        self.given, self.what = dict(given), what

    def take(self, name: str, default: Any = None) -> Any:
        """The argument, or its default."""
        return self.given.pop(name, default)

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
    for name in ("G", "D", "G_ema"):
        if not isinstance(content.get(name), Inert):
            raise Refused(f"it holds no network {name!r}")
    states, kept = {}, {}
    for name in ("G", "G_ema", "D"):
        network = content[name]
        wanted = "Discriminator" if name == "D" else "Generator"
        if network.name != wanted or "_init_kwargs" not in network.state:
            raise Refused(f"{name} is a {network.name!r}, none of StyleGAN2's networks")
        kept[name] = network.state["_init_kwargs"]
        states[name] = module_state(network)
    return converted(kept["G_ema"], kept["D"], states)


def converted(generator: Any, discriminator: Any, states: Mapping[str, Mapping[str, Tensor]]) -> Converted:
    """Networks `G`, `G_ema`, `D` in NVIDIA's names, built with these keyword arguments, in ours."""
    g, shape, noise = _generator_arguments(Arguments(generator, "the generator's arguments"))
    d, there, multiplier, notes = _discriminator_arguments(Arguments(discriminator, "the discriminator's arguments"))
    if shape != there:
        raise Refused(f"the generator draws {shape}, the discriminator looks at {there}")
    side, conditional = shape["resolution"], shape["classes"] > 0
    state = {}
    for ours, theirs in (("generator", "G"), ("generator_ema", "G_ema")):
        source = Source(states[theirs], theirs)
        source.drop_filters("resample_filter")
        table = _generator_table(side, g["mapping_layers"], conditional)
        state[ours] = _taken(source, table, () if noise else ("noise_strength", "noise_const"))
    source = Source(states["D"], "D")
    source.drop_filters("resample_filter")
    table = _discriminator_table(side, d["mapping_layers"], conditional, d["architecture"] == "residual")
    state["discriminator"] = _taken(source, table)
    for name, value in state["discriminator"].items():
        if name.startswith("label_mapping."):
            value.mul_(multiplier / 0.01)
    return Converted("stylegan2", shape, g, d, state, notes)


def _taken(source: Source, table: Table, absent: tuple[str, ...] = ()) -> dict[str, Tensor]:
    taken = {}
    for ours, (theirs, leading) in table.items():
        if theirs.endswith(absent or ("\0",)):  # a network without noise: the same as noise of strength 0
            side = int(re.findall(r"\.b(\d+)\.", theirs)[0])
            taken[ours] = torch.zeros(()) if ours.endswith("strength") else torch.zeros(1, 1, side, side)
        else:
            taken[ours] = source.take(theirs)[(None,) * leading]
    source.done()
    return taken


# --- what they were built with


def _generator_arguments(given: Arguments) -> tuple[dict[str, Any], dict[str, int], bool]:
    """Our configuration, the shape, and whether there is noise."""
    shape, w_dim = _shape(given), number(given.take("w_dim", 512), "w_dim")
    found: dict[str, Any] = {"z_dim": number(given.take("z_dim", 512), "z_dim"), "w_dim": w_dim}
    mapping = given.inner("mapping_kwargs")
    found |= {"mapping_layers": number(mapping.take("num_layers", 8), "num_layers")}
    found |= {"mapping_lr_multiplier": mapping.take("lr_multiplier", 0.01)}
    beta = mapping.take("w_avg_beta", 0.995)
    found |= {"w_avg_beta": 0.995 if beta in (None, 1) else beta}
    _mapping_as_ours(mapping, w_dim)
    inner = given.inner("synthesis_kwargs")
    for name, value in inner.given.items():  # stylegan3's program has them at the top level
        given.given.setdefault(name, value)
    found |= _sizes(given)
    given.only("architecture", "skip")
    given.only("resample_filter", FILTER)
    given.only("activation", "lrelu")
    noise = bool(given.take("use_noise", True))
    for name in ("fp16_channels_last", "fused_modconv_default"):  # how fast, not what
        given.take(name)
    given.done()
    return found, shape, noise


def _discriminator_arguments(given: Arguments) -> tuple[dict[str, Any], dict[str, int], float, list[str]]:
    """Our configuration, the shape, the label mapping's multiplier of the learning rate, and notes."""
    shape, notes = _shape(given), []
    forms = {"resnet": "residual", "orig": "plain"}
    form = given.take("architecture", "resnet")
    if form not in forms:
        raise Refused(f"the discriminator is of architecture {str(form)[:30]!r}; Duet has {', '.join(forms)}")
    found = {"architecture": forms[form], **_sizes(given)}
    last = min(found["channel_base"] // 4, found["channel_max"])
    given.only("cmap_dim", None, last)
    block, mapping, last_block = (given.inner(f"{name}_kwargs") for name in ("block", "mapping", "epilogue"))
    block.only("activation", "lrelu")
    block.only("resample_filter", FILTER)
    for name in ("freeze_layers", "fp16_channels_last"):
        block.take(name)
    multiplier = mapping.take("lr_multiplier", 0.01)
    layers = number(mapping.take("num_layers", 8), "num_layers")
    _mapping_as_ours(mapping, last)
    mapping.take("w_avg_beta")
    group = last_block.take("mbstd_group_size", 4)
    channels = last_block.take("mbstd_num_channels", 1)
    last_block.only("activation", "lrelu")
    if channels not in (0, 1):
        raise Refused(f"the discriminator has {channels!r} maps of minibatch standard deviation; Duet has 0 or 1")
    if group is None and channels:
        notes.append("D's minibatch standard deviation was over whole batches; here it is over groups of 4")
    found |= {"minibatch_std_group": number(group or 4, "mbstd_group_size") if channels else 1}
    found |= {"minibatch_std_order": "strided", "mapping_layers": layers if shape["classes"] else 0}
    for part in (block, mapping, last_block, given):
        part.done()
    return found, shape, multiplier, notes


def _shape(given: Arguments) -> dict[str, int]:
    side = given.take("img_resolution")
    sizes(side)
    channels, classes = given.take("img_channels", 3), given.take("c_dim", 0)
    return {"resolution": side, "channels": number(channels, "img_channels"), "classes": number(classes, "c_dim")}


def _sizes(given: Arguments) -> dict[str, Any]:
    limit = given.take("conv_clamp")
    return {
        "channel_base": number(given.take("channel_base", 32768), "channel_base"),
        "channel_max": number(given.take("channel_max", 512), "channel_max"),
        "fp16_resolutions": number(given.take("num_fp16_res", 0), "num_fp16_res"),
        "conv_clamp": limit if limit is None else float(limit),
        "clamp_always": limit is not None,  # theirs clamps in fp32 as well
    }


def _mapping_as_ours(mapping: Arguments, width: int) -> None:
    mapping.only("activation", "lrelu")
    mapping.only("embed_features", None, width)
    mapping.only("layer_features", None, width)
    if mapping.what.startswith("the generator"):
        mapping.done()


# --- names


def _generator_table(resolution: int, layers: int, conditional: bool) -> Table:
    table = {"w_avg": ("mapping.w_avg", 0), "constant": ("synthesis.b4.const", 1)}
    for part in ("weight", "bias"):
        if conditional:
            table[f"mapping.embed.{part}"] = (f"mapping.embed.{part}", 0)
        for k in range(layers):
            table[f"mapping.layers.{k}.{part}"] = (f"mapping.fc{k}.{part}", 0)
    for i, r in enumerate(sizes(resolution)):
        pairs = {f"blocks.{i}.second": "conv1"} | ({f"blocks.{i}.first": "conv0"} if r > 4 else {})
        for ours, theirs in pairs.items():
            theirs = f"synthesis.b{r}.{theirs}"
            table |= {f"{ours}.bias": (f"{theirs}.bias", 0), f"{ours}.noise_strength": (f"{theirs}.noise_strength", 0)}
            table[f"{ours}.noise_const"] = (f"{theirs}.noise_const", 2)
        table[f"blocks.{i}.to_rgb.bias"] = (f"synthesis.b{r}.torgb.bias", 0)
        for ours, theirs in (pairs | {f"blocks.{i}.to_rgb": "torgb"}).items():
            for part in ("weight", "affine.weight", "affine.bias"):
                table[f"{ours}.conv.{part}"] = (f"synthesis.b{r}.{theirs}.{part}", 0)
    return table


def _discriminator_table(resolution: int, layers: int, conditional: bool, residual: bool) -> Table:
    pairs = {"from_rgb": f"b{resolution}.fromrgb"}
    for j, r in enumerate(sizes(resolution)[:0:-1]):
        pairs |= {f"blocks.{j}.first": f"b{r}.conv0", f"blocks.{j}.second": f"b{r}.conv1"}
    pairs |= {"last_conv": "b4.conv", "last_linear": "b4.fc", "output": "b4.out"}
    if conditional:
        pairs |= {"embed": "mapping.embed"} | {f"label_mapping.{k}": f"mapping.fc{k}" for k in range(layers)}
    table = {f"{a}.{part}": (f"{b}.{part}", 0) for a, b in pairs.items() for part in ("weight", "bias")}
    if residual:
        blocks = enumerate(sizes(resolution)[:0:-1])
        table |= {f"blocks.{j}.skip.weight": (f"b{r}.skip.weight", 0) for j, r in blocks}
    return table
