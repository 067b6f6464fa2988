"""The operations of adaptive discriminator augmentation (Karras et al. 2020, 2006.06676, appendix
B), group by group.

Pure functions of images, given draws and the probability p (a tensor, so that nothing waits for its
value). An operation happens to an image where its own uniform draw lies below p. What does not
happen leaves every bit.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duetgan.training.gan.warp import copy_pixels, reflect, warp

MAX_SHIFT = 0.125  # of each side, either way: shift by whole pixels
SCALE = 0.2  # standard deviation of log2: isotropic and anisotropic scale
SHIFT = 0.125  # standard deviation, of each side: fractional shift
BRIGHTNESS = 0.2  # standard deviation, on a scale from -1 to 1
CONTRAST = 0.5  # standard deviation of log2
SATURATION = 1.0  # standard deviation of log2
BAND_GAIN = 1.0  # standard deviation of log2
# expected share of an image's power in each band, lowest first
BAND_POWER = (10 / 13, 1 / 13, 1 / 13, 1 / 13)
NOISE = 0.1  # standard deviation of the half-normal distribution of the noise's standard deviation
CUTOUT = 0.5  # of each side

# the Lagrange half-band filter of order 4, right half: sym2 forth and back, as the paper's filter
# bank has it
HALF_BAND_TAPS = (16 / 32, 9 / 32, 0.0, -1 / 32)


@dataclass
class GroupDraws:
    chance: Tensor  # [B, operations] uniform in [0, 1): an operation happens where it is below p
    uniform: Tensor  # [B, u] uniform in [0, 1)
    normal: Tensor  # [B, v] N(0, 1)
    pixels: Tensor | None = None  # [B, C, H, W] N(0, 1), of the noise

    def rows(self, rows: slice, dtype: torch.dtype) -> "GroupDraws":
        """The draws of some images; all but the chances as `dtype`."""
        pixels = self.pixels[rows].to(dtype) if self.pixels is not None else None
        return GroupDraws(
            self.chance[rows], self.uniform[rows].to(dtype), self.normal[rows].to(dtype), pixels
        )


Draws = dict[str, GroupDraws]  # of a global batch, by group; they do not depend on p

# the numbers that a group draws for an image: operations, uniform, normal
DRAWS = {
    "blit": (3, 4, 0),  # flip, turn, shift: mirrored or not, quarter turns, shifts across and down
    # scale, turn, anisotropic scale, turn, shift: two angles; two scales, shifts
    "geometry": (5, 2, 4),
    # brightness, contrast, luma flip, hue, saturation: flipped or not, angle; three amounts
    "colour": (5, 2, 3),
    "filter": (4, 0, 4),  # a band each: gains
    "noise": (1, 0, 1),  # its strength
    "cutout": (1, 2, 0),  # its centre
}


def blit_inverse(draws: GroupDraws, p: Tensor, size: Sequence[int]) -> Tensor:
    """Inverse [n, 3, 3] of left-right flip, turn by a multiple of 90 degrees and shift by whole
    pixels, in this order, for images of `size`: height and width.

    Half of the flips and a quarter of the turns that happen change nothing, as in the paper. All
    entries are exact.
    """
    flips, turns, shifts = (draws.chance < p).unbind(1)
    flipped, quarters, *moves = draws.uniform.unbind(1)
    sign = 1 - 2 * (flips & (flipped >= 0.5)).to(flipped)
    quarter = torch.where(turns, (4 * quarters).floor(), 0)
    cos = (quarter == 0).to(sign) - (quarter == 2).to(sign)
    sin = (quarter == 1).to(sign) - (quarter == 3).to(sign)
    sides = zip(moves, (size[1], size[0]), strict=True)  # x goes across
    x, y = (
        torch.where(shifts, ((2 * move - 1) * (MAX_SHIFT * side)).round(), 0)
        for move, side in sides
    )
    return compose(
        _matrix([[sign, 0, 0], [0, 1, 0]]), _matrix([[cos, sin, 0], [-sin, cos, 0]]), _shift(-x, -y)
    )


def geometry_inverse(draws: GroupDraws, p: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Inverse [n, 3, 3] of isotropic scale, turn, anisotropic scale, turn and shift, in this order;
    and bool [n], true where any of them happens.

    The turns happen with probability 1 - sqrt(1 - p) each, so that one or both do with p.
    """
    turned = 1 - (1 - p).sqrt()
    happens = draws.chance < torch.stack([p, turned, p, turned, p])
    scaled, first, stretched, second, shifted = happens.unbind(1)
    scale, stretch, x, y = draws.normal.unbind(1)
    scale = torch.exp2(torch.where(scaled, -SCALE * scale, 0))
    stretch = torch.exp2(torch.where(stretched, -SCALE * stretch, 0))
    angles = (2 * draws.uniform - 1) * math.pi
    x, y = (
        torch.where(shifted, -SHIFT * side * shift, 0)
        for shift, side in ((x, size[1]), (y, size[0]))
    )
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
    # [n, 3, 3] inverse, which follows blit's transformation; bool [n]
    geometry: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Both groups at once: an image that geometry changes is warped by the product of both, others
    are copied.
    """
    copied = images if blit is None else copy_pixels(images, blit)
    if geometry is None:
        return copied
    inverse, moved = geometry
    return where_chosen(
        moved, warp, images, copied, inverse if blit is None else compose(blit, inverse)
    )


def colour_matrix(draws: GroupDraws, p: Tensor, channels: int) -> Tensor:
    """Homogeneous [n, 4, 4] of brightness, contrast, luma flip, hue and saturation, in this order.

    The last two move colours about the grey axis v = (1, 1, 1) / sqrt(3), so they leave grey images
    as they are and are left out for these. Of C channels other than 1 and 3 it is [n, C, C + 1], v
    is (1, ...) / sqrt(C), and hue, a turn in three dimensions, is left out.
    """
    brightened, contrasted, inverted, turned, saturated = (draws.chance < p).unbind(1)
    brightness, contrast, saturation = draws.normal.unbind(1)
    light = torch.where(brightened, BRIGHTNESS * brightness, 0)
    gain = torch.exp2(torch.where(contrasted, CONTRAST * contrast, 0))
    sign = 1 - 2 * (inverted & (draws.uniform[:, 0] >= 0.5)).to(gain)
    if channels not in (1, 3):
        along, across = (
            gain * sign,
            gain * torch.exp2(torch.where(saturated, SATURATION * saturation, 0)),
        )
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


def recolour(images: Tensor, matrix: Tensor, alpha: bool = False) -> Tensor:
    """Apply a colour matrix to every pixel of [n, C, H, W]; a homogeneous [n, 4, 4] to [n, 1, H, W]
    as grey.

    With `alpha`, the last channel, which stays: as if to the straight colours s before they were
    multiplied by the opacity a. With x + 1 = a (s + 1) and s' = M s + b that is x' = M x + b + (1 -
    a) (M 1 - 1 - b).
    """
    channels = images.shape[1] - alpha
    if alpha:
        more = (matrix[:, :channels, :-1].sum(2) - 1 - matrix[:, :channels, -1])[:, :, None, None]
        colours = recolour(images[:, :-1], matrix) + (1 - images[:, -1:]) / 2 * more
        return torch.cat([colours, images[:, -1:]], dim=1)
    if channels == 1:  # the rows of the matrix are alike up to the order of their colours
        return (
            images * matrix[:, 0, :3].sum(1)[:, None, None, None]
            + matrix[:, 0, 3, None, None, None]
        )
    colours, shift = matrix[:, :channels, :channels], matrix[:, :channels, channels:]
    return torch.baddbmm(shift, colours, images.flatten(2)).reshape(images.shape)


def amplify_bands(images: Tensor, draws: GroupDraws, p: Tensor) -> Tensor:
    """Amplify four octaves of frequencies, each by its own log-normal gain, at constant expected
    power.
    """
    happens = draws.chance < p  # [n, bands]
    gains = torch.exp2(torch.where(happens, BAND_GAIN * draws.normal, 0))
    powers = [
        1 - share + share * gain.square()
        for share, gain in zip(BAND_POWER, gains.unbind(1), strict=True)
    ]
    gains = gains * torch.stack(powers).prod(0).rsqrt()[:, None]
    height, width = images.shape[2:]
    banks = {side: _band_matrices(side, images.dtype, images.device) for side in {height, width}}
    filters = {side: torch.tensordot(gains, bank, dims=1)[:, None] for side, bank in banks.items()}
    both = filters[height], filters[width]
    return where_chosen(
        happens.any(dim=1),
        lambda some, down, across: down @ some @ across.mT,
        images,
        images,
        *both,
    )


def add_noise(images: Tensor, draws: GroupDraws, p: Tensor) -> Tensor:
    """Add white noise whose strength is half-normal."""
    assert draws.pixels is not None
    return (
        images
        + draws.pixels
        * torch.where(draws.chance < p, draws.normal.abs() * NOISE, 0)[:, :, None, None]
    )


def cut_out(images: Tensor, draws: GroupDraws, p: Tensor, alpha: bool = False) -> Tensor:
    """Set a part of half of each side to mid-grey, with `alpha` to nothing; its centre lies
    anywhere in the image.
    """

    def inside(size: int, centres: Tensor) -> Tensor:  # [n, size]
        places = (torch.arange(size, device=images.device, dtype=images.dtype) + 0.5) / size
        return (places - centres[:, None]).abs() < CUTOUT / 2

    rows, columns = (
        inside(images.shape[2], draws.uniform[:, 1]),
        inside(images.shape[3], draws.uniform[:, 0]),
    )
    hidden = columns[:, None, :] & rows[:, :, None] & (draws.chance < p)[:, :, None]  # [n, H, W]
    return images.masked_fill(hidden[:, None], -1 if alpha else 0)


# what does not move pixels, in this order; alpha: the last channel is transparency, by which the
# others are multiplied. Filter and noise act on all channels alike, each with noise of its own.
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
    change: Callable[..., Tensor],  # of images and parameters, image by image
    images: Tensor,  # [n, C, H, W]
    others: Tensor,  # [n, C, H, W]
    *parameters: Tensor,  # [n, ...]
) -> Tensor:
    """`change(images, *parameters)` where chosen, else `others`."""
    if not _at_hand(chosen):
        return torch.where(chosen[:, None, None, None], change(images, *parameters), others)
    rows = chosen.nonzero()[:, 0]
    if len(rows) == 0:
        return others
    return others.index_copy(
        0, rows, change(images[rows], *(values[rows] for values in parameters))
    )


def _at_hand(values: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device: then what is not wanted need
    not be computed.
    """
    return values.device.type == "cpu"


