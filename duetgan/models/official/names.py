"""What the readers of other programs' files share: a network of theirs, taken tensor by tensor into
one of ours, and one of ours by their names. A function from our names to theirs serves both ways.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from duetgan.models.layers import TAPS
from duetgan.models.official.unpickle import Refused
from duetgan.models.registry import architecture_of
from duetgan.utils.errors import UserError, explained

# of resampling, [4, 4]
FILTER = torch.outer(torch.tensor(TAPS), torch.tensor(TAPS)) / sum(TAPS) ** 2
# a part of a GAN's state -> NVIDIA's and R3GAN's name of the network
NETWORKS = {"generator": "G", "generator_ema": "G_ema", "discriminator": "D"}


class Place(NamedTuple):
    """Where a tensor of ours is in their network; `ours[view]` is theirs: they differ in dimensions
    of size 1.
    """

    name: str
    view: tuple[Any, ...] = ()


Places = Callable[[str], Place]  # our name of a tensor -> its place


def renamed(name: str, table: Mapping[str, str]) -> str:
    """The name that the first pattern of the whole name expands to; a name that fits none stays."""
    matches = ((re.fullmatch(pattern, name), new) for pattern, new in table.items())
    return next((match.expand(new) for match, new in matches if match), name)


def by_their_names(
    state: Mapping[str, Tensor], place: Places, filters: Iterable[str], gain: float = 1.0
) -> Any:
    """name -> tensor, contiguous float32, of a network of theirs; the resampling filters, times
    `gain`, included.
    """
    tensors = dict.fromkeys(filters, gain * FILTER)
    for ours, value in state.items():
        name, view = place(ours)
        tensors[name] = value.detach().cpu().float()[view]
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}


class Source:
    """The tensors of one of their networks. What is taken is gone, so that nothing can be left over
    unnoticed.
    """

    def __init__(self, tensors: Mapping[str, Tensor], what: str) -> None:
        self.tensors, self.what = dict(tensors), what

    def take(self, name: str) -> Tensor:
        """The tensor of that name, as contiguous float32. Refused where it is missing or not
        finite.
        """
        if name not in self.tensors:
            raise Refused(f"{self.what} has no {name}")
        value = self.tensors.pop(name)
        if not value.is_floating_point():
            raise Refused(f"{self.what}'s {name} is of {value.dtype}")
        value = value.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
        if not torch.isfinite(value).all():
            raise Refused(f"{self.what}'s {name} is not finite")
        return value

    def shape(self, name: str, ndim: int) -> tuple[int, ...]:
        """The shape of a tensor that stays. Refused where it is missing, empty, or has another
        number of dimensions.
        """
        if (
            name not in self.tensors
            or self.tensors[name].ndim != ndim
            or not self.tensors[name].numel()
        ):
            raise Refused(f"{self.what} has no {name} of {ndim} dimensions")
        return tuple(self.tensors[name].shape)

    def drop_filters(self, suffix: str, gains: tuple[float, ...] = (1.0,)) -> None:
        """Take the resampling filters off; each must be [1, 3, 3, 1] times one of `gains`."""
        for name in [name for name in self.tensors if name.endswith(suffix)]:
            value = self.take(name).squeeze()
            if value.shape != FILTER.shape or not any(
                torch.allclose(value, gain * FILTER) for gain in gains
            ):
                raise Refused(
                    f"{self.what}'s {name} is another filter than [1, 3, 3, 1], which Duet has not"
                )


@dataclass
class Converted:
    """A GAN in our names: what a checkpoint holds of it."""

    architecture: str  # of models.registry
    shape: dict[str, int]  # resolution, channels, classes
    generator: dict[str, Any]  # its configuration
    discriminator: dict[str, Any]
    # generator_ema, and where the file has them generator, discriminator
    state: dict[str, dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)  # what a person should know

    def take(
        self, part: str, source: Source, place: Places, absent: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """Their network as the state of `part`, compared with ours of that configuration, built on
        the meta device; tensors of ours that end with one of `absent` are zeros. Refused where it
        is another network.
        """
        section = part.removesuffix("_ema")
        with explained(UserError, lambda why: Refused(str(why))), torch.device("meta"):
            network = architecture_of(self.architecture).build(
                section, getattr(self, section), **self.shape
            )
        state = self.state[part] = {}
        for ours, like in network.state_dict().items():
            if ours.endswith(absent):
                state[ours] = torch.zeros(like.shape)
                continue
            name = place(ours).name
            value = source.take(name)
            there, here = ([n for n in x.shape if n != 1] for x in (value, like))
            if there != here:
                raise Refused(
                    f"{source.what}'s {name} is {list(value.shape)}, Duet's {ours} {list(like.shape)}"
                )
            state[ours] = value.reshape(like.shape)
        if source.tensors:
            names = ", ".join(list(source.tensors)[:3])
            raise Refused(
                f"{source.what} has {len(source.tensors)} tensors that Duet's network lacks: {names}"
            )
        return state


def sizes(resolution: Any) -> list[int]:
    """4, 8, ... up to a resolution that is a power of two from 8 to 4096."""
    if type(resolution) is not int or not 8 <= resolution <= 4096 or resolution & (resolution - 1):
        raise Refused(
            f"a resolution of {resolution!r}; Duet's networks have a power of two from 8 up"
        )
    return [2**k for k in range(2, resolution.bit_length())]


def number(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise Refused(f"{name} is {value!r}, not a whole number in range")
    return value
