"""An image as it is stored, and the layout that all of a file have."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from duetgan.data.lmdb.format import check_encoding, check_sides
from duetgan.utils.image_spec import ImageSpec, PixelFormat


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How every image of a file is stored. Raises ValueError for what does not fit together."""

    spec: ImageSpec  # at the largest resolution; without a size where they have sizes of their own
    resolutions: tuple[int, ...]  # shorter sides in px, ascending, each twice the one before
    encoding: str = "raw"
    ranged: bool = True  # low and high are known; if not, the writer finds them (`value_range`)

    def __post_init__(self) -> None:
        check_sides(self.resolutions, self.encoding, self.spec)
        check_encoding(self.spec, self.encoding)

    @classmethod
    def of(
        cls,
        image: ImageSpec,
        encoding: str = "raw",
        smallest: int | None = None,
        ranged: bool = True,
    ) -> "Layout":
        """For such images, and with `smallest` at half their size and so on down to that shorter
        side.
        """
        sides = [image.side]
        while smallest is not None and sides[0] > smallest and sides[0] % 2 == 0:
            sides.insert(0, sides[0] // 2)
        if smallest is not None and sides[0] != smallest:
            raise ValueError(f"{image.side} px cannot be halved down to {smallest} px")
        return cls(spec=image, resolutions=tuple(sides), encoding=encoding, ranged=ranged)

    @property
    def document(self) -> dict[str, Any]:
        """As Meta has it."""
        size, pixels = self.spec.resolution, self.spec.pixel_format
        return {
            "channels": self.spec.channels,
            "resolutions": list(self.resolutions),
            "size": size if isinstance(size, str) else None,
            "pixel_format": pixels and PixelFormat(**pixels),
            "encoding": self.encoding,
        }


@dataclass(frozen=True)
class Record:
    """An image ready to be stored."""

    label: int
    entries: np.ndarray  # ENTRY [resolutions]
    payloads: tuple[bytes, ...]  # one for each resolution
    # [2, C]: sums of the values and of their squares, at the largest resolution; int64, or float64
    sums: np.ndarray
    pixels: int  # in those sums
    signature: np.ndarray  # SIGNATURE [1]
    digest: bytes = b""  # SHA-256 of the image as its source has it; empty: not known
    enlarged: bool = False  # the image in the source was smaller than asked for
    cut: int = 0  # bits that its values used, of an image of 16 bits a value of which 8 are kept
    on_white: bool = False  # it was transparent, and is stored on a white ground
    # of the values, see `value_ends`; of 8 bits not looked for
    ends: tuple[float, float] = (0.0, 0.0)


def value_ends(image: np.ndarray) -> tuple[float, float]:
    """Where the values of a deep image begin and end: of floats the quantiles 0.001 and 0.999 of
    all channels.
    """
    if image.dtype == np.float32:
        low, high = np.quantile(image, (0.001, 0.999))
        return float(low), float(high)
    return float(image.min()), float(image.max())


def value_range(depth: str, low: float, high: float) -> tuple[float, float]:
    """The low and high of a file whose images' `value_ends` lie within these: of integers 0 and the
    largest number of as many bits, so that 12 bits are known again in each part of a set; of floats
    as they are.
    """
    if depth == "uint16":
        return 0.0, float((1 << max(1, int(high).bit_length())) - 1)
    return low, high if high > low else low + 1


def mean_and_std(
    sums: np.ndarray, pixels: int, low: float = 0.0, high: float = 255.0
) -> tuple[list[float], list[float]]:
    """Per channel, in units of [0, 1], from added `pixel_sums` of so many pixels; the population's
    deviation.
    """
    mean, square = sums / pixels
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    return ((mean - low) / (high - low)).tolist(), (deviation / (high - low)).tolist()