def compose(*matrices: Tensor) -> Tensor:
    """Product of matrices [n, k, k], never in reduced precision as matmul's may be."""
    return functools.reduce(lambda a, b: (a[:, :, :, None] * b[:, None]).sum(2), matrices)


def _matrix(rows: list[list[Tensor | float]]) -> Tensor:
    """Homogeneous matrix [n, k + 1, k + 1] from its first k rows of numbers and tensors [n]."""
    like = next(entry for row in rows for entry in row if isinstance(entry, Tensor))
    entries = [entry for row in rows for entry in row] + [0.0] * len(rows) + [1.0]
    columns = [
        entry if isinstance(entry, Tensor) else torch.full_like(like, entry) for entry in entries
    ]
    return torch.stack(columns, dim=1).unflatten(1, (len(rows) + 1, len(rows) + 1))


def _shift(x: Tensor, y: Tensor) -> Tensor:
    return _matrix([[1, 0, x], [0, 1, y]])


def _turn_back(angle: Tensor) -> Tensor:
    """The inverse of a turn, clockwise for positive angles since y points down."""
    cos, sin = angle.cos(), angle.sin()
    return _matrix([[cos, sin, 0], [-sin, cos, 0]])


def _about_grey(along: Tensor, across: Tensor) -> Tensor:
    """Multiply a colour's part along the grey axis and the rest: across I + (along - across) v v^T."""
    rest = (along - across) / 3
    diagonal = across + rest
    return _matrix(
        [[diagonal, rest, rest, 0], [rest, diagonal, rest, 0], [rest, rest, diagonal, 0]]
    )


def _turn_about_grey(angle: Tensor) -> Tensor:
    """Turn colours about the grey axis (Rodrigues): cos I + sin [v]x + (1 - cos) v v^T."""
    cos, sin = angle.cos(), angle.sin() / math.sqrt(3)
    rest = (1 - cos) / 3
    diagonal, less, more = cos + rest, rest - sin, rest + sin
    return _matrix(
        [[diagonal, less, more, 0], [more, diagonal, less, 0], [less, more, diagonal, 0]]
    )


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _band_matrices(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, R, R]: band-pass filters of a line of pixels, mirrored at its ends; lowest first, of sum
    one.

    With the half-band low-pass L(z) the bands above 1/2, 1/4 and 1/8 of the Nyquist frequency are 1
    - L(z), L(z) (1 - L(z^2)) and L(z) L(z^2) (1 - L(z^4)), and what is left is the lowest.
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
