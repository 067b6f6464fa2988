"""Normalise and augment images on the device, by random draws that depend only on a seed key.

Black is 0 in integer images, and -1 in floating-point images, whose range is [-1, 1].

Mixup and CutMix combine two images, called partners, and their labels in the same proportion.
Partners are rows 2k and 2k + 1 of the global batch. These are random pairs because the order of
samples is random. No pair is split between ranks if each rank's batch is even.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import Config, Probability
from duetgan.utils.distributed.collectives import widest
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import Key, generator

# fraction of the image; Zhong et al., "Random Erasing Data Augmentation", section 4.2
ERASE_AREA = (0.02, 0.33)
ERASE_ASPECT = (0.3, 3.3)  # height / width


# Augmentations of user code by name: (images uint8 or float [n, C, H, W], uniform draws [n, 8]) ->
# images of the same type and shape
AUGMENTATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}


class Augment(Config):
    """Augmentation of training images. Raises UserError for values out of range."""

    # true: mirror left-right with probability 1/2; alternating: mirror each image in every second
    # epoch, from the first or second on
    flip: bool | Literal["alternating"] = False
    # px: pad images by this number on all sides, then crop the original size at a random place
    shift: Annotated[int, Interval(ge=0, le=512)] = 0
    # padding of `shift`; reflect: the image mirrored at its edge
    shift_edge: Literal["black", "reflect"] = "black"
    trivial_augment: bool = False  # TrivialAugment: one of 14 operations at a random strength
    erase: Probability = 0.0  # probability that a random rectangle is blackened
    # names of augmentations of imported code (docs/extending.md), applied last, in this order
    own: list[str] = []

    def check(self) -> None:
        for name in self.own:
            entry(AUGMENTATIONS, name, "own: augmentation")


def to_float(images: torch.Tensor, channels_last: bool = True) -> torch.Tensor:
    """Convert images uint8 [n, C, H, W] without alpha to floats in [-1, 1]: x / 127.5 - 1.

    `ImageSpec.to_float` converts images of all pixel formats.
    """
    return ImageSpec(images.shape[1], *images.shape[2:]).to_float(images, channels_last)


def random_flip(
    images: torch.Tensor,  # [n, C, H, W]
    flips: torch.Tensor,  # bool [n]
) -> torch.Tensor:
    """Return the images, mirrored left-right where `flips` is true."""
    return torch.where(flips[:, None, None, None], images.flip(3), images)


def random_shift(
    images: torch.Tensor,  # [n, C, H, W]
    # int64 [n, 2]: row and column in 0..2*padding; `padding` leaves the image in place
    offsets: torch.Tensor,
    padding: int,  # px
    reflect: bool,  # only for a padding below the sides of the images
) -> torch.Tensor:
    """Pad every image by `padding` px on all sides, and crop it to its original size again.

    `offsets` are the positions of the crops in the padded images. The padding is black, or with
    `reflect` the image mirrored at its edges.
    """
    height, width = images.shape[2:]
    device = images.device
    if reflect:  # torch does not reflect uint8
        rows, columns = (
            _reflected(torch.arange(-padding, side + padding, device=device), side)
            for side in (height, width)
        )
        padded = images[:, :, rows][..., columns]
    else:
        padded = F.pad(images, [padding] * 4, value=_black(images))
    # [n, C, row offsets, column offsets, H, W], a view
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    samples = torch.arange(len(images), device=device)
    return windows[samples, :, offsets[:, 0], offsets[:, 1]]


def random_erase(
    images: torch.Tensor,  # [n, C, H, W]
    # int64 [n, 4]: top, left, height, width in px; height or width 0 erases nothing
    boxes: torch.Tensor,
) -> torch.Tensor:
    """Return the images with all pixels inside their boxes set to black."""
    is_erased = inside(boxes[:, :2], boxes[:, 2:], *images.shape[2:])
    return images.masked_fill(is_erased, _black(images))


def inside(first: torch.Tensor, sides: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return a mask of the pixels inside each image's box: bool [n, 1, height, width].

    `first` (top, left) and `sides` (height, width) describe the boxes, int64 [n, 2]. Boxes are
    clipped at the borders of the image.
    """
    first = first[:, :, None]
    positions = torch.arange(max(height, width), device=first.device)
    is_inside = (positions >= first) & (positions < first + sides[:, :, None])
    # [n, 2, max(height, width)]
    return is_inside[:, :1, :height, None] & is_inside[:, 1:, None, :width]


