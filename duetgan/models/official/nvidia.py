"""StyleGAN2 networks of NVIDIA's PyTorch programs: stylegan2-ada-pytorch, and stylegan3's own
StyleGAN2.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from duetgan.models.official.names import (
    NETWORKS,
    Converted,
    Place,
    Source,
    by_their_names,
    number,
    renamed,
    sizes,
)
from duetgan.models.official.unpickle import Inert, Refused, module_state
from duetgan.models.weights import read_tensors
from duetgan.utils import bounded

FILTER = [1, 3, 3, 1]
ENTRY = "nvidia"  # of a .safetensors file's metadata: JSON of the keyword arguments
GENERATOR = {  # ours, of the block of 8 px `b8` -> theirs
    "w_avg": "mapping.w_avg",
    "constant": "synthesis.b4.const",
    r"mapping\.layers\.(.+)": r"mapping.fc\1",
    r"(b\d+)\.first\.(?:conv\.)?(.+)": r"synthesis.\1.conv0.\2",
    r"(b\d+)\.second\.(?:conv\.)?(.+)": r"synthesis.\1.conv1.\2",
    r"(b\d+)\.to_rgb\.(?:conv\.)?(.+)": r"synthesis.\1.torgb.\2",
}
DISCRIMINATOR = {
    r"(b\d+)\.first\.(.+)": r"\1.conv0.\2",
    r"(b\d+)\.second\.(.+)": r"\1.conv1.\2",
    r"last_conv\.(.+)": r"b4.conv.\1",
    r"last_linear\.(.+)": r"b4.fc.\1",
    r"output\.(.+)": r"b4.out.\1",
    r"embed\.(.+)": r"mapping.embed.\1",
    r"label_mapping\.(.+)": r"mapping.fc\1",
}
FILTERED = re.compile(r"(.*b\d+\.(?:conv\d?|skip|fromrgb))\.weight")


class Arguments:
    """Keyword arguments that a network was built with. Each must be asked for: one that is not
    known is refused.
    """

    def __init__(self, given: Any, what: str) -> None:
        if not isinstance(given, dict):
            raise Refused(f"{what} are no dictionary")
        self.given, self.what = dict(given), what

    def take(self, name: str, default: Any = None) -> Any:
        return self.given.pop(name, default)

    def number(self, name: str, default: int) -> int:
        """The argument, which must be a whole number from 0 up."""
        return number(self.take(name, default), name)

    def inner(self, name: str) -> "Arguments":
        return Arguments(self.given.pop(name, {}) or {}, f"{self.what}.{name}")

    def only(self, **allowed: Any) -> None:
        """Each argument must be one of its values, the first of which is its default."""
        for name, values in allowed.items():
            value = self.take(name, values[0])
            if value not in values:
                raise Refused(
                    f"{self.what}.{name} is {str(value)[:60]!r}; Duet's networks have {values[0]!r}"
                )

    def done(self, *ignored: str) -> None:
        """Refused where arguments are left over that change something."""
        if left := [str(name) for name in self.given if name not in ignored]:
            raise Refused(f"{self.what} has {', '.join(left)}, which Duet does not know")


def convert(content: Mapping[str, Any]) -> Converted:
    """The networks of a PyTorch file: `G`, `D`, `G_ema`."""
    networks: dict[str, Any] = {name: content.get(name) for name in ("G", "D", "G_ema")}
    for name, network in networks.items():
        if not isinstance(network, Inert):
            raise Refused(f"it holds no network {name!r}")
        if (
            network.name != ("Discriminator" if name == "D" else "Generator")
            or "_init_kwargs" not in network.state
        ):
            raise Refused(f"{name} is a {network.name!r}, none of StyleGAN2's networks")
    states = {name: module_state(network) for name, network in networks.items()}
    g, d = (networks[name].state["_init_kwargs"] for name in ("G_ema", "D"))
    return converted(g, d, states)


def converted(
    generator: Any, discriminator: Any, states: Mapping[str, Mapping[str, Tensor]]
) -> Converted:
    """NVIDIA's `G_ema`, and where they are there `G` and `D`, built with these keyword arguments,
    in our names.
    """
    g, shape, noise = _generator_arguments(Arguments(generator, "the generator's arguments"))
    # a new one is as wide as the generator
    d = {name: g[name] for name in ("channel_base", "channel_max")}
    gan, multiplier = Converted("stylegan2", shape, g, d, {}), 0.01
    if "D" in states:
        given = Arguments(discriminator, "the discriminator's arguments")
        gan.discriminator, there, multiplier, gan.notes = _discriminator_arguments(given)
        if shape != there:
            raise Refused(f"the generator draws {shape}, the discriminator looks at {there}")
    for ours, theirs in NETWORKS.items():
        if theirs in states:
            source = Source(states[theirs], theirs)
            source.drop_filters("resample_filter")
            # a network without noise: the same as noise of strength 0
            absent = () if noise or theirs == "D" else ("noise_strength", "noise_const")
            gan.take(ours, source, partial(_place, theirs, shape["resolution"]), absent)
    for name, value in gan.state.get("discriminator", {}).items():
        if name.startswith("label_mapping."):
            value.mul_(multiplier / 0.01)
    return gan


def from_file(path: Path) -> Converted:
    """The networks of a .safetensors file of `theirs`. Raises UserError if it is missing, too large
    or damaged.
    """
    states: dict[str, dict[str, Tensor]] = {}
    tensors, metadata = read_tensors(path, "export it again")
    with bounded.reading(path, "export it again", ValueError, RecursionError):
        about = json.loads(metadata.get(ENTRY, "null"))
    for name, value in tensors.items() if isinstance(about, dict) else ():
        network, _, theirs = name.partition(".")
        states.setdefault(network, {})[theirs] = value
    if "G_ema" not in states or not states.keys() <= {"G", "G_ema", "D"}:
        raise Refused(
            "it holds no networks in NVIDIA's names (export.py --format nvidia writes such files)"
        )
    return converted(about.get("G"), about.get("D"), states)


def theirs(gan: Converted) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """NETWORK.NAME -> tensor of `G`, `G_ema`, `D` (those that are there) as NVIDIA's state dicts
    have them, and the keyword arguments of `G` and `D` in stylegan2-ada-pytorch.
    """
    g, d = gan.generator, gan.discriminator
    image = {theirs: gan.shape[ours] for ours, theirs in SHAPE.items()}
    mapping = {"num_layers": g["mapping_layers"], "lr_multiplier": g["mapping_lr_multiplier"]}
    mapping["w_avg_beta"] = g["w_avg_beta"]
    given = {"z_dim": g["z_dim"], "w_dim": g["w_dim"], **image, "mapping_kwargs": mapping}
    arguments = {"G": given | {"synthesis_kwargs": _sizes_of(g)}}
    if "discriminator" in gan.state:
        group, form = (
            d["minibatch_std_group"],
            {ours: theirs for theirs, ours in FORMS.items()}[d["architecture"]],
        )
        last = {"mbstd_group_size": group, "mbstd_num_channels": int(group > 1)}
        mapping = {"num_layers": d["mapping_layers"], "lr_multiplier": 0.01}
        arguments["D"] = image | {"architecture": form, **_sizes_of(d), "mapping_kwargs": mapping}
        arguments["D"] |= {"epilogue_kwargs": last}
    tensors: dict[str, Tensor] = {}
    for part, network in NETWORKS.items():
        if state := gan.state.get(part):
            place = partial(_place, network, gan.shape["resolution"])
            # in each block, and in each convolution but those of ToRGB
            layers = {match[1] for name in state if (match := FILTERED.fullmatch(place(name).name))}
            blocks = {layer.rpartition(".")[0] for layer in layers} - {"b4"}
            named = by_their_names(
                state, place, [f"{owner}.resample_filter" for owner in sorted(layers | blocks)]
            )
            tensors |= {f"{network}.{name}": x for name, x in named.items()}
    return tensors, arguments


def _place(network: str, side: int, name: str) -> Place:
    """A tensor of `G`, `G_ema` or `D` of `side` px; their blocks go by their resolutions."""
    down = network == "D"
    view = (0,) if name == "constant" else (0, 0) if name.endswith("noise_const") else ()
    name = name.replace("from_rgb", f"b{side}.fromrgb")
    name = re.sub(
        r"^blocks\.(\d+)",
        lambda match: f"b{side >> int(match[1]) if down else 4 << int(match[1])}",
        name,
    )
    return Place(renamed(name, DISCRIMINATOR if down else GENERATOR), view)


# --- what they were built with

# ours -> theirs
SHAPE = {"resolution": "img_resolution", "channels": "img_channels", "classes": "c_dim"}
FORMS = {"resnet": "residual", "orig": "plain"}  # theirs -> ours


def _generator_arguments(given: Arguments) -> tuple[dict[str, Any], dict[str, int], bool]:
    """Our configuration, the shape, and whether there is noise."""
    shape, mapping = _shape(given), given.inner("mapping_kwargs")
    # stylegan3's program has them at the top level
    for name, value in given.inner("synthesis_kwargs").given.items():
        given.given.setdefault(name, value)
    config: dict[str, Any] = {
        "z_dim": given.number("z_dim", 512),
        "w_dim": given.number("w_dim", 512),
    }
    config |= {"mapping_layers": mapping.number("num_layers", 8)}
    config |= {"mapping_lr_multiplier": mapping.take("lr_multiplier", 0.01), **_sizes(given)}
    beta = mapping.take("w_avg_beta", 0.995)
    config["w_avg_beta"] = 0.995 if beta in (None, 1) else beta
    widths = [None, config["w_dim"]]
    mapping.only(activation=["lrelu"], embed_features=widths, layer_features=widths)
    mapping.done()
    given.only(architecture=["skip"], resample_filter=[FILTER], activation=["lrelu"])
    noise = bool(given.take("use_noise", True))
    given.done("fp16_channels_last", "fused_modconv_default")  # how fast, not what
    return config, shape, noise


def _discriminator_arguments(
    given: Arguments,
) -> tuple[dict[str, Any], dict[str, int], float, list[str]]:
    """Our configuration, the shape, the label mapping's multiplier of the learning rate, and notes."""
    shape, notes = _shape(given), []
    form = given.take("architecture", "resnet")
    if form not in FORMS:
        raise Refused(
            f"the discriminator is of architecture {str(form)[:30]!r}; Duet has {', '.join(FORMS)}"
        )
    config = {"architecture": FORMS[form], **_sizes(given)}
    widths = [None, min(config["channel_base"] // 4, config["channel_max"])]
    given.only(cmap_dim=widths)
    block, mapping, last = (
        given.inner(f"{name}_kwargs") for name in ("block", "mapping", "epilogue")
    )
    block.only(activation=["lrelu"], resample_filter=[FILTER])
    block.done("freeze_layers", "fp16_channels_last")
    multiplier, layers = mapping.take("lr_multiplier", 0.01), mapping.number("num_layers", 8)
    mapping.only(activation=["lrelu"], embed_features=widths, layer_features=widths)
    mapping.done("w_avg_beta")
    group, channels = last.take("mbstd_group_size", 4), last.take("mbstd_num_channels", 1)
    last.only(activation=["lrelu"])
    last.done()
    given.done()
    if channels not in (0, 1):
        raise Refused(
            f"the discriminator has {channels!r} maps of minibatch standard deviation; Duet has 0 or 1"
        )
    if group is None and channels:
        notes.append(
            "D's minibatch standard deviation was over whole batches; here it is over groups of 4"
        )
    config |= {"minibatch_std_group": number(group or 4, "mbstd_group_size") if channels else 1}
    config |= {
        "minibatch_std_order": "strided",
        "mapping_layers": layers if shape["classes"] else 0,
    }
    return config, shape, multiplier, notes


def _shape(given: Arguments) -> dict[str, int]:
    side = given.take("img_resolution")
    sizes(side)
    return {
        "resolution": side,
        "channels": given.number("img_channels", 3),
        "classes": given.number("c_dim", 0),
    }


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
    """Theirs clamps in fp32, too: a clamp of ours that acts in fp16 alone is left out, and fp16
    with it.
    """
    everywhere = config["clamp_always"] or config["conv_clamp"] is None
    sizes = {"channel_base": config["channel_base"], "channel_max": config["channel_max"]}
    sizes["num_fp16_res"] = config["fp16_resolutions"] if everywhere else 0
    return sizes | {"conv_clamp": config["conv_clamp"] if everywhere else None}
