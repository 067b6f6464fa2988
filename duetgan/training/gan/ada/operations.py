"""The operations of adaptive discriminator augmentation, in groups.

Source: Karras et al. 2020, 2006.06676, appendix B. The functions are pure functions of images,
random draws and the probability p. p is a tensor, so the host does not wait for its value. An
operation applies to an image if its uniform draw for this image is below p; otherwise it changes no
bit.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duetgan.training.gan.ada.warp import copy_pixels, reflect, warp

MAX_SHIFT = 0.125  # largest shift by whole pixels, as a fraction of each side
SCALE = 0.2  # standard deviation of log2 of isotropic and anisotropic scale
SHIFT = 0.125  # standard deviation of the fractional shift, as a fraction of each side
BRIGHTNESS = 0.2  # standard deviation, on a scale from -1 to 1
# standard deviations of log2 of the factor
CONTRAST = 0.5
SATURATION = 1.0
BAND_GAIN = 1.0
# expected fraction of an image's power in each band, lowest first
BAND_POWER = (10 / 13, 1 / 13, 1 / 13, 1 / 13)
NOISE = 0.1  # standard deviation of the half-normal distribution of the noise's standard deviation
CUTOUT = 0.5  # size of the cut-out rectangle, as a fraction of each side

# Right half of the Lagrange half-band filter of order 4, which is sym2 applied forwards and
# backwards, as in the filter bank of the paper.
HALF_BAND_TAPS = (16 / 32, 9 / 32, 0.0, -1 / 32)


class GroupDraws(NamedTuple):
    """The random draws of a group of operations for B images."""

    # [B, operations] uniform in [0, 1): an operation is applied where its value is below p
    chance: Tensor
    uniform: Tensor  # [B, u] uniform in [0, 1)
    normal: Tensor  # [B, v] N(0, 1)
    pixels: Tensor | None  # [B, C, H, W] N(0, 1), for the noise

    def rows(self, rows: slice, dtype: torch.dtype) -> "GroupDraws":
        """Return the draws for the images at `rows`; all but `chance` are converted to `dtype`."""
        pixels = None if self.pixels is None else self.pixels[rows].to(dtype)
        return GroupDraws(
            self.chance[rows], self.uniform[rows].to(dtype), self.normal[rows].to(dtype), pixels
        )


Draws = dict[str, GroupDraws]  # group -> draws for a global batch, which do not depend on p

# Group -> how many numbers are drawn for an image: one per operation, other uniform numbers, normal
# numbers. The comments list the purpose of each number in the same order.
DRAWS = {
    "blit": (3, 4, 0),  # flip, turn, shift; mirrored or not, quarter turns, x and y shifts
    # scale, turn, anisotropic scale, turn, shift; two angles; two scales, x and y shifts
    "geometry": (5, 2, 4),
    # brightness, contrast, luma flip, hue, saturation; flipped or not, hue angle; three strengths
    "colour": (5, 2, 3),
    "filter": (4, 0, 4),  # one operation per frequency band; gains
    "noise": (1, 0, 1),  # noise; strength
    "cutout": (1, 2, 0),  # cutout; x and y of the centre
}


def blit_inverse(draws: GroupDraws, p: Tensor, size: Sequence[int]) -> Tensor:
    """Return the inverse, [n, 3, 3], of the transformation of each image by the group "blit".

    `size` is the height and width of the images in px. The operations are left-right flip, turn by
    a multiple of 90 degrees and shift by whole pixels, in this order. As in the paper, half of the
    applied flips and a quarter of the applied turns change nothing. All entries are exact.
    """
    flips, turns, shifts = (draws.chance < p).unbind(1)
    flipped, quarters, across, down = draws.uniform.unbind(1)
    sign = 1 - 2 * (flips & (flipped >= 0.5)).to(flipped)
    quarter = torch.where(turns, (4 * quarters).floor(), 0)
    cos = (quarter == 0).to(sign) - (quarter == 2).to(sign)
    sin = (quarter == 1).to(sign) - (quarter == 3).to(sign)
    x = torch.where(shifts, ((2 * across - 1) * (MAX_SHIFT * size[1])).round(), 0)
    y = torch.where(shifts, ((2 * down - 1) * (MAX_SHIFT * size[0])).round(), 0)
    return compose(
        _matrix([[sign, 0, 0], [0, 1, 0]]), _matrix([[cos, sin, 0], [-sin, cos, 0]]), _shift(-x, -y)
    )


def geometry_inverse(draws: GroupDraws, p: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the inverse, [n, 3, 3], of the transformation of each image by the group "geometry".

    Also returns a bool tensor [n], True for images to which at least one operation applies. The
    operations are isotropic scale, turn, anisotropic scale, turn and shift, in this order. Each
    turn has the probability 1 - sqrt(1 - p), so that at least one turn has the probability p.
    `size` is the height and width of the images in px.
    """
    turned = 1 - (1 - p).sqrt()
    happens = draws.chance < torch.stack([p, turned, p, turned, p])
    scaled, first, stretched, second, shifted = happens.unbind(1)
    scale, stretch, x, y = draws.normal.unbind(1)
    scale = torch.exp2(torch.where(scaled, -SCALE * scale, 0))
    stretch = torch.exp2(torch.where(stretched, -SCALE * stretch, 0))
    angles = (2 * draws.uniform - 1) * math.pi
    x = torch.where(shifted, -SHIFT * size[1] * x, 0)
    y = torch.where(shifted, -SHIFT * size[0] * y, 0)
    inverse = compose(
        _matrix([[scale, 0, 0], [0, scale, 0]]),
        _turn_back(torch.where(first, angles[:, 0], 0)),
        _matrix([[stretch, 0, 0], [0, 1 / stretch, 0]]),
        _turn_back(torch.where(second, angles[:, 1], 0)),
        _shift(x, y),
    )
    return inverse, happens.any(dim=1)


