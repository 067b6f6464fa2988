"""TrivialAugment (2103.10158): one of fourteen operations, at a random strength, on every image; a
batch at once.

Operations, strengths and rounding are those of torchvision's TrivialAugmentWide on uint8 tensors
(nearest neighbour, black outside). Its own functions do those that have no strength; the others
take one for the whole batch.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import autocontrast, equalize, rgb_to_grayscale

from duetgan.utils.memory import upload
from duetgan.utils.seeding import Key, numpy_generator

BINS = 31  # strengths of an operation
# Operations whose strength may be negative, and the greatest one (table 1 of the paper, column
# "wide", as torchvision has it). The geometric ones stand together: they are done in one pass.
SIGNED = {
    "shear_x": 0.99,
    "shear_y": 0.99,
    "translate_x": 32.0,
    "translate_y": 32.0,
    "rotate": 135.0,
}
SIGNED |= dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.99)
KINDS = ("identity", *SIGNED, "posterize", "solarize", "autocontrast", "equalize")


FLOAT = torch.float32  # of the strengths, as torchvision has them, whatever the default is
STRENGTHS = (
    torch.stack([torch.linspace(0, SIGNED.get(kind, 0.0), BINS, dtype=FLOAT) for kind in KINDS])
    .double()
    .numpy()
)
# bits kept
STRENGTHS[KINDS.index("posterize")] = (
    8 - torch.arange(BINS, dtype=FLOAT) / ((BINS - 1) / 6)
).round()
# share of the range: above, inverted
STRENGTHS[KINDS.index("solarize")] = torch.linspace(1, 0, BINS, dtype=FLOAT)


class Draws(NamedTuple):
    """What is done to each image; on the host, where the images of an operation are counted without
    waiting for a device.
    """

    kinds: np.ndarray  # int64 [n], positions in KINDS
    strengths: np.ndarray  # float64 [n], signed


def draw(key: tuple[Key, ...], global_batch: int, rows: slice) -> Draws:
    """The draws of `rows` of a global batch, from those of the whole."""
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
    """Apply to each image its operation: uint8 [n, C, H, W]. Raises ValueError for another type."""
    if images.dtype != torch.uint8:
        raise ValueError(f"TrivialAugment takes uint8 images, not {images.dtype}")
    order = np.argsort(draws.kinds, kind="stable")
    kinds, strengths = draws.kinds[order], draws.strengths[order]
    places = upload(torch.from_numpy(order), images.device)
    done = images[places].contiguous()
    factors = upload(torch.from_numpy(strengths.astype(np.float32)), images.device)[
        :, None, None, None
    ]
    first, last = np.searchsorted(kinds, [KINDS.index("shear_x"), KINDS.index("rotate") + 1])
    if last > first:
        drawn, size = zip(kinds[first:last], strengths[first:last], strict=True), images.shape[2:]
        maps = np.array(
            [_inverse_map(KINDS[kind], strength, *size) for kind, strength in drawn], np.float32
        )
        done[first:last] = _warp(done[first:last], upload(torch.from_numpy(maps), images.device))
    for number in range(KINDS.index("rotate") + 1, len(KINDS)):
        first, last = np.searchsorted(kinds, [number, number + 1])
        if last > first:
            done[first:last] = _COLOUR[KINDS[number]](done[first:last], factors[first:last])
    result = torch.empty_like(done)
    result[places] = done
    return result


# --- geometry


def _inverse_map(kind: str, strength: float, height: int, width: int) -> list[list[float]]:
    """Where an image's pixels come from: [2, 3], (x, y, 1) -> (x', y'), in px from the middle."""
    match kind:
        case "shear_x":  # about the upper left corner
            return [[1, strength, strength * height / 2], [0, 1, 0]]
        case "shear_y":
            return [[1, 0, 0], [strength, 1, strength * width / 2]]
        case "translate_x":
            return [[1, 0, -int(strength)], [0, 1, 0]]
        case "translate_y":
            return [[1, 0, 0], [0, 1, -int(strength)]]
    # of a rotation, anticlockwise
    sine, cosine = np.sin(np.radians(strength)), np.cos(np.radians(strength))
    return [[cosine, -sine, 0], [sine, cosine, 0]]


def _warp(images: Tensor, maps: Tensor) -> Tensor:
    """Every pixel from the nearest one of its map, black from outside."""
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


# --- colour: images uint8 [n, C, H, W], factors float32 [n, 1, 1, 1] (brightness and the like: 0
# changes nothing)


def _to_bytes(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    """(1 + factor) of the image, -factor of the other."""
    return _to_bytes(images * (1 + factors) - other * factors)


def _color(images: Tensor, factors: Tensor) -> Tensor:
    return (
        images
        if images.shape[1] == 1
        else _blend(images, rgb_to_grayscale(images).float(), factors)
    )


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(
        images, rgb_to_grayscale(images).mean((1, 2, 3), keepdim=True, dtype=torch.float32), factors
    )


def _sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Away from, or towards, the 3x3 blur whose middle weighs 5 and whose edge 1; the border stays."""
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
    # the highest `bits`
    "posterize": lambda images, bits: images & (256 - torch.exp2(8 - bits)).to(torch.uint8),
    "solarize": lambda images, share: torch.where(images >= 255 * share, 255 - images, images),
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: equalize(images),
}
