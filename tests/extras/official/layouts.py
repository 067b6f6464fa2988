"""Files in the layouts of other programs, written from the tables with random weights, and what their formulas give.

The weights are drawn by the other program's names, and brought into the form that `reference` reads by hand here, so
that nothing of the conversion is used.
"""

import contextlib
import math
import pickle
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from duetgan.utils.seeding import generator as keyed

FIR = torch.outer(torch.tensor([1.0, 3, 3, 1]), torch.tensor([1.0, 3, 3, 1])) / 64
SIZES = [4, 8, 16]
WIDTHS = {4: 6, 8: 6, 16: 4}  # min(64 / resolution, 6)
CHANNELS = {"channel_base": 64, "channel_max": 6}


def drawn(*shape, key="weights"):
    return torch.randn(shape, generator=keyed(0, "test", key, str(shape)))


@contextlib.contextmanager
def programs(**names):
    """Modules of other programs, there while a file is written and gone when it is read."""
    made: dict[str, Any] = {}
    for full, value in names.items():
        path, name = full.replace("__", ".").rsplit(".", 1)
        parts = path.split(".")
        for i in range(len(parts)):
            module = ".".join(parts[: i + 1])
            made.setdefault(module, types.ModuleType(module))
        setattr(made[path], name, value)
        if isinstance(value, type):
            value.__module__, value.__qualname__ = path, name
        elif callable(value):
            value.__module__, value.__qualname__, value.__name__ = path, name, name
    ours = {name: sys.modules[name] for name in made if name in sys.modules}  # NVIDIA has a `training`, too
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(ours)


# --- NVIDIA, PyTorch


