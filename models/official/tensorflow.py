"""StyleGAN2 networks of NVIDIA's TensorFlow programs (stylegan2, stylegan2-ada).

They are first brought into the names of the PyTorch programs, as stylegan2-ada-pytorch's `legacy.py` does.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.official.names import Converted
from models.official.nvidia import FILTER, Arguments, converted
from models.official.unpickle import Array, Inert, Refused

NAMES = {  # theirs -> NVIDIA's PyTorch program's; the generator's, then the discriminator's
    r"dlatent_avg": r"mapping.w_avg",
    r"mapping/LabelEmbed/(\w+)": r"mapping.embed.\1",
    r"mapping/Dense(\d+)/(\w+)": r"mapping.fc\1.\2",
    r"synthesis/4x4/Const/const": r"synthesis.b4.const",
    r"synthesis/(\d+)x\1/Conv0_up/(\w+)": r"synthesis.b\1.conv0.\2",
    r"synthesis/(\d+)x\1/Conv1?/(\w+)": r"synthesis.b\1.conv1.\2",
    r"synthesis/(\d+)x\1/ToRGB/(\w+)": r"synthesis.b\1.torgb.\2",
    r"(\d+)x\1/FromRGB/(\w+)": r"b\1.fromrgb.\2",
    r"(\d+)x\1/Conv0/(\w+)": r"b\1.conv0.\2",
    r"(\d+)x\1/Conv1_down/(\w+)": r"b\1.conv1.\2",
    r"(\d+)x\1/Skip/(\w+)": r"b\1.skip.\2",
    r"4x4/Conv/(\w+)": r"b4.conv.\1",
    r"4x4/Dense0/(\w+)": r"b4.fc.\1",
    r"Output/(\w+)": r"b4.out.\1",
    r"LabelEmbed/(\w+)": r"mapping.embed.\1",
    r"Mapping(\d+)/(\w+)": r"mapping.fc\1.\2",
}
UNUSED = re.compile(r"(synthesis/)?lod|.*/?ema_.*")  # of progressive growing, which these networks no longer have


def convert(content: Any) -> Converted:
    """The networks of a TensorFlow file, a tuple (G, D, Gs) of `dnnlib.tflib.network.Network`."""
    if not isinstance(content, (tuple, list)) or len(content) != 3:
        raise Refused("it holds no three networks (G, D, Gs)")
    names = ("G", "D", "G_ema")
    states = {name: _tensors(network) for name, network in zip(names, content, strict=True)}
    g, d = (Arguments(content[n].state.get("static_kwargs") or {}, "the network's arguments") for n in (2, 1))
    return converted(_generator(g), _discriminator(d), states)


def _tensors(network: Any) -> dict[str, Tensor]:
    """A network's variables by the names of NVIDIA's PyTorch programs."""
    if not isinstance(network, Inert) or network.name != "Network":
        raise Refused("it holds an object that is no network")
    version = network.state.get("version")
    if type(version) is not int or version < 4:
        raise Refused(f"a network of version {version!r}; those of StyleGAN2 have 4 or more")
    variables = {name: value for name, value in _variables(network, "", 0) if not UNUSED.fullmatch(name)}
    return {
        _named(name): torch.from_numpy(np.array(_turned(name, value), dtype=np.float32, order="C"))
        for name, value in variables.items()
    }


def _variables(network: Any, prefix: str, depth: int) -> Iterator[tuple[str, np.ndarray]]:
    """Those of the network and of the `components` within it."""
    parts: Any = network.state.get("components") or {}
    variables: Any = network.state.get("variables") or []
    if depth > 2 or not isinstance(parts, dict) or not isinstance(variables, (list, tuple)):
        raise Refused("a network that is none of NVIDIA's")
    for entry in variables:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[1], (Array, float, int)):
            raise Refused("a variable that is no array")
        yield f"{prefix}{entry[0]}", entry[1].array if isinstance(entry[1], Array) else np.asarray(entry[1])
    for name, part in parts.items():
        if not isinstance(part, Inert):
            raise Refused("a component that is no network")
        yield from _variables(part, f"{prefix}{name}/", depth + 1)


def _named(name: str) -> str:
    if noise := re.fullmatch(r"synthesis/noise(\d+)", name):  # noise0 is of 4 px, then two for each size
        index = int(noise[1])
        return f"synthesis.b{4 << ((index + 1) // 2)}.conv{1 - index % 2}.noise_const"
    matches = ((re.fullmatch(theirs, name), there) for theirs, there in NAMES.items())
    return next((match.expand(there).replace(".mod_", ".affine.") for match, there in matches if match), name)


def _turned(name: str, x: np.ndarray) -> np.ndarray:
    """A variable in PyTorch's order of dimensions."""
    if name.endswith("Const/const"):
        return x[0]
    if name.startswith("synthesis/noise"):
        return x[0, 0]
    if name.endswith("/mod_bias"):
        return x + 1
    if x.ndim == 4:  # filters; those of a true convolution are turned by half
        return (x[::-1, ::-1] if "/Conv0_up/" in name else x).transpose(3, 2, 0, 1)
    return x.transpose()


# --- what NVIDIA's PyTorch networks would be built with


def _generator(given: Arguments) -> dict[str, Any]:
    mapping = _mapping(given, 8, 0.01)
    synthesis = _common(given) | {"use_noise": given.take("use_noise", True)}
    synthesis |= {"architecture": given.take("architecture", "skip"), "activation": given.take("nonlinearity", "lrelu")}
    synthesis["resample_filter"] = given.take("resample_kernel", FILTER)
    arguments = {"z_dim": given.take("latent_size", 512), "w_dim": given.take("dlatent_size", 512), **_shape(given)}
    mapping["w_avg_beta"] = given.take("w_avg_beta", 0.995)
    given.ignore("truncation_psi", "truncation_cutoff", "style_mixing_prob", "structure")  # of their training
    given.done()
    return {**arguments, "mapping_kwargs": mapping, "synthesis_kwargs": synthesis}


def _discriminator(given: Arguments) -> dict[str, Any]:
    mapping = _mapping(given, 0, 0.1)
    block = {"activation": given.take("nonlinearity", "lrelu")}
    block["resample_filter"] = given.take("resample_kernel", FILTER)
    last = {"mbstd_group_size": given.take("mbstd_group_size")}
    last["mbstd_num_channels"] = given.take("mbstd_num_features", 1)
    arguments = {"architecture": given.take("architecture", "resnet"), **_shape(given), **_common(given)}
    given.ignore("structure")
    given.done()
    return {**arguments, "mapping_kwargs": mapping, "block_kwargs": block, "epilogue_kwargs": last}


def _shape(given: Arguments) -> dict[str, Any]:
    sizes = {"c_dim": given.take("label_size", 0), "img_resolution": given.take("resolution", 1024)}
    return sizes | {"img_channels": given.take("num_channels", 3)}


def _common(given: Arguments) -> dict[str, Any]:
    sizes = {"channel_base": 2 * given.take("fmap_base", 16384), "channel_max": given.take("fmap_max", 512)}
    return {**sizes, "num_fp16_res": given.take("num_fp16_res", 0), "conv_clamp": given.take("conv_clamp")}


def _mapping(given: Arguments, layers: int, multiplier: float) -> dict[str, Any]:
    theirs = {
        "num_layers": given.take("mapping_layers", layers),
        "lr_multiplier": given.take("mapping_lrmul", multiplier),
    }
    theirs |= {"embed_features": given.take("label_fmaps"), "layer_features": given.take("mapping_fmaps")}
    return theirs | {"activation": given.take("mapping_nonlinearity", "lrelu")}
