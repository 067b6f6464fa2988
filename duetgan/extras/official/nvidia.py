"""Convert networks of NVIDIA's PyTorch programs stylegan2-ada-pytorch and stylegan3."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from duetgan.extras.official.names import (
    NETWORKS,
    Converted,
    Place,
    Places,
    Source,
    number,
    official_state,
    renamed,
    sizes,
)
from duetgan.extras.official.unpickle import Inert, Refused, module_state
from duetgan.models.restore import read_tensors
from duetgan.utils import extras, files
from duetgan.utils.config.yaml_files import Tree

FILTER = [1, 3, 3, 1]
ENTRY = "nvidia"  # metadata key of .safetensors files: JSON of the keyword arguments
GENERATOR = {  # our names, with blocks called by their size (`b8` for 8 px) -> NVIDIA's names
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
    """The keyword arguments that a network was built with.

    Reading an argument removes it. `done` refuses arguments that were not read.
    """

    def __init__(self, values: object, title: str) -> None:
        if not isinstance(values, dict):
            raise Refused(f"{title} are no dictionary")
        self.values = dict(values)
        self.title = title  # name of the arguments in messages

    def take(self, name: str, default: Any = None) -> Any:
        """Remove the argument `name` and return its value, or `default` if it is missing."""
        return self.values.pop(name, default)

    def number(self, name: str, default: int) -> int:
        """Remove the argument `name` and return its value, a whole number from 0 to 2^20.

        Raises Refused for another value.
        """
        return number(self.take(name, default), name)

    def inner(self, name: str) -> "Arguments":
        """Remove the argument `name`, a dictionary, and return its entries as Arguments."""
        return Arguments(self.take(name, {}) or {}, f"{self.title}.{name}")

    def require(self, **allowed: Sequence[object]) -> None:
        """Remove arguments, and raise Refused if one does not have an allowed value.

        `allowed` maps the name of an argument to its allowed values. A missing argument has the
        first one.
        """
        for name, values in allowed.items():
            value = self.take(name, values[0])
            if value not in values:
                raise Refused(
                    f"{self.title}.{name} is {str(value)[:60]!r}; Duet's networks have "
                    f"{values[0]!r}"
                )

    def done(self, *ignored: str) -> None:
        """Raise Refused if arguments remain that are not in `ignored`."""
        left = [str(name) for name in self.values if name not in ignored]
        if left:
            raise Refused(f"{self.title} has {', '.join(left)}, which Duet does not know")


@dataclass(frozen=True)
class GeneratorForm:
    """The description of a generator in NVIDIA's files, and of its counterpart in Duet."""

    architecture: str  # key of ARCHITECTURES
    config: Tree
    shape: dict[str, int]  # resolution, channels, classes
    place: Places  # our names of tensors -> NVIDIA's
    drop_filters: Callable[[Source], None]  # checks and removes the filters
    absent: tuple[str, ...] = ()  # suffixes of our names of tensors that the file lacks


# Kinds of generators besides StyleGAN2: the name of a tensor that only this kind has -> a function
# that returns the generator's form from the arguments that it was built with. Extras add entries.
GENERATORS: dict[str, Callable[[Arguments], GeneratorForm]] = {}


def convert(content: Mapping[str, object]) -> Converted:
    """Convert the networks `G`, `D` and `G_ema` in the content of a PyTorch pickle."""
    networks: dict[str, Inert] = {}
    for name in ("G", "D", "G_ema"):
        network = content.get(name)
        if not isinstance(network, Inert):
            raise Refused(f"it holds no network {name!r}")
        networks[name] = network
        class_name = "Discriminator" if name == "D" else "Generator"
        if network.name != class_name or "_init_kwargs" not in network.state:
            raise Refused(f"{name} is a {network.name!r}, none of StyleGAN's networks")
    return converted(
        networks["G_ema"].state["_init_kwargs"],
        networks["D"].state["_init_kwargs"],
        {name: module_state(network) for name, network in networks.items()},
    )


