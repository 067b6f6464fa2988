"""Sizes that the quickstart chooses from: of GANs, and of a classifier behind frozen stages."""

import math
from typing import NamedTuple

START = "configs/drawings_64.pt"  # trained networks to start from: configs/drawings_64.md


class Size(NamedTuple):
    """A GAN's size, and the images it must see before its samples can be recognised."""

    side: int  # px
    channel_base: int  # channels at a resolution: base / resolution, at most channel_max
    channel_max: int
    kimg: int  # thousand images, at least
    most: int  # thousand images after which more training makes no visible difference
    # thousand images, at least, if training starts from START; 0: START has another size
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
# Images up to which gan_32_pairs keeps Muon. It is better than Adam after 155,000 images and worse
# after 640,000; the range between was not tried
# (docs/measurements/small-gan-recipe.md#muon-for-filters)
MUON = 200_000

# Training behind frozen stages: input size in px, and views per image. With two views (mirrored)
# the last stage is trained, otherwise only the head.
LADDER = ((224, 2), (128, 2), (224, 1), (128, 1), (64, 1))
# Options of a ResNet whose head alone is trained: better than pooled means
# (docs/measurements/folders.md)
READOUT = ["--model.head", "readout", "--model.readout-stages", "2", "--model.readout-parts", "1"]


def work(size: Size) -> float:
    """Return the relative work of one image: products of the convolutions, plus a term per pixel."""
    sides = [4 * 2**k for k in range(int(math.log2(size.side)) - 1)]
    channels = {side: min(size.channel_base // side, size.channel_max) for side in sides}
    return sum(side**2 * (channels[side] ** 2 + 16 * channels[side]) for side in sides)


def nearness(size: Size, images: float) -> float:
    """Return a number that grows as the distance expected after `images` at 32 px shrinks.

    The distance is 1.82 + 2,280 channels^-0.55 kimg^-1.00 times its floor
    (docs/measurements/small-gan-recipe.md#width-and-time).
    """
    return (size.channel_base // size.side) ** 0.55 * images


def side_for(side: int, most: int) -> int:
    """Return the power of two, from 16 to `most`, to which images of `side` px are scaled: the
    smallest that is at least two thirds of `side`.
    """
    return min(most, max(16, 2 ** math.ceil(math.log2(max(side, 16) / 1.5))))


def cadence(steps: int, seconds: float, *, evaluations: int) -> list[str]:
    """Return options for a training's length, evaluations, and saves about every two minutes.

    `seconds` is the time of a step.
    """
    evaluation_interval = max(1, math.ceil(steps / evaluations))
    save_interval = max(10, min(evaluation_interval, int(120 / seconds)))
    return [
        "--steps",
        str(steps),
        "--evaluation.every",
        str(evaluation_interval),
        "--checkpoint.every",
        str(save_interval),
    ]
