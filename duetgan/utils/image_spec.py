"""What images are: their size, channels and values. One description, asked by all: packed files,
networks, samples, exports. What turns values into those that networks take, and back, stands here
and nowhere else.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field, model_validator

from duetgan.utils.config.model import Stored
from duetgan.utils.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and duet pack draws no tensors
    from torch import Tensor

SIDE = "(?:[4-9]|[1-9][0-9]{1,4})"
SIZE = f"{SIDE}x{SIDE}"  # width x height, as image tools write it
Rectangle = Annotated[str, Field(pattern=f"^{SIZE}$", examples=["96x64"])]
# A size as configurations and files hold it: the side of squares in px, or "96x64" (width x height)
# of rectangles.
Resolution = Annotated[int, Ge(4)] | Rectangle
Depth = Literal["uint8", "uint16", "float32"]
# of values, unless another is known
RANGES = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "float32": (0.0, 1.0)}
BYTES = {"uint8": 1, "uint16": 2, "float32": 4}  # a value
MOST_CHANNELS = 32


class PixelFormat(Stored):
    """What the values of images are, as packed files and checkpoints keep it where they are not
    8-bit grey or colours.

    `low` and `high`: the values that networks see as -1 and 1; None: those of RANGES.
    """

    alpha: bool = False  # the last channel is transparency, not multiplied into the others
    depth: Depth = "uint8"
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _check(self) -> "PixelFormat":
        low, high = self.range
        fixed = self.depth == "uint8" or self.alpha
        if not low < high or (fixed and (low, high) != RANGES[self.depth]):
            raise ValueError(
                f"values from {low:g} to {high:g} do not fit {self.depth}{' with alpha' * self.alpha}"
            )
        return self

    @property
    def range(self) -> tuple[float, float]:
        low, high = RANGES[self.depth]
        return low if self.low is None else self.low, high if self.high is None else self.high


@dataclass(frozen=True)
class ImageSpec:
    """Images of `channels` x `height` x `width` values; height and width are 0 where they have
    sizes of their own.

    A pyramid's levels and the stages of growing networks go by their shorter side, which `at`
    takes.
    """

    channels: int  # alpha is one of them
    height: int  # px
    width: int
    alpha: bool = False  # as in PixelFormat
    depth: Depth = "uint8"
    low: float = 0.0
    high: float = 255.0

    @classmethod
    def of(
        cls, channels: int, resolution: int | str, pixels: Mapping[str, Any] | None = None
    ) -> "ImageSpec":
        """Of a size as configurations hold it, and of a PixelFormat's document. Raises UserError
        for text that is no size, ValueError for a document that is none.
        """
        if isinstance(resolution, int):
            width = height = resolution
        elif re.fullmatch(SIZE, resolution):
            width, height = map(int, resolution.split("x"))
        else:
            raise UserError(
                f"size {resolution}: give a side in px, or width x height such as 96x64"
            )
        if pixels is None:
            return cls(channels, height, width)
        form = PixelFormat.read(pixels, "pixel_format")
        return cls(channels, height, width, form.alpha, form.depth, *form.range)

    @classmethod
    def read(cls, shape: Mapping[str, Any]) -> "ImageSpec":
        """From what a checkpoint says of its networks: `channels`, `resolution`, and `pixel_format`
        if it is there.
        """
        return cls.of(shape["channels"], shape["resolution"], shape.get("pixel_format"))

    @property
    def resolution(self) -> int | str:
        """The size as configurations hold it."""
        return self.height if self.height == self.width else f"{self.width}x{self.height}"

    @property
    def pixel_format(self) -> dict[str, Any] | None:
        """What of PixelFormat differs from 8-bit values without transparency, as `of` takes it;
        None: nothing.
        """
        low, high = RANGES[self.depth]
        usual = {"low": low, "high": high, "alpha": False, "depth": "uint8"}
        return {
            name: getattr(self, name)
            for name, value in usual.items()
            if getattr(self, name) != value
        } or None

    @property
    def plain(self) -> bool:
        """Whether they are what any image file has: 8-bit grey or RGB."""
        return self.channels in (1, 3) and self.depth == "uint8" and not self.alpha

    def need_plain(self, what: str) -> None:
        """Raise UserError for images of other kinds: `what` is for 8-bit grey or RGB alone."""
        if not self.plain:
            raise UserError(
                f"{what} is for 8-bit grey or RGB, the images are {self.words} (docs/your-data.md)"
            )

    @property
    def deep(self) -> bool:
        """Whether values have more than 8 bits: augmentations then take those of `to_float`."""
        return self.depth != "uint8"

    @property
    def colours(self) -> int:
        """Channels without alpha."""
        return self.channels - self.alpha

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

    @property
    def nbytes(self) -> int:
        """Of an image's values."""
        return self.values * BYTES[self.depth]

    def at(self, side: int) -> "ImageSpec":
        """The same images scaled to another shorter side; ValueError where the longer one would be
        no whole number.
        """
        height, width = (length * side for length in self.size)
        if height % (self.side or 1) or width % (self.side or 1):
            raise ValueError(f"{self} cannot be scaled to a shorter side of {side} px")
        return (
            self
            if side == self.side
            else replace(self, height=height // self.side, width=width // self.side)
        )

    def holds(self, size: tuple[int, int]) -> bool:
        """Whether neither height nor width of `size` is larger."""
        return self.height >= size[0] and self.width >= size[1]

    def __str__(self) -> str:
        return f"{self.resolution} px"

    @property
    def title(self) -> str:
        """Their channels and depth, for people: `RGB`, `grey + alpha, 16 bits`."""
        channels = {1: "grey", 3: "RGB"}.get(
            self.colours, f"{self.colours} channels"
        ) + " + alpha" * self.alpha
        return channels + {"uint8": "", "uint16": ", 16 bits", "float32": ", floats"}[self.depth]

    @property
    def words(self) -> str:
        """`title`, with the range of deep values: `grey, 16 bits (0 to 4095)`."""
        return self.title + f" ({self.low:g} to {self.high:g})" * self.deep

    # --- values: as files have them (straight alpha), as networks have them (premultiplied), as
    # people see them

    def to_float(self, images: "Tensor", channels_last: bool = True) -> "Tensor":
        """Values [n, C, H, W] as files have them -> [-1, 1] in torch's default dtype, on the
        images' device.

        Colours are multiplied by alpha, see `premultiplied`.
        """
        import torch

        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        floats = images.to(torch.get_default_dtype(), memory_format=memory_format)
        if floats is images:  # floats need not be copied above
            floats = images.clone()
        floats = (
            (floats.sub_(self.low) if self.low else floats).div_((self.high - self.low) / 2).sub_(1)
        )
        return premultiplied(floats) if self.alpha else floats

    def from_float(self, images: "Tensor") -> "Tensor":
        """[-1, 1] -> values as files have them, in their depth; integers are rounded and, as all
        with alpha, clipped to `low` and `high`. Colours of fully transparent pixels are black.
        """
        import torch

        floats, half = images.float(), (self.high - self.low) / 2
        if self.alpha:
            opacity = (floats[:, -1:] + 1).clamp(0, 2)
            shown = (opacity * half).round() > 0 if self.depth != "float32" else opacity > 0
            straight = torch.where(
                shown, (floats[:, :-1] + 1) / opacity.where(shown, 1.0) * 2 - 1, -1.0
            )
            floats = torch.cat([straight, floats[:, -1:]], dim=1)
        values = floats * half + (half + self.low)
        if self.depth == "float32" and not self.alpha:
            return values
        values = values if self.depth == "float32" else values.round()
        return values.clamp(self.low, self.high).to(getattr(torch, self.depth))

    def shown(self, images: "Tensor") -> "Tensor":
        """Values as files have them -> uint8, the window from `low` to `high`; 8-bit values stay as
        they are.
        """
        import torch

        if self.depth == "uint8":
            return images
        return (
            ((images.float() - self.low) / (self.high - self.low) * 255)
            .round()
            .clamp(0, 255)
            .to(torch.uint8)
        )


def premultiplied(images: "Tensor") -> "Tensor":
    """Straight colours and alpha in [-1, 1], [n, C, H, W], alpha last -> colours multiplied by
    alpha (Porter and Duff 1984): transparent pixels are black, which is -1.
    """
    result = images.clone()
    result[:, :-1] = (images[:, :-1] + 1) * ((images[:, -1:] + 1) / 2) - 1
    return result