def converted(
    generator: object, discriminator: object, states: Mapping[str, Mapping[str, Tensor]]
) -> Converted:
    """Convert NVIDIA's networks from their arguments and state dicts.

    Args:
        generator: Keyword arguments that the generator was built with.
        discriminator: Keyword arguments of the discriminator; unused if `states` has no `D`.
        states: State dicts of `G_ema` and optionally `G` and `D`.
    """
    kinds = [name for name in GENERATORS if name in states["G_ema"]]
    read = GENERATORS[kinds[0]] if kinds else _stylegan2
    # Only stylegan2-ada-pytorch has `synthesis_kwargs`; stylegan3 has other defaults.
    is_ada = isinstance(generator, dict) and "synthesis_kwargs" in generator
    defaults = {} if is_ada else {"num_fp16_res": 4, "conv_clamp": 256}
    g = read(_arguments(generator, defaults, "the generator's arguments"))
    # If the file has no discriminator, a new one is as wide as the generator.
    d = {name: g.config[name] for name in ("channel_base", "channel_max")}
    gan = Converted(g.architecture, g.shape, g.config, d, {})
    multiplier = 0.01
    if "D" in states:
        arguments = _arguments(discriminator, defaults, "the discriminator's arguments")
        gan.discriminator, d_shape, multiplier, gan.notes = _discriminator_arguments(arguments)
        if g.shape != d_shape:
            raise Refused(f"the generator draws {g.shape}, the discriminator looks at {d_shape}")
    for part, network in NETWORKS.items():
        if network not in states:
            continue
        source = Source(states[network], network)
        if network == "D":
            source.drop_filters("resample_filter")
            gan.take(part, source, partial(_place, network, g.shape["resolution"]))
        else:
            g.drop_filters(source)
            gan.take(part, source, g.place, g.absent)
    for name, value in gan.state.get("discriminator", {}).items():
        if name.startswith("label_mapping."):
            value.mul_(multiplier / 0.01)
    return gan


def from_file(path: Path) -> Converted:
    """Convert the networks in a .safetensors file that `export.py --format nvidia` wrote.

    Raises UserError if the file is missing, too large or damaged, and Refused if it has other
    content.
    """
    states: dict[str, dict[str, Tensor]] = {}
    tensors, metadata = read_tensors(path, "export it again")
    with files.reading(path, "export it again", ValueError, RecursionError):
        arguments = json.loads(metadata.get(ENTRY, "null"))
    if isinstance(arguments, dict):
        for key, value in tensors.items():
            network, _, name = key.partition(".")
            states.setdefault(network, {})[name] = value
    if "G_ema" not in states or not states.keys() <= {"G", "G_ema", "D"}:
        raise Refused(
            "it holds no networks in NVIDIA's names (export.py --format nvidia writes such files)"
        )
    return converted(arguments.get("G"), arguments.get("D"), states)