def nvidia_generator(*, classes=3, z_dim=5, w_dim=7, layers=2):
    """name -> tensor of a generator of 16 px."""
    state = {"mapping.w_avg": drawn(w_dim), "synthesis.b4.const": drawn(WIDTHS[4], 4, 4)}
    if classes:
        state |= {"mapping.embed.weight": drawn(w_dim, classes), "mapping.embed.bias": drawn(w_dim)}
    for k in range(layers):
        inputs = z_dim + (w_dim if classes else 0) if k == 0 else w_dim
        state |= {f"mapping.fc{k}.weight": 100 * drawn(w_dim, inputs), f"mapping.fc{k}.bias": 10 * drawn(w_dim)}
    for size in SIZES:
        block, width, before = f"synthesis.b{size}", WIDTHS[size], WIDTHS[max(4, size // 2)]
        state[f"{block}.resample_filter"] = FIR
        shapes = {"conv0": (width, before, 3, 3), "conv1": (width, width, 3, 3), "torgb": (3, width, 1, 1)}
        for name in list(shapes)[size == 4 :]:
            layer, (outputs, inputs, *_) = f"{block}.{name}", shapes[name]
            state |= {f"{layer}.weight": drawn(*shapes[name], key=layer), f"{layer}.bias": drawn(outputs, key=layer)}
            state |= {f"{layer}.affine.weight": drawn(inputs, w_dim, key=layer)}
            state |= {f"{layer}.affine.bias": 1 + drawn(inputs, key=layer)}
            if name != "torgb":
                state |= {f"{layer}.noise_strength": drawn(key=layer), f"{layer}.resample_filter": FIR}
                state[f"{layer}.noise_const"] = drawn(size, size, key=layer)
    return state


def nvidia_discriminator(*, classes=3, layers=2, residual=True):
    """name -> tensor of a discriminator of 16 px."""
    last, out = WIDTHS[4], WIDTHS[4] if classes else 1
    shapes: dict[str, tuple[int, ...]] = {"b16.fromrgb": (WIDTHS[16], 3, 1, 1)}
    for size in (16, 8):
        inputs, outputs = WIDTHS[size], WIDTHS[size // 2]
        shapes |= {f"b{size}.conv0": (inputs, inputs, 3, 3), f"b{size}.conv1": (outputs, inputs, 3, 3)}
        shapes |= {f"b{size}.skip": (outputs, inputs, 1, 1)} if residual else {}
    shapes |= {"b4.conv": (last, last + 1, 3, 3), "b4.fc": (last, last * 16), "b4.out": (out, last)}
    if classes:
        shapes |= {"mapping.embed": (last, classes)} | {f"mapping.fc{k}": (last, last) for k in range(layers)}
    state = {f"{name}.weight": drawn(*shape, key=name) for name, shape in shapes.items()}
    state |= {f"{name}.bias": drawn(shape[0], key=name) for name, shape in shapes.items() if "skip" not in name}
    state |= {name: 100 * tensor for name, tensor in state.items() if ".fc" in name and name.endswith("weight")}
    filtered = ["b16", "b8", *(name for name, shape in shapes.items() if len(shape) == 4)]
    return state | {f"{place}.resample_filter": FIR for place in filtered}


G_ARGUMENTS = {
    "z_dim": 5,
    "c_dim": 3,
    "w_dim": 7,
    "img_resolution": 16,
    "img_channels": 3,
    "mapping_kwargs": {"num_layers": 2},
    "synthesis_kwargs": {**CHANNELS, "num_fp16_res": 4, "conv_clamp": 256},
}
D_ARGUMENTS = {
    "c_dim": 3,
    "img_resolution": 16,
    "img_channels": 3,
    **CHANNELS,
    "num_fp16_res": 4,
    "conv_clamp": 256,
    "block_kwargs": {"freeze_layers": 0},
    "mapping_kwargs": {"num_layers": 2, "lr_multiplier": 0.1},
    "epilogue_kwargs": {"mbstd_group_size": 2},
}


class Persistent:
    """An object of NVIDIA's `persistence`: it pickles as a call with its class's source and its state."""

    def __init__(self, name, state, source="raise SystemExit('compiled')"):
        self.name, self.state, self.source = name, state, source

    def __reduce__(self):
        meta = {"type": "class", "version": 6, "module_src": self.source, "class_name": self.name, "state": self.state}
        return sys.modules["torch_utils.persistence"]._reconstruct_persistent_obj, (meta,)


def tree(tensors, arguments, name):
    """A persistent network: modules within modules, parameters and buffers."""
    node = {"_init_args": (), "_init_kwargs": arguments} if arguments else {}
    node |= {"_parameters": {}, "_buffers": {}, "_modules": {}, "training": False}
    node["_non_persistent_buffers_set"] = {"scratch"}
    node["_buffers"]["scratch"] = torch.zeros(1)  # in no state dict
    inner: dict[str, Any] = {}
    for path, value in tensors.items():
        head, _, rest = path.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        elif head in ("w_avg", "noise_const", "resample_filter"):
            node["_buffers"][head] = value
        else:
            node["_parameters"][head] = nn.Parameter(value.clone())
    node["_modules"] = {head: tree(part, None, "Layer") for head, part in inner.items()}
    return Persistent(name, node)


class EasyDict(dict):
    """dnnlib's."""


def _reconstruct_persistent_obj(meta):
    raise AssertionError("a persistent object was built")


def nvidias():
    names = {"torch_utils__persistence___reconstruct_persistent_obj": _reconstruct_persistent_obj}
    return programs(**names, dnnlib__util__EasyDict=EasyDict)


def write_nvidia(path, *, generator=None, average=None, discriminator=None, g=None, d=None, source=None):
    """A network's .pkl; `average` is G_ema's state."""
    generator = nvidia_generator() if generator is None else generator
    discriminator = nvidia_discriminator() if discriminator is None else discriminator
    if average is None:
        average = {name: t if "filter" in name else 1.5 * t for name, t in generator.items()}
    content = {
        "G": tree(generator, EasyDict(g or G_ARGUMENTS), "Generator"),
        "D": tree(discriminator, EasyDict(d or D_ARGUMENTS), "Discriminator"),
        "G_ema": tree(average, EasyDict(g or G_ARGUMENTS), "Generator"),
        "training_set_kwargs": EasyDict(path="data.zip", resolution=np.float64(16)),
        "augment_pipe": Persistent("AugmentPipe", {"_buffers": {"p": torch.zeros([])}}, "import os"),
    }
    if source:
        content["G_ema"].source = source
    with nvidias(), open(path, "wb") as file:
        pickle.dump(content, file)
    return average, discriminator


def nvidia_network(state, kind):
    """The form that `reference` reads, by NVIDIA's names."""

    def layer(name, **more):
        return SimpleNamespace(weight=state[f"{name}.weight"], bias=state.get(f"{name}.bias"), **more)

    embed = layer("mapping.embed") if "mapping.embed.weight" in state else None
    mapping = [layer(f"mapping.fc{k}") for k in range(9) if f"mapping.fc{k}.weight" in state]
    if kind == "D":
        blocks = []
        for size in (16, 8):
            skip = layer(f"b{size}.skip") if f"b{size}.skip.weight" in state else None
            blocks.append(SimpleNamespace(first=layer(f"b{size}.conv0"), second=layer(f"b{size}.conv1"), skip=skip))
        names = {"from_rgb": "b16.fromrgb", "last_conv": "b4.conv", "last_linear": "b4.fc", "output": "b4.out"}
        parts = {ours: layer(theirs) for ours, theirs in names.items()}
        return SimpleNamespace(blocks=blocks, embed=embed, label_mapping=mapping, **parts)

    def modulated(name):
        conv, strength = layer(name, affine=layer(f"{name}.affine")), state.get(f"{name}.noise_strength")
        return SimpleNamespace(conv=conv, bias=state[f"{name}.bias"], noise_strength=strength)

    blocks = [
        SimpleNamespace(
            first=modulated(f"synthesis.b{size}.conv0") if size > 4 else None,
            second=modulated(f"synthesis.b{size}.conv1"),
            to_rgb=modulated(f"synthesis.b{size}.torgb"),
        )
        for size in SIZES
    ]
    noise = [f"synthesis.b{size}.{name}.noise_const" for size in SIZES for name in ("conv0", "conv1")]
    return SimpleNamespace(
        constant=state["synthesis.b4.const"][None],
        blocks=blocks,
        mapping=SimpleNamespace(embed=embed, layers=mapping),
        noise=[state[name].double().numpy() for name in noise if name in state],
    )


# --- NVIDIA, TensorFlow


class Network:
    """dnnlib.tflib.network.Network: it pickles as its state."""

    def __init__(self, **state):
        self.state = state

    def __getstate__(self):
        return {"version": 5, "name": "G", "build_module_src": "raise SystemExit('compiled')", **self.state}


COMMON: dict[str, Any] = {"resolution": 16, "num_channels": 3, "label_size": 3, "mapping_layers": 2}
COMMON |= {"fmap_base": 32, "fmap_max": 6}


def write_tensorflow(path, generator, average, discriminator, arguments=None):
    """The networks of NVIDIA's PyTorch names in a TensorFlow file: legacy.py's table, read backwards."""

    def dense(x):
        return x.numpy().transpose()

    def filters(x):
        return x.numpy().transpose(2, 3, 1, 0)

    def build_g(state):
        mapping, synthesis = {}, {"lod": np.float32(0), "4x4/Const/const": state["synthesis.b4.const"].numpy()[None]}
        for part, turn in (("weight", dense), ("bias", lambda x: x.numpy())):
            mapping[f"LabelEmbed/{part}"] = turn(state[f"mapping.embed.{part}"])
            for k in range(2):
                mapping[f"Dense{k}/{part}"] = turn(state[f"mapping.fc{k}.{part}"])
        for size in SIZES:
            theirs = {"conv1": "Conv" if size == 4 else "Conv1", "torgb": "ToRGB"}
            for name, there in (theirs | ({"conv0": "Conv0_up"} if size > 4 else {})).items():
                layer, place = f"synthesis.b{size}.{name}", f"{size}x{size}/{there}"
                weight = filters(state[f"{layer}.weight"])
                synthesis[f"{place}/weight"] = weight[::-1, ::-1] if name == "conv0" else weight
                synthesis[f"{place}/bias"] = state[f"{layer}.bias"].numpy()
                synthesis[f"{place}/mod_weight"] = dense(state[f"{layer}.affine.weight"])
                synthesis[f"{place}/mod_bias"] = state[f"{layer}.affine.bias"].numpy() - 1
                if name != "torgb":
                    synthesis[f"{place}/noise_strength"] = state[f"{layer}.noise_strength"].numpy()
                    index = 2 * int(math.log2(size)) - (5 if name == "conv0" else 4)
                    synthesis[f"noise{index}"] = state[f"{layer}.noise_const"].numpy()[None, None]
        parts = {"mapping": mapping, "synthesis": synthesis}
        inner = {name: Network(variables=list(part.items()), static_kwargs={}) for name, part in parts.items()}
        given = COMMON | {"latent_size": 5, "dlatent_size": 7, "truncation_psi": 0.5, **(arguments or {})}
        return Network(
            variables=[("dlatent_avg", state["mapping.w_avg"].numpy())], components=inner, static_kwargs=EasyDict(given)
        )

    def build_d(state):
        there = {}
        for name, value in state.items():
            layer, _, part = name.rpartition(".")
            turn: Any = {1: lambda x: x.numpy(), 2: dense, 4: filters}.get(value.ndim)
            block, _, inner = layer.partition(".")
            size = block[1:]
            if part == "resample_filter":
                continue
            if block == "mapping":
                place = "LabelEmbed" if inner == "embed" else f"Mapping{inner[2:]}"
            elif block == "b4":
                place = {"conv": "4x4/Conv", "fc": "4x4/Dense0", "out": "Output"}[inner]
            else:
                names = {"fromrgb": "FromRGB", "conv0": "Conv0", "conv1": "Conv1_down", "skip": "Skip"}
                place = f"{size}x{size}/{names[inner]}"
            there[f"{place}/{part}"] = turn(value)
        return Network(variables=list(there.items()), static_kwargs=EasyDict(COMMON | {"mbstd_group_size": 2}))

    with programs(dnnlib__tflib__network__Network=Network, dnnlib__EasyDict=EasyDict), open(path, "wb") as file:
        pickle.dump((build_g(generator), build_d(discriminator), build_g(average)), file, protocol=2)


# --- rosinality


def rosinality_generator():
    """name -> tensor of a generator of 16 px, and the same by NVIDIA's names."""
    there = nvidia_generator(classes=0, z_dim=7)
    state = {"input.input": there["synthesis.b4.const"][None]}
    for k in range(2):
        state |= {f"style.{k + 1}.{part}": there[f"mapping.fc{k}.{part}"] for part in ("weight", "bias")}
    layers = {"conv1": "b4.conv1", "convs.0": "b8.conv0", "convs.1": "b8.conv1", "convs.2": "b16.conv0"}
    layers |= {"convs.3": "b16.conv1", "to_rgb1": "b4.torgb", "to_rgbs.0": "b8.torgb", "to_rgbs.1": "b16.torgb"}
    for noise, (name, place) in enumerate(layers.items()):
        layer = f"synthesis.{place}"
        state[f"{name}.conv.weight"] = there[f"{layer}.weight"][None]
        state |= {f"{name}.conv.modulation.{part}": there[f"{layer}.affine.{part}"] for part in ("weight", "bias")}
        if "rgb" in name:
            state[f"{name}.bias"] = there[f"{layer}.bias"].view(1, 3, 1, 1)
            continue
        state |= {f"{name}.activate.bias": there[f"{layer}.bias"]}
        state |= {f"{name}.noise.weight": there[f"{layer}.noise_strength"][None]}
        state[f"noises.noise_{noise}"] = there[f"{layer}.noise_const"][None, None]
    filters = ("convs.0.conv.blur", "convs.2.conv.blur", "to_rgbs.0.upsample", "to_rgbs.1.upsample")
    return state | {f"{name}.kernel": 4 * FIR for name in filters}, there


def rosinality_discriminator():
    """name -> tensor, and the same by NVIDIA's names."""
    there = nvidia_discriminator(classes=0)
    places = {"b16.fromrgb": ("convs.0", 0), "b4.conv": ("final_conv", 0)}  # of the weight; the bias comes after it
    for n, size in enumerate((16, 8), 1):
        places |= {f"b{size}.conv0": (f"convs.{n}.conv1", 0), f"b{size}.conv1": (f"convs.{n}.conv2", 1)}
    names = {f"{ours}.weight": f"{theirs}.{n}.weight" for ours, (theirs, n) in places.items()}
    names |= {f"{ours}.bias": f"{theirs}.{n + 1}.bias" for ours, (theirs, n) in places.items()}
    names |= {f"b{size}.skip.weight": f"convs.{n}.skip.1.weight" for n, size in enumerate((16, 8), 1)}
    for n, layer in enumerate(("fc", "out")):
        names |= {f"b4.{layer}.{part}": f"final_linear.{n}.{part}" for part in ("weight", "bias")}
    filters = [f"convs.{n}.{place}.0.kernel" for n in (1, 2) for place in ("conv2", "skip")]
    return {theirs: there[ours] for ours, theirs in names.items()} | dict.fromkeys(filters, FIR), there
