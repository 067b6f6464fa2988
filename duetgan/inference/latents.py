"""Read and write the latents of single images: the files of `generate.py project --save`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from duetgan.models.gan import NoiseMode, StyledGenerator
from duetgan.models.restore import fingerprint, read_tensors
from duetgan.utils.errors import explained, refuse
from duetgan.utils.files import write_atomic

Maps = list[Tensor] | Literal["const", "none"]
# The metadata are one JSON entry, because safetensors does not keep the order of several.
ENTRY = "projection"
REMEDY = "write it with generate.py project --save"


@dataclass(frozen=True, kw_only=True)
class Latents:
    """The inputs of a generator for one image: the styles of all layers, and the noise."""

    ws: Tensor  # [num_ws, w_dim]
    noise: Maps  # a map [1, 1, h, w] for each layer, or the mode's name
    # label whose mean w is the target of a truncation; None: the mean of all labels
    label: int | None
    name: str = "projection"


def noise_maps(generator: StyledGenerator, noise: list[Tensor] | NoiseMode) -> list[Tensor]:
    """Return a noise map [1, 1, h, w] for each layer.

    If `noise` is a list of maps, return it. If it is "const", return the generator's stored maps;
    for any other mode, return zeros.
    """
    if not isinstance(noise, str):
        return noise
    maps = generator.stored_noise()
    return maps if noise == "const" else [torch.zeros_like(noise_map) for noise_map in maps]


def write_latents(
    path: Path,
    spaces: Mapping[str, Latents],  # by space: w, w+ or both
    generator: StyledGenerator,
    metadata: Mapping[str, object],
) -> None:
    """Write the latents of one image, in one space or both, to a safetensors file.

    The tensors are `w` [w_dim] and `w+` [num_ws, w_dim], if `spaces` has them, and the noise maps
    [1, 1, h, w], if there are any, as `SPACE.noise.LAYER`. The file's metadata are `metadata`, and
    `network`, the fingerprint of the generator. The caller must supply the entries of `metadata`
    that `read_latents` uses: `noise`, which is "const", "none" or, for noise maps, "optimise"; and
    `class`, the name of the class `Latents.label`, or "" if this is None.
    """
    tensors = {}
    for space, latents in spaces.items():
        tensors[space] = latents.ws[0] if space == "w" else latents.ws
        if not isinstance(latents.noise, str):
            for layer, noise_map in enumerate(latents.noise):
                tensors[f"{space}.noise.{layer}"] = noise_map
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    entry = {**metadata, "network": fingerprint(generator)}
    write_atomic(path, save(tensors, metadata={ENTRY: json.dumps(entry)}))


def read_latents(source: str, generator: StyledGenerator, names: Sequence[str]) -> Latents:
    """Read latents from a file that `write_latents` wrote.

    `source` is `FILE` or `FILE:SPACE`, where SPACE is w or w+. Without a space, w+ is read, or w if
    the file has no w+. `names[i]` is the class name of the generator's label i. Raises UserError if
    the file is missing or damaged, was not written by `write_latents`, or does not fit this
    generator.
    """
    file, _, space = source.rpartition(":") if source.endswith((":w", ":w+")) else (source, "", "")
    tensors, metadata = read_tensors(Path(file), REMEDY)
    faults = (KeyError, TypeError, ValueError, RecursionError)
    with explained(faults, f"{file}: contains no saved latents; {REMEDY}"):
        entry = dict(json.loads(metadata[ENTRY]))
    name = "-".join(filter(None, (Path(file).stem, space)))
    space = space or ("w+" if "w+" in tensors else "w")
    w_dim = generator.w_avg.numel()
    expected = {space: [w_dim] if space == "w" else [generator.num_ws, w_dim]}
    maps = {f"{space}.noise.{i}": list(m.shape) for i, m in enumerate(generator.stored_noise())}
    if entry.get("noise", "optimise") == "optimise" and maps.keys() & tensors.keys():
        expected |= maps
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items() if key in expected}
    network = fingerprint(generator)
    remedy = "project the image again with this checkpoint"
    refuse(
        (
            entry.get("network", network) != network,
            f"{file}: its w is of another network ({entry.get('network')}, not {network}); {remedy}",
        ),
        (
            shapes != expected,
            f"{source}: has {shapes or sorted(tensors)}, this generator takes {expected}; {remedy}",
        ),
    )
    values = {key: tensors[key].to(generator.w_avg) for key in expected}
    is_finite = all(bool(value.isfinite().all()) for value in values.values())
    refuse((not is_finite, f"{source}: has values that are not finite; {remedy}"))
    noise: Maps = "none" if entry.get("noise") == "none" else "const"
    if len(values) > 1:
        noise = [values[key] for key in maps]
    class_name = entry.get("class")
    return Latents(
        ws=values[space].expand(generator.num_ws, -1),
        noise=noise,
        label=names.index(class_name) if class_name in names else None,
        name=name,
    )
