"""Sizes that the quickstart chooses from: of GANs, with the work of one of their images, and behind
frozen stages.
"""

import math
from typing import NamedTuple

START = "configs/drawings_64.pt"  # trained networks to start from: configs/drawings_64.md


class Size(NamedTuple):
    """A GAN's size, and the images it must see before its samples can be recognised."""

    side: int  # px
    channel_base: int  # channels at a resolution: base / resolution, channel_max at most
    channel_max: int
    kimg: int  # thousand images, at least
    most: int  # thousand images after which more no longer shows
    # thousand images, at least, from START's networks; 0: they are not of this size
    started: int = 0


SIZES = (
    Size(128, 4096, 256, 600, 6000),
    Size(128, 2048, 128, 300, 3000),
    Size(64, 2048, 256, 200, 2000),
    Size(64, 1024, 128, 80, 1500, started=6),
    Size(32, 512, 128, 50, 640),
    Size(32, 256, 64, 30, 640),
    Size(16, 256, 64, 0, 400),
)

WIDTHS = (512, 1024, 2048)  # channel_base at 32 px
# images up to which gan_32_pairs keeps Muon, which is better than Adam after 155,000, worse after
# 640,000, not tried in between (docs/measurements/small-gan-recipe.md#muon-for-filters)
MUON = 200_000

# behind frozen stages: px inside, and views of an image: with two, mirrored, the last stage trains,
# else the head alone
LADDER = ((224, 2), (128, 2), (224, 1), (128, 1), (64, 1))
# of a ResNet's head alone: better than means, until the last stage trains
# (docs/measurements/folders.md)
READOUT = ["--model.head", "readout", "--model.readout-stages", "2", "--model.readout-parts", "1"]


def work(size: Size) -> float:
    """Work of one image in relation to other sizes: products of the convolutions, and the pixels
    for all else.
    """
    sides = [4 * 2**k for k in range(int(math.log2(size.side)) - 1)]
    channels = {side: min(size.channel_base // side, size.channel_max) for side in sides}
    return sum(side**2 * (channels[side] ** 2 + 16 * channels[side]) for side in sides)


def nearness(size: Size, images: float) -> float:
    """The larger, the smaller is the distance expected after so many images at 32 px: 1.82 + 2,280
    channels^-0.55 kimg^-1.00 times its floor
    (docs/measurements/small-gan-recipe.md#width-and-time).
    """
    return (size.channel_base // size.side) ** 0.55 * images


def side_for(side: int, most: int) -> int:
    """A power of two near `side` px, from 16 to `most`: images are enlarged by less than half."""
    return min(most, max(16, 2 ** math.ceil(math.log2(max(side, 16) / 1.5))))


def cadence(steps: int, seconds: float, *, evaluations: int) -> list[str]:
    """How often a training evaluates and saves (every two minutes or so), and its length."""
    every = max(1, math.ceil(steps / evaluations))
    save = max(10, min(every, int(120 / seconds)))
    return [
        "--steps",
        str(steps),
        "--evaluation.every",
        str(every),
        "--checkpoint.every",
        str(save),
    ]
