"""Networks of NVIDIA's PyTorch programs stylegan2-ada-pytorch and stylegan3."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from duetgan.extras.official.names import (
    NETWORKS,
    Converted,
    Places,
    Source,
    number,
    renamed,
    sizes,
)
from duetgan.extras.official.unpickle import Inert, Refused, module_state
from duetgan.utils import extras
from duetgan.utils.config.yaml_files import Tree

FILTER = [1, 3, 3, 1]
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


class Arguments:
    """Keyword arguments that a network was built with, each of which is removed when it is read.

    `done` refuses arguments that nothing has read.
    """

    def __init__(self, values: object, title: str) -> None:
        if not isinstance(values, dict):
            raise Refused(f"{title} are no dictionary")
        self.values = dict(values)
        self.title = title  # name of the arguments in messages

    def take(self, name: str, default: Any = None) -> Any:
        """Remove and return the argument `name`."""
        return self.values.pop(name, default)

    def number(self, name: str, default: int) -> int:
        """Remove and return the argument `name`, which must be a whole number from 0 up."""
        return number(self.take(name, default), name)

    def inner(self, name: str) -> "Arguments":
        """Remove the argument `name`, a dictionary, and return its entries."""
        return Arguments(self.take(name, {}) or {}, f"{self.title}.{name}")

    def require(self, **allowed: Sequence[object]) -> None:
        """Remove arguments and raise Refused unless each has one of its allowed values.

        `allowed` maps an argument to these values; the first one is the default.
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
    """A kind of generator in NVIDIA's files, and its counterpart here."""

    architecture: str  # key of ARCHITECTURES
    config: Tree
    shape: dict[str, int]  # resolution, channels, classes
    place: Places  # our names of tensors -> NVIDIA's
    drop_filters: Callable[[Source], None]  # checks and removes the filters
    absent: tuple[str, ...] = ()  # suffixes of our names of tensors that the file lacks


# name of a tensor that only this kind of generator has -> function of the arguments that it was
# built with; extras add entries
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
    generator = networks["G_ema"].state["_init_kwargs"]
    states = {name: module_state(network) for name, network in networks.items()}
    kinds = [name for name in GENERATORS if name in states["G_ema"]]
    read = GENERATORS[kinds[0]] if kinds else _stylegan2
    # Only stylegan2-ada-pytorch has `synthesis_kwargs`; stylegan3 has other defaults.
    is_ada = isinstance(generator, dict) and "synthesis_kwargs" in generator
    defaults = {} if is_ada else {"num_fp16_res": 4, "conv_clamp": 256}
    g = read(_arguments(generator, defaults, "the generator's arguments"))
    arguments = networks["D"].state["_init_kwargs"]
    d, d_shape, multiplier, notes = _discriminator_arguments(
        _arguments(arguments, defaults, "the discriminator's arguments")
    )
    if g.shape != d_shape:
        raise Refused(f"the generator draws {g.shape}, the discriminator looks at {d_shape}")
    gan = Converted(g.architecture, g.shape, g.config, d, {}, notes)
    for part, network in NETWORKS.items():
        source = Source(states[network], network)
        if network == "D":
            source.drop_filters("resample_filter")
            gan.take(part, source, partial(_place, network, g.shape["resolution"]))
        else:
            g.drop_filters(source)
            gan.take(part, source, g.place, g.absent)
    for name, value in gan.state["discriminator"].items():
        if name.startswith("label_mapping."):
            value.mul_(multiplier / 0.01)
    return gan


def _place(network: str, side: int, name: str) -> str:
    """Return the name of our tensor `name` in `G`, `G_ema` or `D` of `side` px.

    NVIDIA's blocks are named by their resolution.
    """
    is_discriminator = network == "D"

    def block_name(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"b{side >> number if is_discriminator else 4 << number}"

    name = name.replace("from_rgb", f"b{side}.fromrgb")
    name = re.sub(r"^blocks\.(\d+)", block_name, name)
    return renamed(name, DISCRIMINATOR if is_discriminator else GENERATOR)


# --- arguments that the networks were built with

ARCHITECTURES = {"resnet": "residual", "orig": "plain"}  # NVIDIA's name -> ours


def _arguments(values: object, defaults: Tree, title: str) -> Arguments:
    return Arguments({**defaults, **values} if isinstance(values, dict) else values, title)


def mapping_arguments(arguments: Arguments, *, layers: int, beta: float) -> Tree:
    """Return our configuration of the mapping network; `layers` and `beta` are NVIDIA's defaults."""
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
    """Return our configuration, the shape, the label mapping's learning-rate factor, and notes."""
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
    """Return the shape of the images, with our names."""
    side = arguments.take("img_resolution")
    sizes(side)
    return {
        "resolution": side,
        "channels": arguments.number("img_channels", 3),
        "classes": arguments.number("c_dim", 0),
    }


def size_arguments(arguments: Arguments) -> Tree:
    """Return our configuration of a network's width and precision."""
    limit = arguments.take("conv_clamp")
    return {
        "channel_base": arguments.number("channel_base", 32768),
        "channel_max": arguments.number("channel_max", 512),
        "fp16_resolutions": arguments.number("num_fp16_res", 0),
        "conv_clamp": limit if limit is None else float(limit),
        "clamp_always": limit is not None,  # NVIDIA's networks clamp in fp32 as well
    }


extras.attach(__name__)
