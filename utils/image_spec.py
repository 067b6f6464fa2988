"""What images are: their size and channels. One description, asked by all: packed files, networks, samples, exports."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import Field

from duetgan.utils.errors import UserError

SIDE = "(?:[4-9]|[1-9][0-9]{1,4})"
SIZE = f"{SIDE}x{SIDE}"  # width x height, as image tools write it
Rectangle = Annotated[str, Field(pattern=f"^{SIZE}$", examples=["96x64"])]
# A size as configurations and files hold it: the side of squares in px, or "96x64" (width x height) of rectangles.
Resolution = Annotated[int, Ge(4)] | Rectangle


@dataclass(frozen=True)
class ImageSpec:
    """Images of `channels` x `height` x `width` values; height and width are 0 where they have sizes of their own.

    A pyramid's levels and the stages of growing networks go by their shorter side, which `at` takes.
    """

    channels: int
    height: int  # px
    width: int

    @classmethod
    def of(cls, channels: int, resolution: int | str) -> "ImageSpec":
        """Of a size as configurations hold it. Raises UserError for text that is no size."""
        if isinstance(resolution, int):
            return cls(channels, resolution, resolution)
        if not re.fullmatch(SIZE, resolution):
            raise UserError(f"size {resolution}: give a side in px, or width x height such as 96x64")
        width, height = map(int, resolution.split("x"))
        return cls(channels, height, width)

    @classmethod
    def read(cls, shape: Mapping[str, Any]) -> "ImageSpec":
        """From what a checkpoint says of its networks: `channels` and `resolution`."""
        return cls.of(shape["channels"], shape["resolution"])

    @property
    def resolution(self) -> int | str:
        """The size as configurations hold it."""
        return self.height if self.height == self.width else f"{self.width}x{self.height}"

    @property
    def side(self) -> int:
        """The shorter one, px."""
        return min(self.height, self.width)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, px."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W]."""
        return self.channels, self.height, self.width

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def at(self, side: int) -> "ImageSpec":
        """The same images scaled to another shorter side; ValueError where the longer one would be no whole number."""
        height, width = (length * side for length in self.size)
        if height % (self.side or 1) or width % (self.side or 1):
            raise ValueError(f"{self} cannot be scaled to a shorter side of {side} px")
        return self if side == self.side else ImageSpec(self.channels, height // self.side, width // self.side)

    def holds(self, size: tuple[int, int]) -> bool:
        """Whether neither height nor width of `size` is larger."""
        return self.height >= size[0] and self.width >= size[1]

    def __str__(self) -> str:
        return f"{self.resolution} px"
