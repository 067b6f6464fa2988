"""Mixup and CutMix: images of two samples in one, and their labels in proportion.

Partners are the neighbours 2k and 2k + 1 of the global batch. The order of samples is random, so they are random pairs;
and a pair never lies on two ranks, whatever their number: a rank's share only has to be even.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from duetgan.data.augment.transforms import Augment, inside
from duetgan.utils.config.model import Probability
from duetgan.utils.distributed.collectives import widest
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator


class MixingAugment(Augment):
    """Augmentation of single images and, after it, of pairs. Raises UserError for values out of range."""

    mixup: float = 0.0  # alpha of mixup (1710.09412); 0: off. The share of an image is drawn from Beta(alpha, alpha)
    cutmix: float = 0.0  # alpha of CutMix (1905.04899); 0: off. With both, each image gets one of them, at random
    mix_prob: Probability = 1.0  # probability that an image is mixed at all, if mixup or cutmix is on

    def check(self) -> None:
        super().check()
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if alpha != 0 and not 0.01 <= alpha <= 100:
                raise UserError(f"{name} {alpha}: the alpha of a Beta distribution, 0.01 to 100; 0 for none")

    @property
    def mixes(self) -> bool:
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


class Mixing(NamedTuple):
    """How each of n images is mixed with its partner."""

    own: Tensor  # float32 [n]: its own share of the label, 0 to 1
    blend: Tensor  # float32 [n]: its own share of every pixel (mixup); 1 where it is not mixed so
    boxes: Tensor  # int64 [n, 4]: top, left, height, width of the partner's part (CutMix); empty where there is none

    def rows(self, rows: slice) -> "Mixing":
        return Mixing(self.own[rows], self.blend[rows], self.boxes[rows])


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
    """The draws of rows [start, start + count); key (seed, "augment", step, "mixing"), for the whole global batch."""
    numbers = generator(seed, "augment", step, "mixing", device=device)
    uniform = torch.rand(global_batch, 4, generator=numbers, device=device)
    blended = _beta(config.mixup or 1.0, global_batch, numbers)
    pasted = _beta(config.cutmix or 1.0, global_batch, numbers)
    rows = slice(start, start + count)
    uniform, blended, pasted = uniform[rows], blended[rows], pasted[rows]
    mixed = uniform[:, 0] < config.mix_prob
    to_paste = uniform[:, 1] < (0.5 if config.mixup and config.cutmix else float(config.cutmix > 0))
    boxes = cut_boxes(pasted, uniform[:, 2:], *size) * (mixed & to_paste)[:, None]
    left = 1 - (boxes[:, 2] * boxes[:, 3]).float() / (size[0] * size[1])
    blend = torch.where(mixed & ~to_paste, blended, 1.0)
    return Mixing(torch.where(to_paste, left, blend), blend, boxes)


def _beta(alpha: float, count: int, numbers: torch.Generator) -> Tensor:
    """Beta(alpha, alpha), float32 [count]: the share of one of two gamma variates in their sum."""
    gammas = torch.full((count, 2), alpha, device=numbers.device, dtype=widest(numbers.device))
    first, second = torch._standard_gamma(gammas, generator=numbers).unbind(1)
    both = first + second
    return torch.where(both > 0, first / both, 0.5).float()  # a small alpha's variates may both be 0


def cut_boxes(
    own: Tensor,  # float [n]: the share of the image that is to stay
    centres: Tensor,  # float [n, 2] in [0, 1): row and column
    height: int,
    width: int,
) -> Tensor:
    """CutMix's boxes (1905.04899, equation 2), int64 [n, 4]: of the image's shape, cut off at its borders."""
    side = (1 - own).clamp(min=0).sqrt()
    tall, wide = (side * height).long(), (side * width).long()
    row, column = (centres[:, 0] * height).long(), (centres[:, 1] * width).long()
    top, left = (row - tall // 2).clamp(min=0), (column - wide // 2).clamp(min=0)
    bottom, right = (row - tall // 2 + tall).clamp(max=height), (column - wide // 2 + wide).clamp(max=width)
    return torch.stack([top, left, bottom - top, right - left], dim=1)


def partners(values: Tensor) -> Tensor:
    """Every row's partner: rows 2k and 2k + 1 change places. Raises ValueError for an odd number of rows."""
    if len(values) % 2:
        raise ValueError(f"{len(values)} rows cannot be paired")
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mix_images(
    images: Tensor,  # float [n, C, H, W]
    others: Tensor,  # their partners
    mixing: Mixing,
) -> Tensor:
    """Mixed images [n, C, H, W] in the images' memory format."""
    blend = mixing.blend[:, None, None, None]
    share = torch.where(inside(mixing.boxes, images), 0.0, blend).to(images.dtype)  # [n, 1, H, W]
    return torch.lerp(others, images, share)  # to the bit the images where the share is 1