def to_official(gan: Converted) -> tuple[dict[str, Tensor], Tree]:
    """Return a GAN's networks in the form of stylegan2-ada-pytorch.

    Returns:
        Two dicts. The first one has the tensors of `G`, `G_ema` and `D`, if present, with names
        NETWORK.NAME. The second one has the keyword arguments of `G` and `D`.
    """
    g = gan.generator
    d = gan.discriminator
    image = {official: gan.shape[key] for key, official in SHAPE.items()}
    arguments: Tree = {
        "G": {
            "z_dim": g["z_dim"],
            "w_dim": g["w_dim"],
            **image,
            "mapping_kwargs": {
                "num_layers": g["mapping_layers"],
                "lr_multiplier": g["mapping_lr_multiplier"],
                "w_avg_beta": g["w_avg_beta"],
            },
            "synthesis_kwargs": _official_sizes(g),
        }
    }
    if "discriminator" in gan.state:
        group = d["minibatch_std_group"]
        architectures = {ours: official for official, ours in ARCHITECTURES.items()}
        arguments["D"] = {
            **image,
            "architecture": architectures[d["architecture"]],
            **_official_sizes(d),
            "mapping_kwargs": {"num_layers": d["mapping_layers"], "lr_multiplier": 0.01},
            "epilogue_kwargs": {"mbstd_group_size": group, "mbstd_num_channels": int(group > 1)},
        }
    tensors: dict[str, Tensor] = {}
    for part, network in NETWORKS.items():
        state = gan.state.get(part)
        if not state:
            continue
        place = partial(_place, network, gan.shape["resolution"])
        # Each block except b4, and each convolution except ToRGB's, has a resampling filter.
        matches = [FILTERED.fullmatch(place(name).name) for name in state]
        layers = {match[1] for match in matches if match}
        blocks = {layer.rpartition(".")[0] for layer in layers} - {"b4"}
        filters = [f"{owner}.resample_filter" for owner in sorted(layers | blocks)]
        for name, value in official_state(state, place, filters).items():
            tensors[f"{network}.{name}"] = value
    return tensors, arguments


