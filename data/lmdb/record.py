"""An image as it is stored, and the layout that all of a file have."""

from dataclasses import dataclass

import numpy as np

from duetgan.data.lmdb.format import ENCODINGS, check_sides
from duetgan.utils.image_spec import ImageSpec


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How every image of a file is stored. Raises ValueError for what does not fit together."""

    channels: int  # 1 or 3
    resolutions: tuple[int, ...]  # shorter sides in px, ascending, each twice the one before; (0,): sizes of their own
    size: str | None = None  # of the largest, such as 96x64, unless it is square
    encoding: str = "raw"

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS or self.channels not in (1, 3):
            raise ValueError(f"encoding {self.encoding!r} and channels {self.channels} do not fit")
        check_sides(self.resolutions, self.encoding, self.size)

    @classmethod
    def of(cls, image: ImageSpec, encoding: str = "raw", smallest: int | None = None) -> "Layout":
        """For such images, and with `smallest` at half their size and so on down to that shorter side."""
        size, sides = image.resolution, halvings(image.side, smallest)
        named = size if isinstance(size, str) else None
        return cls(channels=image.channels, resolutions=sides, size=named, encoding=encoding)

    @property
    def spec(self) -> ImageSpec:
        """The images at the largest resolution."""
        return ImageSpec.of(self.channels, self.size or self.resolutions[-1])


@dataclass(frozen=True)
class Record:
    """An image ready to be stored."""

    label: int
    entries: np.ndarray  # ENTRY [resolutions]
    payloads: tuple[bytes, ...]  # one for each resolution
    sums: np.ndarray  # int64 [2, C]: sums of the values and of their squares, at the largest resolution
    pixels: int  # in those sums
    signature: np.ndarray  # SIGNATURE [1]
    digest: bytes = b""  # SHA-256 of the image as its source has it; empty: not known
    enlarged: bool = False  # the image in the source was smaller than asked for
    cut: bool = False  # it had 16 bits a value


def halvings(side: int, smallest: int | None) -> tuple[int, ...]:
    """`side`, its half and so on down to `smallest` px (None: `side` alone), ascending.

    Raises ValueError if `side` is not `smallest` times a power of two.
    """
    sides = [side]
    while smallest is not None and sides[0] > smallest and sides[0] % 2 == 0:
        sides.insert(0, sides[0] // 2)
    if smallest is not None and sides[0] != smallest:
        raise ValueError(f"{side} px cannot be halved down to {smallest} px")
    return tuple(sides)


def mean_and_std(sums: np.ndarray, pixels: int) -> tuple[list[float], list[float]]:
    """Per channel, in units of [0, 1], from added `pixel_sums` of so many pixels; the population's deviation."""
    mean, square = sums / pixels
    return (mean / 255).tolist(), (np.sqrt(np.maximum(square - mean**2, 0)) / 255).tolist()