def move(
    images: Tensor,  # [n, C, H, W]
    blit: Tensor | None,  # [n, 3, 3] inverse
    # [n, 3, 3] inverse of the transformation that follows blit's, and bool [n]
    geometry: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return images after the groups "blit" and "geometry", which are applied in one resampling.

    Images that "geometry" changes are warped. The pixels of the other images are copied.
    """
    copied = images if blit is None else copy_pixels(images, blit)
    if geometry is None:
        return copied
    inverse, moved = geometry
    return where_chosen(
        moved, warp, images, copied, inverse if blit is None else compose(blit, inverse)
    )


def colour_matrix(draws: GroupDraws, p: Tensor, channels: int) -> Tensor:
    """Return a homogeneous colour matrix for each image, [n, 4, 4], for the group "colour".

    The operations are brightness, contrast, luma flip, hue and saturation, in this order. Hue and
    saturation transform colours around the grey axis v = (1, 1, 1) / sqrt(3), so they are left out
    for grey images. For C channels other than 1 and 3 the matrices are [n, C, C + 1], and
    v = (1, ..., 1) / sqrt(C). Hue is then left out, because it is a turn in three dimensions.
    """
    brightened, contrasted, inverted, turned, saturated = (draws.chance < p).unbind(1)
    brightness, contrast, saturation = draws.normal.unbind(1)
    light = torch.where(brightened, BRIGHTNESS * brightness, 0)
    gain = torch.exp2(torch.where(contrasted, CONTRAST * contrast, 0))
    sign = 1 - 2 * (inverted & (draws.uniform[:, 0] >= 0.5)).to(gain)
    if channels not in (1, 3):
        along = gain * sign
        across = gain * torch.exp2(torch.where(saturated, SATURATION * saturation, 0))
        square = across[:, None, None] * torch.eye(channels, dtype=gain.dtype, device=gain.device)
        square = square + ((along - across) / channels)[:, None, None]
        return torch.cat([square, (along * light)[:, None, None].expand(-1, channels, 1)], dim=2)
    brighter = _matrix(
        [[gain, 0, 0, gain * light], [0, gain, 0, gain * light], [0, 0, gain, gain * light]]
    )
    matrix = compose(_about_grey(sign, torch.ones_like(sign)), brighter)
    if channels == 1:
        return matrix
    angle = torch.where(turned, (2 * draws.uniform[:, 1] - 1) * math.pi, 0)
    vivid = _about_grey(
        torch.ones_like(angle), torch.exp2(torch.where(saturated, SATURATION * saturation, 0))
    )
    return compose(vivid, _turn_about_grey(angle), matrix)


def recolour(images: Tensor, matrix: Tensor, alpha: bool) -> Tensor:
    """Apply colour matrices to every pixel of images [n, C, H, W].

    Images [n, 1, H, W] are treated as grey, with homogeneous matrices [n, 4, 4].

    With `alpha`, the last channel is the opacity a, which does not change. The other channels x are
    colours s multiplied by a: x + 1 = a (s + 1). The matrix applies to s: s' = M s + b. From this
    follows x' = M x + b + (1 - a) (M 1 - 1 - b).
    """
    channels = images.shape[1] - alpha
    if alpha:
        shift = (matrix[:, :channels, :-1].sum(2) - 1 - matrix[:, :channels, -1])[:, :, None, None]
        colours = recolour(images[:, :-1], matrix, False) + (1 - images[:, -1:]) / 2 * shift
        return torch.cat([colours, images[:, -1:]], dim=1)
    if channels == 1:  # All rows of the matrix have the same sum.
        gain, shift = matrix[:, 0, :3].sum(1), matrix[:, 0, 3]
        return images * gain[:, None, None, None] + shift[:, None, None, None]
    colours, shift = matrix[:, :channels, :channels], matrix[:, :channels, channels:]
    return torch.baddbmm(shift, colours, images.flatten(2)).reshape(images.shape)


def amplify_bands(images: Tensor, draws: GroupDraws, p: Tensor) -> Tensor:
    """Multiply four frequency bands of images by log-normal gains, at constant expected power."""
    happens = draws.chance < p  # [n, bands]
    gains = torch.exp2(torch.where(happens, BAND_GAIN * draws.normal, 0))
    powers = [
        1 - fraction + fraction * gain.square()
        for fraction, gain in zip(BAND_POWER, gains.unbind(1), strict=True)
    ]
    gains = gains * torch.stack(powers).prod(0).rsqrt()[:, None]
    filters: dict[int, Tensor] = {}  # side in px -> [n, 1, side, side]
    for side in set(images.shape[2:]):
        bank = _band_matrices(side, images.dtype, images.device)
        filters[side] = torch.tensordot(gains, bank, dims=1)[:, None]
    return where_chosen(
        happens.any(dim=1),
        lambda images, down, across: down @ images @ across.mT,
        images,
        images,
        filters[images.shape[2]],
        filters[images.shape[3]],
    )


def add_noise(images: Tensor, draws: GroupDraws, p: Tensor) -> Tensor:
    """Add white noise whose standard deviation is drawn from a half-normal distribution."""
    assert draws.pixels is not None
    strengths = torch.where(draws.chance < p, draws.normal.abs() * NOISE, 0)
    return images + draws.pixels * strengths[:, :, None, None]


def cut_out(images: Tensor, draws: GroupDraws, p: Tensor, alpha: bool = False) -> Tensor:
    """Set a rectangle of half the height and width to mid-grey or, if `alpha`, to transparent.

    The centre of the rectangle is uniform over the image.
    """

    def inside(size: int, centres: Tensor) -> Tensor:  # [n, size]
        pixels = (torch.arange(size, device=images.device, dtype=images.dtype) + 0.5) / size
        return (pixels - centres[:, None]).abs() < CUTOUT / 2

    rows = inside(images.shape[2], draws.uniform[:, 1])
    columns = inside(images.shape[3], draws.uniform[:, 0])
    hidden = columns[:, None, :] & rows[:, :, None] & (draws.chance < p)[:, :, None]  # [n, H, W]
    return images.masked_fill(hidden[:, None], -1 if alpha else 0)


# Groups that do not move pixels, in the order of application. If the last argument is True, the
# last channel is the opacity, by which the others are multiplied. Filter and noise treat it like a
# colour.
CHANGES: dict[str, Callable[[Tensor, GroupDraws, Tensor, bool], Tensor]] = {
    "colour": lambda images, draws, p, alpha: recolour(
        images, colour_matrix(draws, p, images.shape[1] - alpha), alpha
    ),
    "filter": lambda images, draws, p, _: amplify_bands(images, draws, p),
    "noise": lambda images, draws, p, _: add_noise(images, draws, p),
    "cutout": cut_out,
}


def where_chosen(
    chosen: Tensor,  # bool [n]
    change: Callable[..., Tensor],  # function of images and parameters, independent for each image
    images: Tensor,  # [n, C, H, W]
    unchanged: Tensor,  # [n, C, H, W]
    *parameters: Tensor,  # [n, ...]
) -> Tensor:
    """Return `change(images, *parameters)` for images where `chosen` is True, else `unchanged`."""
    if not _is_readable(chosen):
        return torch.where(chosen[:, None, None, None], change(images, *parameters), unchanged)
    rows = chosen.nonzero()[:, 0]
    if len(rows) == 0:
        return unchanged
    changed = change(images[rows], *(values[rows] for values in parameters))
    return unchanged.index_copy(0, rows, changed)


def _is_readable(values: Tensor) -> bool:
    """Return True if reading `values` on the host does not wait for a device."""
    return values.device.type == "cpu"


def compose(*matrices: Tensor) -> Tensor:
    """Return the product of matrices [n, k, k], without the reduced precision of torch.matmul."""
    return functools.reduce(lambda a, b: (a[:, :, :, None] * b[:, None]).sum(2), matrices)


def _matrix(rows: list[list[Tensor | float]]) -> Tensor:
    """Return homogeneous matrices [n, k + 1, k + 1] from their first k rows.

    An entry is a number, or a tensor [n] with a value for each matrix. The last row is 0, ..., 0, 1.
    """
    entries = [*itertools.chain(*rows), *[0.0] * len(rows), 1.0]
    reference = next(entry for entry in entries if isinstance(entry, Tensor))
    columns = []
    for entry in entries:
        if not isinstance(entry, Tensor):
            entry = torch.full_like(reference, entry)
        columns.append(entry)
    return torch.stack(columns, dim=1).unflatten(1, (len(rows) + 1, len(rows) + 1))


def _shift(x: Tensor, y: Tensor) -> Tensor:
    return _matrix([[1, 0, x], [0, 1, y]])


def _turn_back(angle: Tensor) -> Tensor:
    """Return the inverse of a turn by `angle`, which is clockwise if positive, as y points down."""
    cos, sin = angle.cos(), angle.sin()
    return _matrix([[cos, sin, 0], [-sin, cos, 0]])


def _about_grey(along: Tensor, across: Tensor) -> Tensor:
    """Return the matrices that scale colours along the grey axis v, and at right angles to it.

    The factors are `along` and `across`. A matrix is across I + (along - across) v v^T.
    """
    side = (along - across) / 3
    diagonal = across + side
    return _matrix(
        [[diagonal, side, side, 0], [side, diagonal, side, 0], [side, side, diagonal, 0]]
    )


def _turn_about_grey(angle: Tensor) -> Tensor:
    """Return the matrices that turn colours by `angle` about the grey axis v (Rodrigues' formula).

    A matrix is cos I + sin [v]x + (1 - cos) v v^T.
    """
    cos, sin = angle.cos(), angle.sin() / math.sqrt(3)
    mean = (1 - cos) / 3
    a, b = mean - sin, mean + sin
    c = cos + mean
    return _matrix([[c, a, b, 0], [b, c, a, 0], [a, b, c, 0]])


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _band_matrices(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrices [4, R, R] of band-pass filters for a line of R pixels, lowest band first.

    R is `size`. The line is mirrored at its ends. The sum of the matrices is the identity. With the
    half-band low-pass L(z) the bands above 1/2, 1/4 and 1/8 of the Nyquist frequency are 1 - L(z),
    L(z) (1 - L(z^2)) and L(z) L(z^2) (1 - L(z^4)). The remainder is the lowest band.
    """
    remaining, bands = torch.eye(size, dtype=torch.float64), []
    for dilation in (1, 2, 4):
        low_pass = torch.zeros(size, size, dtype=torch.float64)
        for offset in range(1 - len(HALF_BAND_TAPS), len(HALF_BAND_TAPS)):
            pixels = torch.arange(size)
            low_pass[pixels, reflect(pixels + offset * dilation, size)] += HALF_BAND_TAPS[
                abs(offset)
            ]
        bands.append(remaining - low_pass @ remaining)
        remaining = low_pass @ remaining
    return torch.stack([remaining, *reversed(bands)]).to(device, dtype)
