"""Apply TrivialAugment (2103.10158): to each image one of fourteen operations, at random strength.

Operations, strengths and rounding are those of torchvision's TrivialAugmentWide on uint8 tensors
(nearest neighbour, black outside). Operations without a strength are torchvision's functions. The
others are implemented here, because torchvision's functions take one strength for a whole batch.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import autocontrast, equalize, rgb_to_grayscale

from duetgan.utils.machine import upload
from duetgan.utils.seeding import Key, numpy_generator

BINS = 31  # number of strengths of an operation
# Operations with positive or negative strength, and its maximum (table 1 of the paper, column
# "wide", as in torchvision). The geometric ones are contiguous: they are applied in one pass.
SIGNED = {
    "shear_x": 0.99,
    "shear_y": 0.99,
    "translate_x": 32.0,
    "translate_y": 32.0,
    "rotate": 135.0,
}
SIGNED |= dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.99)
KINDS = ("identity", *SIGNED, "posterize", "solarize", "autocontrast", "equalize")


FLOAT = torch.float32  # of the strengths, as in torchvision, independent of torch's default
STRENGTHS = (
    torch.stack([torch.linspace(0, SIGNED.get(kind, 0.0), BINS, dtype=FLOAT) for kind in KINDS])
    .double()
    .numpy()
)
# number of bits that posterize keeps
STRENGTHS[KINDS.index("posterize")] = (
    8 - torch.arange(BINS, dtype=FLOAT) / ((BINS - 1) / 6)
).round()
# fraction of the range above which solarize inverts values
STRENGTHS[KINDS.index("solarize")] = torch.linspace(1, 0, BINS, dtype=FLOAT)


class Draws(NamedTuple):
    """The drawn operation and strength for each image.

    The arrays are on the host, so that counting the images of an operation does not wait for the
    device.
    """

    kinds: np.ndarray  # int64 [n], positions in KINDS
    strengths: np.ndarray  # float64 [n], signed


def draw(key: tuple[Key, ...], global_batch: int, rows: slice) -> Draws:
    """Draw an operation and a strength for each image of the global batch.

    Returns those of the images `rows`. The draws depend on the seed key `key`.
    """
    numbers = numpy_generator(*key)
    kinds = numbers.integers(len(KINDS), size=global_batch)
    bins = numbers.integers(BINS, size=global_batch)
    signs = 1 - 2 * numbers.integers(2, size=global_batch)
    signed = np.isin(kinds, [KINDS.index(kind) for kind in SIGNED])
    strengths = STRENGTHS[kinds, bins] * np.where(signed, signs, 1)
    return Draws(kinds[rows], strengths[rows])


def trivial_augment(
    images: Tensor,  # uint8 [n, 1 or 3, H, W]
    draws: Draws,
) -> Tensor:
    """Apply to each image its drawn operation, and return the images, uint8 [n, C, H, W].

    Raises ValueError for images that are not uint8.
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"TrivialAugment takes uint8 images, not {images.dtype}")
    order = np.argsort(draws.kinds, kind="stable")
    kinds, strengths = draws.kinds[order], draws.strengths[order]
    rows = upload(torch.from_numpy(order), images.device)
    augmented = images[rows].contiguous()
    factors = upload(torch.from_numpy(strengths.astype(np.float32)), images.device)
    factors = factors[:, None, None, None]
    first, last = np.searchsorted(kinds, [KINDS.index("shear_x"), KINDS.index("rotate") + 1])
    if last > first:
        height, width = images.shape[2:]
        maps = np.empty((last - first, 2, 3), np.float32)
        for row in range(first, last):
            maps[row - first] = _inverse_map(KINDS[kinds[row]], strengths[row], height, width)
        geometric = augmented[first:last]
        augmented[first:last] = _warp(geometric, upload(torch.from_numpy(maps), images.device))
    for number in range(KINDS.index("rotate") + 1, len(KINDS)):
        first, last = np.searchsorted(kinds, [number, number + 1])
        if last > first:
            operation = _COLOUR[KINDS[number]]
            augmented[first:last] = operation(augmented[first:last], factors[first:last])
    result = torch.empty_like(augmented)
    result[rows] = augmented
    return result


