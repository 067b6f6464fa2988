"""Convert networks of rosinality's stylegan2-pytorch: `.pt` files, unconditional, RGB."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from duetgan.extras.official.names import Converted, Place, Source, renamed, sizes
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.checkpoint.state_schema import check_tensors
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.seeding import generator as keyed

DRAWS = 4096  # number of latents for the mean w, if a file does not contain it
# entry of our checkpoint's state -> rosinality's key
NETWORKS = {"generator_ema": "g_ema", "generator": "g", "discriminator": "d"}
STYLED = {  # our name -> rosinality's
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
BLOCK = {  # in a block of the discriminator: our name -> rosinality's
    r"first\.weight": "conv1.0.weight",
    r"first\.bias": "conv1.1.bias",
    r"second\.weight": "conv2.1.weight",
    r"second\.bias": "conv2.2.bias",
    r"skip\.weight": "skip.1.weight",
}


def convert(content: Tree) -> Converted:
    """Convert the average generator `g_ema` in `content`, the content of a file.

    Also converts the generator `g` and the discriminator `d` if the file has them.
    """
    for name in NETWORKS.values():
        if name in content or name == "g_ema":
            check_tensors(name, content.get(name))
    average = Source(content["g_ema"], "g_ema")
    side = 4 << sum(
        re.fullmatch(r"to_rgbs\.\d+\.bias", name) is not None for name in average.tensors
    )
    layers = sum(re.fullmatch(r"style\.\d+\.weight", name) is not None for name in average.tensors)
    last = average.shape(f"to_rgbs.{len(sizes(side)) - 2}.conv.weight", 5)[2]
    base: Tree = {
        "channel_base": last * side,
        "channel_max": average.shape("input.input", 4)[1],
        "fp16_resolutions": 0,
        "conv_clamp": None,
    }
    dims = average.shape("style.1.weight", 2)[1]
    g = base | {"z_dim": dims, "w_dim": dims, "mapping_layers": layers}
    d = base | {
        "architecture": "residual",
        "minibatch_std_group": 4,
        "minibatch_std_order": "strided",
    }
    gan = Converted("stylegan2", {"resolution": side, "channels": 3, "classes": 0}, g, d, {})
    mean = content.get("latent_avg")
    if mean is None:
        gan.notes.append(f"the file has no mean w; it was taken over {DRAWS:,} draws")
    for part, network in NETWORKS.items():
        if network not in content:
            continue
        tensors = dict(content[network])
        if network == "d":
            source = Source(tensors, network)
            source.drop_filters(".kernel")
            gan.take(part, source, _discriminator_place)
            continue
        tensors["latent_avg"] = torch.zeros(dims) if mean is None else mean
        source = Source(tensors, network)
        source.drop_filters(".kernel", (1.0, 4.0))
        state = gan.take(part, source, _generator_place)
        if mean is None:
            state["w_avg"] = _mean(state, g, gan.shape)
    return gan


@torch.no_grad()
def _mean(state: Mapping[str, Tensor], config: Tree, shape: Mapping[str, int]) -> Tensor:
    """Return the mean w of DRAWS latents, like rosinality's `mean_latent`."""
    network = Generator(GeneratorConfig(**config), **shape).mapping
    network.load_state_dict(
        {
            name.removeprefix("mapping."): value
            for name, value in state.items()
            if name.startswith("mapping.")
        }
    )
    z = torch.randn(DRAWS, config["z_dim"], generator=keyed(0, "eval", "mean w"))
    return network(z, None).mean(dim=0)


def _generator_place(name: str) -> Place:
    """Return the `Place` of the generator's tensor that we call `name`.

    The files store `latent_avg` outside the network; `convert` adds it to the network's tensors.
    """
    if match := re.fullmatch(r"mapping\.layers\.(\d+)\.(.+)", name):
        return Place(f"style.{int(match[1]) + 1}.{match[2]}")
    if match := re.fullmatch(r"blocks\.(\d+)\.(first|second|to_rgb)\.(.+)", name):
        n = int(match[1])
        layer = match[2]
        part = match[3]
        if part == "noise_const":
            return Place(f"noises.noise_{2 * n - (layer == 'first')}")
        if layer == "to_rgb":
            official = f"to_rgbs.{n - 1}" if n else "to_rgb1"
        elif n:
            official = f"convs.{2 * n - (2 if layer == 'first' else 1)}"
        else:
            official = "conv1"
        if layer == "to_rgb" and part == "bias":
            return Place(f"{official}.bias", (None, slice(None), None, None))
        view = (None,) if part in ("conv.weight", "noise_strength") else ()
        return Place(f"{official}.{renamed(part, STYLED)}", view)
    return Place({"w_avg": "latent_avg", "constant": "input.input"}[name])


def _discriminator_place(name: str) -> Place:
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
        return Place(f"convs.{int(match[1]) + 1}.{renamed(match[2], BLOCK)}")
    return Place(renamed(name, DISCRIMINATOR))
