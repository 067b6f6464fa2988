"""Network and image sizes from which the quickstart chooses those of its GAN and classifier."""

import math
from typing import NamedTuple

START = "configs/drawings_64.pt"  # trained GAN to start from; configs/drawings_64.md describes it


class Size(NamedTuple):
    """A GAN's size, and the numbers of images, in thousands, that its training needs."""

    side: int  # px
    channel_base: int  # channels at a resolution: base / resolution, at most channel_max
    channel_max: int
    kimg: int  # thousands of images after which samples can be recognised
    most: int  # thousands of images after which more training makes no visible difference
    # as `kimg`, if training starts from START; 0 if START has another size
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
# Longest training, in images, for which gan_32_pairs uses Muon, which is better than Adam after
# 155,000 images and worse after 640,000; no length between these was tried
# (docs/measurements/small-gan-recipe.md#muon-for-filters).
MUON = 200_000

# Settings of a classifier behind frozen stages, the slowest first: input size in px, and views per
# image. With two views, one of them mirrored, the last stage is trained, otherwise only the head.
LADDER = ((224, 2), (128, 2), (224, 1), (128, 1), (64, 1))
# Options for a ResNet of which only the head is trained; a head on averaged features is less
# accurate (docs/measurements/folders.md).
READOUT = ["--model.head", "readout", "--model.readout-stages", "2", "--model.readout-parts", "1"]


def work(size: Size) -> float:
    """Return the relative cost of training on one image: the convolutions' multiplications plus a
    term for each pixel.
    """
    sides = [4 * 2**k for k in range(int(math.log2(size.side)) - 1)]
    channels = {side: min(size.channel_base // side, size.channel_max) for side in sides}
    return sum(side**2 * (channels[side] ** 2 + 16 * channels[side]) for side in sides)


def nearness(size: Size, images: float) -> float:
    """Return a score of a 32 px GAN after training on `images` images: the higher, the smaller its
    expected distance.

    The expected distance divided by its floor is 1.82 + 2,280 channels^-0.55 kimg^-1.00
    (docs/measurements/small-gan-recipe.md#width-and-time).
    """
    return (size.channel_base // size.side) ** 0.55 * images


def side_for(side: int, most: int) -> int:
    """Return the side in px to which images of `side` px are scaled: the smallest power of two of
    at least two thirds of `side`, but from 16 to `most`.
    """
    return min(most, max(16, 2 ** math.ceil(math.log2(max(side, 16) / 1.5))))


def cadence(steps: int, seconds: float, *, evaluations: int) -> list[str]:
    """Return the command-line options for the length, evaluations and checkpoints of a training.

    A step takes `seconds`; a checkpoint is saved about every two minutes.
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
