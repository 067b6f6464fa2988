"""StyleGAN2 networks of NVIDIA's TensorFlow programs (stylegan2, stylegan2-ada).

They are first brought into the names of the PyTorch programs, as stylegan2-ada-pytorch's `legacy.py` does.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.official.names import Converted
from models.official.nvidia import FILTER, Arguments, converted
from models.official.unpickle import Array, Inert, Refused


def convert(content: Any) -> Converted:
    """The networks of a TensorFlow file, a tuple (G, D, Gs) of `dnnlib.tflib.network.Network`."""
    if not isinstance(content, (tuple, list)) or len(content) != 3:
        raise Refused("it holds no three networks (G, D, Gs)")
    g, d, average = (_Network(network) for network in content)
    states = {"G": g.tensors(_GENERATOR), "G_ema": average.tensors(_GENERATOR), "D": d.tensors(_DISCRIMINATOR)}
    return converted(average.generator(), d.discriminator(), states)


def _dense(x: np.ndarray) -> np.ndarray:
    return x.transpose()


def _filters(x: np.ndarray) -> np.ndarray:
    return x.transpose(3, 2, 0, 1)


def _turned(x: np.ndarray) -> np.ndarray:
    """A true convolution's filters: turned by half."""
    return x[::-1, ::-1].transpose(3, 2, 0, 1)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _plus_one(x: np.ndarray) -> np.ndarray:
    return x + 1


Rule = tuple[str, Callable[[re.Match[str]], str], Callable[[np.ndarray], np.ndarray]]
LAYERS = {"Conv0_up": "conv0", "Conv1": "conv1", "ToRGB": "torgb"}


def _layer(match: re.Match[str]) -> str:
    return f"synthesis.b{match[1]}.{LAYERS[match[2]]}"


_GENERATOR: list[Rule] = [
    (r"dlatent_avg", lambda m: "mapping.w_avg", _same),
    (r"mapping/LabelEmbed/weight", lambda m: "mapping.embed.weight", _dense),
    (r"mapping/LabelEmbed/bias", lambda m: "mapping.embed.bias", _same),
    (r"mapping/Dense(\d+)/weight", lambda m: f"mapping.fc{m[1]}.weight", _dense),
    (r"mapping/Dense(\d+)/bias", lambda m: f"mapping.fc{m[1]}.bias", _same),
    (r"synthesis/4x4/Const/const", lambda m: "synthesis.b4.const", lambda x: x[0]),
    (r"synthesis/noise(\d+)", lambda m: _noise(int(m[1])), lambda x: x[0, 0]),
    (r"synthesis/4x4/Conv/(.*)", lambda m: f"synthesis/4x4/Conv1/{m[1]}", _same),  # as at other sizes: once more
    (r"synthesis/(\d+)x\1/(Conv0_up)/weight", lambda m: f"{_layer(m)}.weight", _turned),
    (r"synthesis/(\d+)x\1/(Conv1|ToRGB)/weight", lambda m: f"{_layer(m)}.weight", _filters),
    (r"synthesis/(\d+)x\1/(Conv0_up|Conv1|ToRGB)/bias", lambda m: f"{_layer(m)}.bias", _same),
    (r"synthesis/(\d+)x\1/(Conv0_up|Conv1)/noise_strength", lambda m: f"{_layer(m)}.noise_strength", _same),
    (r"synthesis/(\d+)x\1/(Conv0_up|Conv1|ToRGB)/mod_weight", lambda m: f"{_layer(m)}.affine.weight", _dense),
    (r"synthesis/(\d+)x\1/(Conv0_up|Conv1|ToRGB)/mod_bias", lambda m: f"{_layer(m)}.affine.bias", _plus_one),
]
_DISCRIMINATOR: list[Rule] = [
    (r"(\d+)x\1/FromRGB/weight", lambda m: f"b{m[1]}.fromrgb.weight", _filters),
    (r"(\d+)x\1/FromRGB/bias", lambda m: f"b{m[1]}.fromrgb.bias", _same),
    (r"(\d+)x\1/Conv(0|1_down)/weight", lambda m: f"b{m[1]}.conv{m[2][0]}.weight", _filters),
    (r"(\d+)x\1/Conv(0|1_down)/bias", lambda m: f"b{m[1]}.conv{m[2][0]}.bias", _same),
    (r"(\d+)x\1/Skip/weight", lambda m: f"b{m[1]}.skip.weight", _filters),
    (r"4x4/Conv/weight", lambda m: "b4.conv.weight", _filters),
    (r"4x4/Conv/bias", lambda m: "b4.conv.bias", _same),
    (r"4x4/Dense0/weight", lambda m: "b4.fc.weight", _dense),
    (r"4x4/Dense0/bias", lambda m: "b4.fc.bias", _same),
    (r"Output/weight", lambda m: "b4.out.weight", _dense),
    (r"Output/bias", lambda m: "b4.out.bias", _same),
    (r"LabelEmbed/weight", lambda m: "mapping.embed.weight", _dense),
    (r"LabelEmbed/bias", lambda m: "mapping.embed.bias", _same),
    (r"Mapping(\d+)/weight", lambda m: f"mapping.fc{m[1]}.weight", _dense),
    (r"Mapping(\d+)/bias", lambda m: f"mapping.fc{m[1]}.bias", _same),
]
UNUSED = re.compile(r"(synthesis/)?lod|.*/?ema_.*")  # of progressive growing, which these networks no longer have