def erase_boxes(draws: torch.Tensor, probability: float, height: int, width: int) -> torch.Tensor:
    """Turn uniform draws [n, 5] into boxes for `random_erase`, int64 [n, 4].

    The five draws of an image decide on erasing and on the box's area, aspect ratio, row and
    column, in this order. The area is uniform in ERASE_AREA. The logarithm of the aspect ratio is
    uniform between the logarithms of the limits in ERASE_ASPECT. A box is at most as high and as
    wide as the image. Its height and width are 0 if the image is not erased.
    """
    area = (ERASE_AREA[0] + draws[:, 1] * (ERASE_AREA[1] - ERASE_AREA[0])) * height * width
    low, high = math.log(ERASE_ASPECT[0]), math.log(ERASE_ASPECT[1])
    aspect = torch.exp(low + draws[:, 2] * (high - low))
    tall = (area * aspect).sqrt().round().long().clamp(1, height)
    wide = (area / aspect).sqrt().round().long().clamp(1, width)
    top = _integers(draws[:, 3], height - tall + 1)
    left = _integers(draws[:, 4], width - wide + 1)
    return torch.stack([top, left, tall, wide], dim=1) * (draws[:, 0, None] < probability)


def draw_and_apply(
    images: torch.Tensor,  # uint8 or float [n, C, H, W]: a part of the global batch
    config: Augment,
    *,
    seed: int,
    step: int,
    start: int,  # position of the first image in the global batch
    global_batch: int,  # images of all ranks
    phase: str | None = None,  # part of the key, if a step has several batches
) -> torch.Tensor:
    """Augment images with random draws from the key (seed, "augment", step[, phase]).

    The draws are made for the whole global batch on the images' device, and rows [start, start + n)
    of them are used. So the result does not depend on the number of ranks. Each augmentation has
    its own draws, which do not depend on the other settings. Alternating flips are left to the
    loader (`data.reading.loader.alternating_flip_`).

    Raises ValueError for rows outside the global batch, and UserError if a reflected shift is too
    large for the images.
    """
    if not 0 <= start <= start + len(images) <= global_batch:
        raise ValueError(
            f"rows {start} to {start + len(images)} of a global batch of {global_batch}"
        )
    if not (
        config.flip is True or config.shift or config.trivial_augment or config.erase or config.own
    ):
        return images
    key: tuple[Key, ...] = (seed, "augment", step, *([phase] if phase else []))
    numbers = generator(*key, device=images.device)
    draws = torch.rand(
        global_batch, 8, generator=numbers, device=images.device, dtype=torch.float32
    )
    draws = draws[start : start + len(images)]
    if config.flip is True:
        images = random_flip(images, draws[:, 0] < 0.5)
    if config.shift:
        if config.shift_edge == "reflect" and config.shift >= min(images.shape[2:]):
            side = min(images.shape[2:])
            raise UserError(
                f"augment.shift {config.shift} with reflected edges: images of {side} px have no"
                " such edge; take at "
                f"most {side - 1}"
            )
        offsets = _integers(draws[:, 1:3], 2 * config.shift + 1)
        images = random_shift(images, offsets, config.shift, reflect=config.shift_edge == "reflect")
    if config.trivial_augment:
        # The import of torchvision's transforms takes 0.2 s.
        from duetgan.data.augment import trivial_augment as trivial

        rows = slice(start, start + len(images))
        images = trivial.trivial_augment(
            images, trivial.draw((*key, "trivial"), global_batch, rows)
        )
    if config.erase:
        images = random_erase(
            images, erase_boxes(draws[:, 3:8], config.erase, images.shape[2], images.shape[3])
        )
    for name in config.own:
        numbers = generator(*key, "own", name, device=images.device)
        draws = torch.rand(global_batch, 8, generator=numbers, device=images.device)
        images = AUGMENTATIONS[name](images, draws[start : start + len(images)])
    return images


def _integers(uniform: torch.Tensor, ends: torch.Tensor | int) -> torch.Tensor:
    """Convert uniform numbers in [0, 1) to integers in 0..ends-1.

    Rounding never gives `ends`: even the largest float below 1 has a product with `ends` that is
    less than `ends`.
    """
    return (uniform * ends).long()


def _reflected(positions: torch.Tensor, side: int) -> torch.Tensor:
    """Reflect positions outside 0..side-1 into this range: -1 becomes 1, `side` becomes side - 2.

    The positions must be less than `side` away from the range.
    """
    return (side - 1) - ((side - 1) - positions.abs()).abs()


def _black(images: torch.Tensor) -> int:
    return -1 if images.is_floating_point() else 0


