"""Define an encoded image that is ready to be stored, and the layout that a file's images share."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from duetgan.data.lmdb.format import check_encoding, check_sides
from duetgan.utils.image_spec import ImageSpec, PixelFormat


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The form in which all images of a file are stored.

    Raises ValueError for resolutions or an encoding that do not fit the images.
    """

    spec: ImageSpec  # at the largest resolution; without a size for images of individual sizes
    resolutions: tuple[int, ...]  # shorter sides in px, ascending, each twice the previous one
    encoding: str = "raw"
    ranged: bool = True  # False: the writer finds low and high of `spec` (`value_range`)

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
        """Return the layout of a file whose images have the size and format `image`.

        With `smallest`, each image is also stored at half its size, at a quarter of it, and so on,
        until its shorter side is `smallest` px. Raises ValueError if the size cannot be halved down
        to that.
        """
        sides = [image.side]
        while smallest is not None and sides[0] > smallest and sides[0] % 2 == 0:
            sides.insert(0, sides[0] // 2)
        if smallest is not None and sides[0] != smallest:
            raise ValueError(f"{image.side} px cannot be halved down to {smallest} px")
        return cls(spec=image, resolutions=tuple(sides), encoding=encoding, ranged=ranged)

    @property
    def document(self) -> dict[str, Any]:
        """The fields of Meta that describe the layout."""
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
    """An image that is encoded at every resolution, with its statistics."""

    label: int
    entries: np.ndarray  # ENTRY [resolutions]
    payloads: tuple[bytes, ...]  # one for each resolution
    # [2, C]: sums of the values and of their squares, at the largest resolution; int64, or float64
    sums: np.ndarray
    pixels: int  # number of pixels in `sums`
    signature: np.ndarray  # SIGNATURE [1]
    digest: bytes = b""  # SHA-256 of the image in its source; empty: not computed
    # smallest and largest value, see `value_ends`; not computed for 8 bits
    ends: tuple[float, float] = (0.0, 0.0)


def value_ends(image: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value of an image of 16 bits or floats.

    For floats these are the quantiles 0.001 and 0.999 over all channels.
    """
    if image.dtype == np.float32:
        low, high = np.quantile(image, (0.001, 0.999))
        return float(low), float(high)
    return float(image.min()), float(image.max())


def value_range(depth: str, low: float, high: float) -> tuple[float, float]:
    """Return the range (low, high) of the values in a file's pixel format.

    `low` and `high` are the smallest and the largest value of the file's images. For uint16, the
    range is 0 to 2^b - 1, where b is the number of bits of `high`. All parts of a data set of
    12-bit images then have the same range. For floats, the range is `low` to `high`; if both are
    equal, `high` is increased by 1.
    """
    if depth == "uint16":
        return 0.0, float((1 << max(1, int(high).bit_length())) - 1)
    return low, high if high > low else low + 1


def mean_and_std(
    sums: np.ndarray, pixels: int, low: float, high: float
) -> tuple[list[float], list[float]]:
    """Return the mean and the population standard deviation of the values in each channel.

    Both are scaled so that low..high becomes [0, 1]. `sums`, [2, C], has the sums of the values and
    of their squares over `pixels` pixels.
    """
    mean, square = sums / pixels
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    return ((mean - low) / (high - low)).tolist(), (deviation / (high - low)).tolist()
