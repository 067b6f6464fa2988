"""Corruptions of images, such as blur, at five strengths.

A corruption is a pure function of image, strength, seed and index. All corruptions follow Hendrycks
and Dietterich (1903.12261). A corruption has an amount for each strength, such as the width of a
blur. The amounts for images of 32 px are those of CIFAR-10-C; for brightness they are those of
ImageNet-C. For other sizes, the amounts are scaled so that an image looks about as corrupted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg
from torch import Tensor

from duetgan.metrics.intervals import wilson
from duetgan.metrics.protocol import Document
from duetgan.utils.seeding import numpy_generator

SIDE = 32  # image size in px that the amounts below are for
STRENGTHS = 5
Corrupt = Callable[[np.ndarray, float, int, int], np.ndarray]
"""A function that corrupts an image.

Its arguments are the image, uint8 [C, H, W], the amount, a seed, and the image's index in the file.
It returns the corrupted image.
"""


@dataclass(frozen=True)
class Corruption:
    """A kind of corruption, such as a blur, and its amount at each strength."""

    amounts: Sequence[float]  # the amount at each strength for images of SIDE px, weakest first
    unit: str  # unit of the amounts
    power: float  # amounts scale with (side / SIDE) ** power
    corrupt: Corrupt
    largest: float = math.inf  # limit of the scaled amount

    def amount(self, strength: int, side: int) -> float:
        """Return the amount of the corruption, such as the width of a blur, at a strength.

        `strength` is 1 to 5; `side` is the shorter side of the images in px.
        """
        return min(self.largest, self.amounts[strength - 1] * (side / SIDE) ** self.power)

    def __call__(self, image: np.ndarray, strength: int, *, seed: int, index: int) -> np.ndarray:
        """Return the corrupted image, uint8 [C, H, W]. Noise depends only on `seed` and `index`."""
        return self.corrupt(image, self.amount(strength, min(image.shape[1:])), seed, index)


def _as_bytes(values: np.ndarray) -> np.ndarray:
    return values.round().clip(0, 255).astype(np.uint8)


def _blur(image: np.ndarray, sigma: float, _seed: int, _index: int) -> np.ndarray:
    """Blur with a Gaussian of standard deviation `sigma` px; edges are mirrored."""
    from scipy.ndimage import gaussian_filter  # imported here because SciPy is slow to import

    return _as_bytes(gaussian_filter(image.astype(np.float64), (0, sigma, sigma), mode="reflect"))


def _noise(image: np.ndarray, deviation: float, seed: int, index: int) -> np.ndarray:
    """Add Gaussian noise of standard deviation `deviation` * 255 to every value.

    The noise is drawn with the key (seed, "eval", "noise", index). An image has the same noise at
    all strengths, only scaled.
    """
    field = numpy_generator(seed, "eval", "noise", index).standard_normal(image.shape)
    return _as_bytes(image + 255 * deviation * field)


def _jpeg(image: np.ndarray, quality: float, _seed: int, _index: int) -> np.ndarray:
    """Encode the image as JPEG of the given quality, and decode it.

    Colours have half the resolution in the JPEG file.
    """
    space = "RGB" if len(image) == 3 else "GRAY"
    pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
    colours = "420" if len(image) == 3 else "Gray"
    encoded = simplejpeg.encode_jpeg(
        pixels, quality=max(1, round(quality)), colorspace=space, colorsubsampling=colours
    )
    return simplejpeg.decode_jpeg(encoded, colorspace=space).transpose(2, 0, 1)


def _brightness(image: np.ndarray, increase: float, _seed: int, _index: int) -> np.ndarray:
    """Add the fraction `increase` of the full range to every value."""
    return _as_bytes(image + 255 * increase)


def _contrast(image: np.ndarray, factor: float, _seed: int, _index: int) -> np.ndarray:
    """Multiply every value's difference from its channel's mean by `factor`."""
    mean = image.mean((1, 2), keepdims=True)
    return _as_bytes(mean + factor * (image - mean))


CORRUPTIONS = {
    "blur": Corruption((0.4, 0.6, 0.7, 0.8, 1.0), "px", 1.0, _blur),
    "noise": Corruption((0.04, 0.06, 0.08, 0.09, 0.10), "of the range", 0.5, _noise),
    "jpeg": Corruption((80, 65, 58, 50, 40), "quality", -0.6, _jpeg, 95),
    "brightness": Corruption((0.1, 0.2, 0.3, 0.4, 0.5), "of the range", 0.0, _brightness),
    "contrast": Corruption(
        (0.75, 0.5, 0.4, 0.3, 0.15), "of the distance from the mean", 0.0, _contrast
    ),
}


def robustness(hits: Tensor, n: int, side: int) -> Document:
    """Return the accuracy under each corruption and strength.

    Args:
        hits: Number of correct predictions, int64 [corruptions, STRENGTHS].
        n: Number of images.
        side: Shorter side of the images in px.

    Returns:
        A dict with `n`; `accuracy`, the mean over all corruptions and strengths; and `corruptions`,
        a dict from the name of a corruption to its `unit` and `strengths`. `strengths` is a list of
        dicts with `amount`, `accuracy` and `accuracy_interval`, weakest first.
    """
    rows = {}
    for (name, corruption), counts in zip(CORRUPTIONS.items(), hits.tolist(), strict=True):
        amounts = [corruption.amount(strength, side) for strength in range(1, len(counts) + 1)]
        strengths = [
            {"amount": amount, "accuracy": count / n, "accuracy_interval": wilson(count, n)}
            for amount, count in zip(amounts, counts, strict=True)
        ]
        rows[name] = {"unit": corruption.unit, "strengths": strengths}
    return {"n": n, "accuracy": int(hits.sum()) / (n * hits.numel()), "corruptions": rows}
