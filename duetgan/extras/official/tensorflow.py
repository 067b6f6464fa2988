"""Convert StyleGAN2 networks of NVIDIA's TensorFlow programs (stylegan2, stylegan2-ada).

The variables first get the names that NVIDIA's PyTorch programs use, as in `legacy.py` of
stylegan2-ada-pytorch.
"""

import re
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from duetgan.extras.official.names import Converted, renamed
from duetgan.extras.official.nvidia import FILTER, Arguments, converted
from duetgan.extras.official.unpickle import Array, Inert, Refused
from duetgan.utils.config.yaml_files import Tree

# TensorFlow's name -> the PyTorch program's; first the generator's, then the discriminator's.
NAMES = {
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
# TensorFlow's argument -> the PyTorch program's argument, and the value if the file has none.
COMMON: dict[str, tuple[str, object]] = {
    "resolution": ("img_resolution", 1024),
    "num_channels": ("img_channels", 3),
    "label_size": ("c_dim", 0),
    "fmap_base": ("channel_base", 16384),  # half of channel_base
    "fmap_max": ("channel_max", 512),
    "num_fp16_res": ("num_fp16_res", 0),
    "conv_clamp": ("conv_clamp", None),
    "label_fmaps": ("mapping_kwargs.embed_features", None),
    "mapping_fmaps": ("mapping_kwargs.layer_features", None),
    "mapping_nonlinearity": ("mapping_kwargs.activation", "lrelu"),
}
GENERATOR: dict[str, tuple[str, object]] = {
    "latent_size": ("z_dim", 512),
    "dlatent_size": ("w_dim", 512),
    "architecture": ("architecture", "skip"),
    "nonlinearity": ("activation", "lrelu"),
    "resample_kernel": ("resample_filter", FILTER),
    "use_noise": ("use_noise", True),
    "mapping_layers": ("mapping_kwargs.num_layers", 8),
    "mapping_lrmul": ("mapping_kwargs.lr_multiplier", 0.01),
    "w_avg_beta": ("mapping_kwargs.w_avg_beta", 0.995),
}
DISCRIMINATOR: dict[str, tuple[str, object]] = {
    "architecture": ("architecture", "resnet"),
    "nonlinearity": ("block_kwargs.activation", "lrelu"),
    "resample_kernel": ("block_kwargs.resample_filter", FILTER),
    "mbstd_group_size": ("epilogue_kwargs.mbstd_group_size", None),
    "mbstd_num_features": ("epilogue_kwargs.mbstd_num_channels", 1),
    "mapping_layers": ("mapping_kwargs.num_layers", 0),
    "mapping_lrmul": ("mapping_kwargs.lr_multiplier", 0.1),
}
# Variables of progressive growing, which these networks do not use.
UNUSED = re.compile(r"(synthesis/)?lod|.*/?ema_.*")


def convert(content: object) -> Converted:
    """Convert the content of a TensorFlow file.

    It must be three objects of class `dnnlib.tflib.network.Network`: G, D and Gs, the average of G.
    """
    if not isinstance(content, (tuple, list)) or len(content) != 3:
        raise Refused("it holds no three networks (G, D, Gs)")
    generator, discriminator, average = content
    states = {
        "G": _tensors(generator),
        "D": _tensors(discriminator),
        "G_ema": _tensors(average),
    }
    return converted(
        _arguments(average, GENERATOR), _arguments(discriminator, DISCRIMINATOR), states
    )


def _tensors(network: object) -> dict[str, Tensor]:
    """Return the variables of a network with the names of NVIDIA's PyTorch programs."""
    if not isinstance(network, Inert) or network.name != "Network":
        raise Refused("it holds an object that is no network")
    version = network.state.get("version")
    if type(version) is not int or version < 4:
        raise Refused(f"a network of version {version!r}; those of StyleGAN2 have 4 or more")
    tensors: dict[str, Tensor] = {}
    for name, value in _variables(network, "", 0):
        if not UNUSED.fullmatch(name):
            array = np.array(_transposed(name, value), dtype=np.float32, order="C")
            tensors[_pytorch_name(name)] = torch.from_numpy(array)
    return tensors


def _variables(network: Inert, prefix: str, depth: int) -> Iterator[tuple[str, np.ndarray]]:
    components = network.state.get("components") or {}
    variables = network.state.get("variables") or []
    if depth > 2 or not isinstance(components, dict) or not isinstance(variables, (list, tuple)):
        raise Refused("a network that is none of NVIDIA's")
    for entry in variables:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise Refused("a variable that is no array")
        name, value = entry
        if not isinstance(value, (Array, float, int)):
            raise Refused("a variable that is no array")
        yield f"{prefix}{name}", value.array if isinstance(value, Array) else np.asarray(value)
    for name, component in components.items():
        if not isinstance(component, Inert):
            raise Refused("a component that is no network")
        yield from _variables(component, f"{prefix}{name}/", depth + 1)


def _pytorch_name(name: str) -> str:
    # noise0 belongs to 4 px; each larger size has two.
    if match := re.fullmatch(r"synthesis/noise(\d+)", name):
        index = int(match[1])
        return f"synthesis.b{4 << ((index + 1) // 2)}.conv{1 - index % 2}.noise_const"
    return renamed(name, NAMES).replace(".mod_", ".affine.")


def _transposed(name: str, x: np.ndarray) -> np.ndarray:
    """Return the value of the variable `name` as PyTorch stores it.

    Dimensions are reordered, and 1 is added to the biases of styles.
    """
    if name.endswith("Const/const"):
        return x[0]
    if name.startswith("synthesis/noise"):
        return x[0, 0]
    if name.endswith("/mod_bias"):
        return x + 1
    if x.ndim == 4:  # filters; transposed convolutions have them rotated by 180 degrees
        return (x[::-1, ::-1] if "/Conv0_up/" in name else x).transpose(3, 2, 0, 1)
    return x.transpose()


def _arguments(network: Inert, table: dict[str, tuple[str, object]]) -> Tree:
    """Return the arguments with which NVIDIA's PyTorch program would build the network.

    `table` is GENERATOR or DISCRIMINATOR.
    """
    source = Arguments(network.state.get("static_kwargs") or {}, "the network's arguments")
    arguments: Tree = {}
    for key, (path, default) in (COMMON | table).items():
        section, _, name = path.rpartition(".")
        target = arguments.setdefault(section, {}) if section else arguments
        target[name] = source.take(key, default)
    arguments["channel_base"] *= 2
    # These options change no layer.
    source.done("truncation_psi", "truncation_cutoff", "style_mixing_prob", "structure")
    return arguments