class MixingAugment(Augment):
    """Augmentation of single images and, after it, of pairs. Raises UserError for values out of
    range.
    """

    # alpha of mixup (1710.09412); 0: off. An image's weight is drawn from Beta(alpha, alpha)
    mixup: float = 0.0
    # alpha of CutMix (1905.04899); 0: off. With both, each image gets one of them, at random
    cutmix: float = 0.0
    # probability that an image is mixed at all, if mixup or cutmix is on
    mix_prob: Probability = 1.0

    def check(self) -> None:
        super().check()
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if alpha != 0 and not 0.01 <= alpha <= 100:
                raise UserError(
                    f"{name} {alpha}: the alpha of a Beta distribution, 0.01 to 100; 0 for none"
                )

    @property
    def mixes(self) -> bool:
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


class Mixing(NamedTuple):
    """The weights and boxes with which n images are mixed with their partners."""

    label_weights: Tensor  # float32 [n] in [0, 1]: weight of the image's label, not the partner's
    is_pasted: Tensor  # bool [n, 1, H, W]: True where the partner's pixels are pasted (CutMix)
    # float32 [n] in [0, 1]: weight of the image's pixels (mixup); None without mixup
    blend: Tensor | None = None

    def rows(self, rows: slice) -> "Mixing":
        blend = None if self.blend is None else self.blend[rows]
        return Mixing(self.label_weights[rows], self.is_pasted[rows], blend)


def draw_mixing(
    config: MixingAugment,
    *,
    seed: int,
    step: int,
    start: int,  # position of the first row in the global batch
    count: int,  # rows
    global_batch: int,
    size: tuple[int, int],  # height and width in px
    device: torch.device,
) -> Mixing:
    """Draw the mixing of the images in rows [start, start + count) of the global batch.

    The draws have the key (seed, "augment", step, "mixing"). They are made for the whole global
    batch, so they do not depend on the number of ranks.
    """
    numbers = generator(seed, "augment", step, "mixing", device=device)
    uniform = torch.rand(global_batch, 4, generator=numbers, device=device)
    blended, pasted = _betas(config.mixup or 1.0, config.cutmix or 1.0, global_batch, numbers)
    rows = slice(start, start + count)
    uniform = uniform[rows]
    mixed = uniform[:, 0] < config.mix_prob
    pastes = mixed
    if config.mixup:
        pastes = mixed & (uniform[:, 1] < (0.5 if config.cutmix else 0.0))
    is_pasted = cut_boxes(pasted[rows], uniform[:, 2:], *size) & pastes[:, None, None, None]
    remaining = 1 - is_pasted.sum((1, 2, 3)) / (size[0] * size[1])
    if not config.mixup:
        return Mixing(remaining, is_pasted)
    blend = blended[rows].masked_fill(pastes == mixed, 1.0)
    # One factor is 1, because an image is not mixed in both ways.
    return Mixing(remaining * blend, is_pasted, blend)


def _betas(first: float, second: float, count: int, numbers: torch.Generator) -> Tensor:
    """Draw `count` values from Beta(first, first), and `count` values from Beta(second, second).

    The result is float32 [2, count]. Each value is a ratio of gamma variates.
    """
    shape = (2, count, 2)
    gammas = torch.full(shape, first, device=numbers.device, dtype=widest(numbers.device))
    if second != first:
        gammas[1] = second
    gammas = torch._standard_gamma(gammas, generator=numbers)
    # Torch's variates are at least the smallest normal number, so no quotient is 0 / 0.
    return (gammas[..., 0] / gammas.sum(-1)).float()


def cut_boxes(
    remaining: Tensor,  # float [n]: fraction of the image outside the box
    centres: Tensor,  # float [n, 2] in [0, 1): row and column
    height: int,
    width: int,
) -> Tensor:
    """Return a mask of the pixels inside CutMix's boxes: bool [n, 1, H, W].

    The boxes have the image's aspect ratio, and are clipped at its borders (1905.04899, equation
    2).
    """
    side = (1 - remaining).sqrt()
    size = torch.full((2,), height, device=side.device)
    if width != height:
        size[1] = width
    sides, middle = (torch.stack([side[:, None].expand_as(centres), centres]) * size).long()
    return inside(middle - sides // 2, sides, height, width)


def partners(values: Tensor) -> Tensor:
    """Return a copy of `values` in which rows 2k and 2k + 1 are swapped.

    So each row has the values of its partner. Raises ValueError for an odd number of rows.
    """
    if len(values) % 2:
        raise ValueError(f"{len(values)} rows cannot be paired")
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mix_images(
    images: Tensor,  # float [n, C, H, W]
    partner_images: Tensor,
    mixing: Mixing,
) -> Tensor:
    """Return images mixed with their partners, [n, C, H, W] in the memory format of `images`."""
    if mixing.blend is not None:
        weights = mixing.blend[:, None, None, None].to(images.dtype)
        images = torch.lerp(partner_images, images, weights)  # exactly the image at weight 1
    return torch.where(mixing.is_pasted, partner_images, images)
