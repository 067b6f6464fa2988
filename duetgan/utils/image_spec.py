"""The description of an image format, `ImageSpec`, and its conversions of pixel values.

Packed files, networks, samples and exports all use this description. No other module converts
between the values in files and the values in networks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from duetgan.utils.errors import UserError, explained

if TYPE_CHECKING:  # torch takes seconds to import, and duet pack does not need it
    from torch import Tensor

SIDE = "(?:[4-9]|[1-9][0-9]{1,4})"
SIZE = f"{SIDE}x{SIDE}"  # width x height, as image tools write it
Rectangle = Annotated[str, Field(pattern=f"^{SIZE}$", examples=["96x64"])]
# A size in configurations and files: the side of a square in px, or "96x64" (width x height).
Resolution = Annotated[int, Ge(4)] | Rectangle
Depth = Literal["uint8", "uint16", "float32"]
# Default range of values.
RANGES = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "float32": (0.0, 1.0)}
BYTES = {"uint8": 1, "uint16": 2, "float32": 4}  # per value
MOST_CHANNELS = 32


class PixelFormat(BaseModel):
    """The pixel format of images that are not 8-bit grey or RGB, in packed files and checkpoints.

    Networks see the values `low` and `high` as -1 and 1. None stands for the limits in RANGES.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

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
    """The format of images: channels, size, transparency, and the type and range of the values.

    Height and width are 0 if the images differ in size. Scaled copies of images and the stages of a
    growing network are named by their shorter side (see `at`).
    """

    channels: int  # alpha is one of them
    height: int  # px
    width: int
    alpha: bool = False  # True if the last channel is transparency
    depth: Depth = "uint8"
    low: float = 0.0
    high: float = 255.0

    @classmethod
    def of(
        cls, channels: int, resolution: int | str, pixels: Mapping[str, object] | None = None
    ) -> "ImageSpec":
        """Return the spec for a number of channels, a size and a pixel format.

        Raises UserError for text that is not a size, ValueError for an invalid pixel format.

        Args:
            resolution: the side of a square in px, or width x height such as "96x64".
            pixels: fields of PixelFormat; None: 8-bit values without transparency.
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
        with explained(ValidationError, _first_problem):
            form = PixelFormat.model_validate(pixels)
        return cls(channels, height, width, form.alpha, form.depth, *form.range)

    @classmethod
    def read(cls, shape: Mapping[str, Any]) -> "ImageSpec":
        """Return the spec for a checkpoint's entry `shape`.

        This is a mapping with the keys `channels`, `resolution` and optionally `pixel_format`.
        """
        return cls.of(shape["channels"], shape["resolution"], shape.get("pixel_format"))

    @property
    def resolution(self) -> int | str:
        """Return the size as configs write it: 64, or 96x64 (width x height)."""
        return self.height if self.height == self.width else f"{self.width}x{self.height}"

    @property
    def pixel_format(self) -> dict[str, Any] | None:
        """Return the fields of PixelFormat that differ from their defaults, or None."""
        low, high = RANGES[self.depth]
        defaults = {"low": low, "high": high, "alpha": False, "depth": "uint8"}
        return {
            name: getattr(self, name)
            for name, value in defaults.items()
            if getattr(self, name) != value
        } or None

    @property
    def plain(self) -> bool:
        """Return True for 8-bit grey or RGB, which every image file format can hold."""
        return self.channels in (1, 3) and self.depth == "uint8" and not self.alpha

    def need_plain(self, feature: str) -> None:
        """Raise UserError, which names `feature`, unless the images are 8-bit grey or RGB."""
        if not self.plain:
            raise UserError(
                f"{feature} is for 8-bit grey or RGB, the images are {self.words} (docs/your-data.md)"
            )

    @property
    def deep(self) -> bool:
        """Return True if values have more than 8 bits.

        Augmentations then work on the result of `to_float`.
        """
        return self.depth != "uint8"

    @property
    def colours(self) -> int:
        """The number of channels without alpha."""
        return self.channels - self.alpha

    @property
    def side(self) -> int:
        """The shorter side, px."""
        return min(self.height, self.width)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, px."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.height, self.width

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of one image's values in bytes."""
        return self.values * BYTES[self.depth]

    def at(self, side: int) -> "ImageSpec":
        """Return the spec of these images after they are scaled to a shorter side of `side` px.

        Raises ValueError if the longer side would not be a whole number.
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
        """Return True if the images are at least as high and as wide as `size` (height, width)."""
        return self.height >= size[0] and self.width >= size[1]

    def __str__(self) -> str:
        return f"{self.resolution} px"

    @property
    def title(self) -> str:
        """Return channels and depth as text for people: `RGB`, `grey + alpha, 16 bits`."""
        channels = {1: "grey", 3: "RGB"}.get(
            self.colours, f"{self.colours} channels"
        ) + " + alpha" * self.alpha
        return channels + {"uint8": "", "uint16": ", 16 bits", "float32": ", floats"}[self.depth]

    @property
    def words(self) -> str:
        """Return `title`, followed by the range of deep values: `grey, 16 bits (0 to 4095)`."""
        return self.title + f" ({self.low:g} to {self.high:g})" * self.deep

    # --- values: in files (straight alpha), in networks (premultiplied), on a screen (uint8)

    def to_float(self, images: "Tensor", channels_last: bool = True) -> "Tensor":
        """Scale a file's values [n, C, H, W] to floats in [-1, 1] in torch's default dtype.

        The result is on the device of `images`, in the memory format `channels_last` or contiguous.
        If there is an alpha channel, the colours are multiplied by it (see `premultiplied`).
        """
        import torch

        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        floats = images.to(torch.get_default_dtype(), memory_format=memory_format)
        if floats is images:  # `to` does not copy floats, and the steps below work in place
            floats = images.clone()
        floats = (
            (floats.sub_(self.low) if self.low else floats).div_((self.high - self.low) / 2).sub_(1)
        )
        return premultiplied(floats) if self.alpha else floats

    def from_float(self, images: "Tensor") -> "Tensor":
        """Convert a network's values in [-1, 1], [n, C, H, W], to a file's values of type `depth`.

        If there is an alpha channel, the colours are divided by it; those of fully transparent
        pixels become black. Integer values are rounded. Integer values, and all images with alpha,
        are clipped to `low`..`high`.
        """
        import torch

        floats, half = images.float(), (self.high - self.low) / 2
        if self.alpha:
            opacity = (floats[:, -1:] + 1).clamp(0, 2)
            is_visible = (opacity if self.depth == "float32" else (opacity * half).round()) > 0
            straight = torch.where(
                is_visible, (floats[:, :-1] + 1) / opacity.where(is_visible, 1.0) * 2 - 1, -1.0
            )
            floats = torch.cat([straight, floats[:, -1:]], dim=1)
        values = floats * half + (half + self.low)
        if self.depth == "float32" and not self.alpha:
            return values
        values = values if self.depth == "float32" else values.round()
        return values.clamp(self.low, self.high).to(getattr(torch, self.depth))

    def to_uint8(self, images: "Tensor") -> "Tensor":
        """Scale a file's values from `low`..`high` to uint8; return 8-bit values unchanged."""
        import torch

        if self.depth == "uint8":
            return images
        return (
            ((images.float() - self.low) / (self.high - self.low) * 255)
            .round()
            .clamp(0, 255)
            .to(torch.uint8)
        )


def _first_problem(error: ValidationError) -> ValueError:
    first = error.errors()[0]
    return ValueError(": ".join([*map(str, first["loc"]), first["msg"]]))


def premultiplied(images: "Tensor") -> "Tensor":
    """Return a copy of images with the colours multiplied by alpha (Porter and Duff 1984).

    The images are [n, C, H, W] in [-1, 1]; alpha is the last channel. Transparent pixels become
    black (-1).
    """
    result = images.clone()
    result[:, :-1] = (images[:, :-1] + 1) * ((images[:, -1:] + 1) / 2) - 1
    return result