def _place(network: str, side: int, name: str) -> Place:
    """Return the `Place` of our tensor `name` in NVIDIA's `network`: `G`, `G_ema` or `D`.

    The network is for images of `side` px. NVIDIA's blocks are named by their resolution.
    """
    is_discriminator = network == "D"
    view: tuple[int, ...] = ()
    if name == "constant":
        view = (0,)
    elif name.endswith("noise_const"):
        view = (0, 0)

    def block_name(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"b{side >> number if is_discriminator else 4 << number}"

    name = name.replace("from_rgb", f"b{side}.fromrgb")
    name = re.sub(r"^blocks\.(\d+)", block_name, name)
    return Place(renamed(name, DISCRIMINATOR if is_discriminator else GENERATOR), view)


# --- arguments that the networks were built with

# our name -> NVIDIA's
SHAPE = {"resolution": "img_resolution", "channels": "img_channels", "classes": "c_dim"}
ARCHITECTURES = {"resnet": "residual", "orig": "plain"}  # NVIDIA's name -> ours


def _arguments(values: object, defaults: Tree, title: str) -> Arguments:
    return Arguments({**defaults, **values} if isinstance(values, dict) else values, title)


def mapping_arguments(arguments: Arguments, *, layers: int, beta: float) -> Tree:
    """Read the arguments of the mapping network, and return our configuration of it.

    `layers` and `beta` are NVIDIA's defaults for the number of layers and for `w_avg_beta`.
    """
    mapping = arguments.inner("mapping_kwargs")
    w_dim = arguments.number("w_dim", 512)
    w_avg_beta = mapping.take("w_avg_beta", beta)
    config = {
        "z_dim": arguments.number("z_dim", 512),
        "w_dim": w_dim,
        "mapping_layers": mapping.number("num_layers", layers),
        "mapping_lr_multiplier": mapping.take("lr_multiplier", 0.01),
        "w_avg_beta": beta if w_avg_beta in (None, 1) else w_avg_beta,
    }
    widths = [None, w_dim]
    mapping.require(activation=["lrelu"], embed_features=widths, layer_features=widths)
    mapping.done()
    return config


def _stylegan2(arguments: Arguments) -> GeneratorForm:
    shape = image_shape(arguments)
    # stylegan3's program has the synthesis arguments at the top level
    for name, value in arguments.inner("synthesis_kwargs").values.items():
        arguments.values.setdefault(name, value)
    config = mapping_arguments(arguments, layers=8, beta=0.995) | size_arguments(arguments)
    arguments.require(architecture=["skip"], resample_filter=[FILTER], activation=["lrelu"])
    has_noise = bool(arguments.take("use_noise", True))
    arguments.done("fp16_channels_last", "fused_modconv_default")  # these only affect speed
    return GeneratorForm(
        architecture="stylegan2",
        config=config,
        shape=shape,
        place=partial(_place, "G", shape["resolution"]),
        drop_filters=lambda source: source.drop_filters("resample_filter"),
        # A generator without noise equals one with noise of strength 0.
        absent=() if has_noise else ("noise_strength", "noise_const"),
    )


def _discriminator_arguments(
    arguments: Arguments,
) -> tuple[Tree, dict[str, int], float, list[str]]:
    """Read the arguments of a discriminator.

    Returns our configuration, the shape of the images, the factor of the learning rate in the label
    mapping, and notes for the user.
    """
    shape = image_shape(arguments)
    notes: list[str] = []
    architecture = arguments.take("architecture", "resnet")
    if architecture not in ARCHITECTURES:
        raise Refused(
            f"the discriminator is of architecture {str(architecture)[:30]!r}; Duet has "
            f"{', '.join(ARCHITECTURES)}"
        )
    config = {"architecture": ARCHITECTURES[architecture], **size_arguments(arguments)}
    widths = [None, min(config["channel_base"] // 4, config["channel_max"])]
    arguments.require(cmap_dim=widths)
    block = arguments.inner("block_kwargs")
    mapping = arguments.inner("mapping_kwargs")
    last = arguments.inner("epilogue_kwargs")
    block.require(activation=["lrelu"], resample_filter=[FILTER])
    block.done("freeze_layers", "fp16_channels_last")
    multiplier = mapping.take("lr_multiplier", 0.01)
    layers = mapping.number("num_layers", 8)
    mapping.require(activation=["lrelu"], embed_features=widths, layer_features=widths)
    mapping.done("w_avg_beta")
    group = last.take("mbstd_group_size", 4)
    channels = last.take("mbstd_num_channels", 1)
    last.require(activation=["lrelu"])
    last.done()
    arguments.done()
    if channels not in (0, 1):
        raise Refused(
            f"the discriminator has {channels!r} maps of minibatch standard deviation; Duet has 0 "
            "or 1"
        )
    if group is None and channels:
        notes.append(
            "D's minibatch standard deviation was over whole batches; here it is over groups of 4"
        )
    config["minibatch_std_group"] = number(group or 4, "mbstd_group_size") if channels else 1
    config["minibatch_std_order"] = "strided"
    config["mapping_layers"] = layers if shape["classes"] else 0
    return config, shape, multiplier, notes


def image_shape(arguments: Arguments) -> dict[str, int]:
    """Read the arguments for the shape of the images.

    Returns a dict with resolution, channels and classes.
    """
    side = arguments.take("img_resolution")
    sizes(side)
    return {
        "resolution": side,
        "channels": arguments.number("img_channels", 3),
        "classes": arguments.number("c_dim", 0),
    }


def size_arguments(arguments: Arguments) -> Tree:
    """Read the arguments for width and precision, and return our configuration of them."""
    limit = arguments.take("conv_clamp")
    return {
        "channel_base": arguments.number("channel_base", 32768),
        "channel_max": arguments.number("channel_max", 512),
        "fp16_resolutions": arguments.number("num_fp16_res", 0),
        "conv_clamp": limit if limit is None else float(limit),
        "clamp_always": limit is not None,  # NVIDIA's networks clamp in fp32 as well
    }


def _official_sizes(config: Tree) -> Tree:
    """Return NVIDIA's arguments for the width and precision that our configuration has.

    NVIDIA's networks clamp in fp32, too. If ours clamp only in fp16, the result has neither the
    clamp nor fp16.
    """
    is_exact = config["clamp_always"] or config["conv_clamp"] is None
    return {
        "channel_base": config["channel_base"],
        "channel_max": config["channel_max"],
        "num_fp16_res": config["fp16_resolutions"] if is_exact else 0,
        "conv_clamp": config["conv_clamp"] if is_exact else None,
    }


extras.attach(__name__)
