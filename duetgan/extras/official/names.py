"""Convert networks from the files of other programs, and to NVIDIA's files, tensor by tensor.

"Our" names are those of Duet. For each program and network, one function maps our names of tensors
to the program's names. Both directions of the conversion use this function.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from duetgan.extras.official.unpickle import Refused
from duetgan.models.layers import TAPS
from duetgan.models.registry import architecture_of
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError, explained

# Resampling filter [4, 4].
FILTER = torch.outer(torch.tensor(TAPS), torch.tensor(TAPS)) / sum(TAPS) ** 2
# entry of a checkpoint's state -> network in NVIDIA's and R3GAN's files
NETWORKS = {"generator": "G", "generator_ema": "G_ema", "discriminator": "D"}


class Place(NamedTuple):
    """The counterpart of one of our tensors in another program's network.

    `name` is the counterpart's name. Its shape differs from ours only in dimensions of size 1: if
    `ours` is our tensor, `ours[view]` has the counterpart's shape.
    """

    name: str
    view: tuple[int | slice | None, ...] = ()


Places = Callable[[str], Place]  # our name of a tensor -> its place


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Rewrite a tensor's name by `table`, a dict from regular expression to template.

    The first expression that matches all of `name` is used. If none does, return `name` unchanged.
    """
    for pattern, template in table.items():
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(template)
    return name


def official_state(
    state: Mapping[str, Tensor], place: Places, filters: Iterable[str]
) -> dict[str, Tensor]:
    """Return the state dict of a network in the form of another program.

    It has the program's names, and contiguous float32 tensors on the CPU.

    Args:
        state: Our state dict.
        place: Function that maps our name of a tensor to its `Place`.
        filters: Names of the program's resampling filters, which are added.
    """
    tensors = dict.fromkeys(filters, FILTER)
    for key, value in state.items():
        name, view = place(key)
        tensors[name] = value.detach().cpu().float()[view]
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}


class Source:
    """The tensors of another program's network.

    Reading a tensor removes it. Tensors that remain at the end are unknown to Duet.
    """

    def __init__(self, tensors: Mapping[str, Tensor], title: str) -> None:
        self.tensors = dict(tensors)
        self.title = title  # name of the network in messages

    def take(self, name: str) -> Tensor:
        """Remove the tensor `name` and return it as contiguous float32.

        Raises Refused if it is missing, has no floating-point type, or is not finite.
        """
        if name not in self.tensors:
            raise Refused(f"{self.title} has no {name}")
        value = self.tensors.pop(name)
        if not value.is_floating_point():
            raise Refused(f"{self.title}'s {name} is of {value.dtype}")
        value = value.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
        if not torch.isfinite(value).all():
            raise Refused(f"{self.title}'s {name} is not finite")
        return value

    def shape(self, name: str, ndim: int) -> tuple[int, ...]:
        """Return the shape of a tensor without removing it.

        Raises Refused if the tensor is missing, is empty, or does not have `ndim` dimensions.
        """
        value = self.tensors.get(name)
        if value is None or value.ndim != ndim or not value.numel():
            raise Refused(f"{self.title} has no {name} of {ndim} dimensions")
        return tuple(value.shape)

    def drop_filters(self, suffix: str, gains: tuple[float, ...] = (1.0,)) -> None:
        """Remove the resampling filters, which are the tensors whose names end in `suffix`.

        Raises Refused if one is not FILTER times one of `gains`.
        """
        for name in [name for name in self.tensors if name.endswith(suffix)]:
            value = self.take(name).squeeze()
            if value.shape != FILTER.shape or not any(
                torch.allclose(value, gain * FILTER) for gain in gains
            ):
                raise Refused(
                    f"{self.title}'s {name} is another filter than [1, 3, 3, 1], which Duet does "
                    "not support"
                )


@dataclass
class Converted:
    """A GAN that was converted from another program.

    Its configurations and state dicts have the form of those in Duet's checkpoints.
    """

    architecture: str  # key of ARCHITECTURES
    shape: dict[str, int]  # resolution, channels, classes
    generator: Tree  # configuration of the generator
    discriminator: Tree
    # generator_ema and, if the file has them, generator and discriminator
    state: dict[str, dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)  # messages for the user

    def take(
        self, part: str, source: Source, place: Places, absent: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """Convert all tensors of `source`, store them as `state[part]`, and return them.

        The names and shapes are compared with those of our network, which is built on the meta
        device from the configuration of this object.

        Args:
            part: generator, generator_ema or discriminator.
            source: The other program's network.
            place: Function that maps our name of a tensor to its `Place`.
            absent: Suffixes of our names for tensors that the other network lacks; they become
                zeros.

        Raises:
            Refused: The tensors differ from those of our network.
        """
        section = part.removesuffix("_ema")
        with explained(UserError, lambda error: Refused(str(error))), torch.device("meta"):
            network = architecture_of(self.architecture).build(
                section, getattr(self, section), **self.shape
            )
        state = self.state[part] = {}
        for key, expected in network.state_dict().items():
            if key.endswith(absent):
                state[key] = torch.zeros(expected.shape)
                continue
            name = place(key).name
            value = source.take(name)
            if [n for n in value.shape if n != 1] != [n for n in expected.shape if n != 1]:
                raise Refused(
                    f"{source.title}'s {name} is {list(value.shape)}, Duet's {key} "
                    f"{list(expected.shape)}"
                )
            state[key] = value.reshape(expected.shape)
        if source.tensors:
            names = ", ".join(list(source.tensors)[:3])
            raise Refused(
                f"{source.title} has {len(source.tensors)} tensors that Duet's network lacks: "
                f"{names}"
            )
        return state


def sizes(resolution: object) -> list[int]:
    """Return [4, 8, ..., resolution].

    Raises Refused unless `resolution` is a power of two from 8 to 4096.
    """
    if type(resolution) is not int or not 8 <= resolution <= 4096 or resolution & (resolution - 1):
        raise Refused(
            f"a resolution of {resolution!r}; Duet's networks have a power of two from 8 up"
        )
    return [2**k for k in range(2, resolution.bit_length())]


def number(value: object, name: str) -> int:
    """Return `value` if it is a whole number from 0 to 2^20, else raise Refused."""
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise Refused(f"{name} is {value!r}, not a whole number in range")
    return value