# --- geometry


def _inverse_map(kind: str, strength: float, height: int, width: int) -> list[list[float]]:
    """Return the matrix [2, 3] by which a geometric operation finds the source of each pixel.

    It maps (x, y, 1), the position of a pixel in the result, to the position (x', y') in the
    original image. Positions are in px from the centre. `kind` is the name of the operation, such
    as "rotate".
    """
    match kind:
        case "shear_x":  # about the upper left corner
            return [[1, strength, strength * height / 2], [0, 1, 0]]
        case "shear_y":
            return [[1, 0, 0], [strength, 1, strength * width / 2]]
        case "translate_x":
            return [[1, 0, -int(strength)], [0, 1, 0]]
        case "translate_y":
            return [[1, 0, 0], [0, 1, -int(strength)]]
    # rotation, anticlockwise
    sine, cosine = np.sin(np.radians(strength)), np.cos(np.radians(strength))
    return [[cosine, -sine, 0], [sine, cosine, 0]]


def _warp(images: Tensor, maps: Tensor) -> Tensor:
    """Map the pixels of each image by its matrix in `maps`, [n, 2, 3] (see `_inverse_map`).

    Each pixel of the result has the value of the input pixel nearest to its source position. It is
    black if that position is outside the image.
    """
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2
    maps = maps[:, :, :, None, None]
    source = maps[:, :, 0] * x + maps[:, :, 1] * y[:, None] + maps[:, :, 2]  # [n, 2, H, W]
    column = (source[:, 0] + (width - 1) / 2).round().long()
    row = (source[:, 1] + (height - 1) / 2).round().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = torch.where(inside, row * width + column, 0)[:, None].expand(
        -1, images.shape[1], -1, -1
    )
    return images.flatten(2).gather(2, index.flatten(2)).view(images.shape) * inside[:, None]


# --- colour: images uint8 [n, C, H, W], factors float32 [n, 1, 1, 1]; with a factor of 0 the
# operations of SIGNED change nothing


def _to_bytes(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.uint8)


def _extrapolate(images: Tensor, origin: Tensor, factors: Tensor) -> Tensor:
    """Move the images' values away from `origin`, by `factors` times their distance from it."""
    return _to_bytes(images * (1 + factors) - origin * factors)


def _color(images: Tensor, factors: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    return _extrapolate(images, rgb_to_grayscale(images).float(), factors)


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    mean = rgb_to_grayscale(images).mean((1, 2, 3), keepdim=True, dtype=torch.float32)
    return _extrapolate(images, mean, factors)


def _sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Move values away from their 3x3 blur, by `factors` times their distance from it.

    The blur has weight 5 in the centre and 1 around it. Pixels at the border are not changed.
    """
    height, width = images.shape[2:]
    if height <= 2 or width <= 2:
        return images
    values = images.float()
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    total = rows[:, :, :, :-2] + rows[:, :, :, 1:-1] + rows[:, :, :, 2:]
    middle = values[:, :, 1:-1, 1:-1]
    blurred = ((total + 4 * middle) / 13).round_()
    middle += (middle - blurred) * factors
    return _to_bytes(values)


_COLOUR = {
    "brightness": lambda images, factors: _to_bytes(images * (1 + factors)),
    "color": _color,
    "contrast": _contrast,
    "sharpness": _sharpness,
    # keeps the highest `bits` bits
    "posterize": lambda images, bits: images & (256 - torch.exp2(8 - bits)).to(torch.uint8),
    "solarize": lambda images, level: torch.where(images >= 255 * level, 255 - images, images),
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: equalize(images),
}