def _noise(index: int) -> str:
    """noise0 is of 4 px, then two for each size: of conv0 and of conv1."""
    side = 4 << ((index + 1) // 2)
    return f"synthesis.b{side}.conv{1 if index % 2 == 0 else 0}.noise_const"


class _Network:
    """A TensorFlow network: `static_kwargs`, `variables`, and `components` within it."""

    def __init__(self, network: Any) -> None:
        if not isinstance(network, Inert) or network.name != "Network":
            raise Refused("it holds an object that is no network")
        version = network.state.get("version")
        if type(version) is not int or version < 4:
            raise Refused(f"a network of version {version!r}; those of StyleGAN2 have 4 or more")
        self.given = Arguments(network.state.get("static_kwargs") or {}, "the network's arguments")
        self.variables = dict(self._collected(network, "", 0))

    def _collected(self, network: Any, prefix: str, depth: int) -> list[tuple[str, np.ndarray]]:
        parts: Any = network.state.get("components") or {}
        variables: Any = network.state.get("variables") or []
        if depth > 2 or not isinstance(parts, dict) or not isinstance(variables, (list, tuple)):
            raise Refused("a network that is none of NVIDIA's")
        found = []
        for entry in variables:
            if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[1], (Array, float, int)):
                raise Refused("a variable that is no array")
            value = entry[1].array if isinstance(entry[1], Array) else np.asarray(entry[1])
            found.append((f"{prefix}{entry[0]}", value))
        for name, part in parts.items():
            if not isinstance(part, Inert):
                raise Refused("a component that is no network")
            found += self._collected(part, f"{prefix}{name}/", depth + 1)
        return found

    def tensors(self, rules: list[Rule]) -> dict[str, Tensor]:
        """The variables by the names of NVIDIA's PyTorch programs."""
        found = {}
        for name, value in self.variables.items():
            while True:
                rule = next(((r, m) for r in rules if (m := re.fullmatch(r[0], name))), None)
                if rule is None or not rule[0][1](rule[1]).startswith("synthesis/"):
                    break
                name = rule[0][1](rule[1])
            if rule is None and UNUSED.fullmatch(name):
                continue
            theirs, turn = (name, _same) if rule is None else (rule[0][1](rule[1]), rule[0][2])
            found[theirs] = torch.from_numpy(np.array(turn(value), dtype=np.float32, order="C"))
        return found

    def generator(self) -> dict[str, Any]:
        """What NVIDIA's PyTorch generator would be built with."""
        given = self.given
        mapping = self._mapping("mapping_layers", 8, 0.01)
        synthesis = self._common() | {"use_noise": given.take("use_noise", True)}
        synthesis |= {"architecture": given.take("architecture", "skip"), "activation": self._activation()}
        synthesis["resample_filter"] = given.take("resample_kernel", FILTER)
        arguments = {"z_dim": given.take("latent_size", 512), "w_dim": given.take("dlatent_size", 512), **self._shape()}
        mapping["w_avg_beta"] = given.take("w_avg_beta", 0.995)
        for name in ("truncation_psi", "truncation_cutoff", "style_mixing_prob", "structure"):  # of their training
            given.take(name)
        given.done()
        return {**arguments, "mapping_kwargs": mapping, "synthesis_kwargs": synthesis}

    def discriminator(self) -> dict[str, Any]:
        """What NVIDIA's PyTorch discriminator would be built with."""
        given = self.given
        mapping = self._mapping("mapping_layers", 0, 0.1)
        block = {"activation": self._activation(), "resample_filter": given.take("resample_kernel", FILTER)}
        last = {"mbstd_group_size": given.take("mbstd_group_size")}
        last["mbstd_num_channels"] = given.take("mbstd_num_features", 1)
        arguments = {"architecture": given.take("architecture", "resnet"), **self._shape(), **self._common()}
        given.take("structure")
        given.done()
        return {**arguments, "mapping_kwargs": mapping, "block_kwargs": block, "epilogue_kwargs": last}

    def _shape(self) -> dict[str, Any]:
        names = {
            "c_dim": ("label_size", 0),
            "img_resolution": ("resolution", 1024),
            "img_channels": ("num_channels", 3),
        }
        return {name: self.given.take(*theirs) for name, theirs in names.items()}

    def _common(self) -> dict[str, Any]:
        given = self.given
        sizes = {"channel_base": 2 * given.take("fmap_base", 16384), "channel_max": given.take("fmap_max", 512)}
        return {**sizes, "num_fp16_res": given.take("num_fp16_res", 0), "conv_clamp": given.take("conv_clamp")}

    def _activation(self) -> Any:
        return self.given.take("nonlinearity", "lrelu")

    def _mapping(self, layers: str, default: int, multiplier: float) -> dict[str, Any]:
        given = self.given
        found = {"num_layers": given.take(layers, default), "activation": given.take("mapping_nonlinearity", "lrelu")}
        found |= {"embed_features": given.take("label_fmaps"), "layer_features": given.take("mapping_fmaps")}
        return {**found, "lr_multiplier": given.take("mapping_lrmul", multiplier)}
