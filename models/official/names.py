"""What the tables of other programs' names share: a network of theirs, taken tensor by tensor into one of ours, and
one of ours by their names. A table serves both ways.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.layers import TAPS
from models.official.unpickle import Refused

FILTER = torch.outer(torch.tensor(TAPS), torch.tensor(TAPS)) / sum(TAPS) ** 2  # of resampling, [4, 4]


class Place(NamedTuple):
    """Where a tensor of ours is in their network, and the dimensions of size 1 that it has more there (below 0: less)
    before and after the others.
    """

    name: str
    leading: int = 0
    trailing: int = 0

    def from_theirs(self, x: Tensor) -> Tensor:
        """Theirs in our form."""
        return _reshaped(x, -self.leading, -self.trailing)

    def from_ours(self, x: Tensor) -> Tensor:
        """Ours in their form."""
        return _reshaped(x, self.leading, self.trailing)


Table = dict[str, Place]  # by our names


def _reshaped(x: Tensor, leading: int, trailing: int) -> Tensor:
    for dimension, count in ((0, leading), (-1, trailing)):
        for _ in range(abs(count)):
            x = x.unsqueeze(dimension) if count > 0 else x.squeeze(dimension)
    return x


def by_their_names(state: Mapping[str, Tensor], table: Table, filters: Iterable[str], gain: float = 1.0) -> Any:
    """name -> tensor, contiguous float32, of a network of theirs; the resampling filters, times `gain`, included."""
    found = {place.name: place.from_ours(state[ours].detach().cpu().float()) for ours, place in table.items()}
    found |= dict.fromkeys(filters, gain * FILTER)
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in found.items()}


@dataclass
class Converted:
    """A GAN in our names: what a checkpoint holds of it."""

    architecture: str  # of models.registry
    shape: dict[str, int]  # resolution, channels, classes
    generator: dict[str, Any]  # its configuration
    discriminator: dict[str, Any]
    state: dict[str, dict[str, Tensor]]  # generator_ema, and where the file has them generator, discriminator
    notes: list[str] = field(default_factory=list)  # what a person should know


class Source:
    """The tensors of one of their networks. What is taken is gone, so that nothing can be left over unnoticed."""

    def __init__(self, tensors: Mapping[str, Tensor], what: str) -> None:
        self.tensors, self.what = dict(tensors), what

    def take(self, name: str) -> Tensor:
        """The tensor of that name, as contiguous float32. Refused where it is missing or not finite."""
        if name not in self.tensors:
            raise Refused(f"{self.what} has no {name}")
        value = self.tensors.pop(name)
        if not value.is_floating_point():
            raise Refused(f"{self.what}'s {name} is of {value.dtype}")
        value = value.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
        if not torch.isfinite(value).all():
            raise Refused(f"{self.what}'s {name} is not finite")
        return value

    def take_all(self, table: Table) -> dict[str, Tensor]:
        """What the table names, by our names."""
        return {ours: place.from_theirs(self.take(place.name)) for ours, place in table.items()}

    def drop_filters(self, suffix: str, gains: tuple[float, ...] = (1.0,)) -> None:
        """Take the resampling filters off; each must be [1, 3, 3, 1] times one of `gains`."""
        for name in [name for name in self.tensors if name.endswith(suffix)]:
            found = self.take(name).squeeze()
            if found.shape != FILTER.shape or not any(torch.allclose(found, gain * FILTER) for gain in gains):
                raise Refused(f"{self.what}'s {name} is another filter than [1, 3, 3, 1], which Duet has not")

    def done(self) -> None:
        """Refused where tensors are left over: the network has parts that ours lacks."""
        if self.tensors:
            names = ", ".join(list(self.tensors)[:3])
            raise Refused(f"{self.what} has {len(self.tensors)} tensors that Duet's network lacks: {names}")


def sizes(resolution: Any) -> list[int]:
    """4, 8, ... up to a resolution that is a power of two from 8 to 4096."""
    if type(resolution) is not int or not 8 <= resolution <= 4096 or resolution & (resolution - 1):
        raise Refused(f"a resolution of {resolution!r}; Duet's networks have a power of two from 8 up")
    return [2**k for k in range(2, int(math.log2(resolution)) + 1)]


def number(value: Any, name: str) -> int:
    """A whole number from 0 up."""
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise Refused(f"{name} is {value!r}, not a whole number in range")
    return value
