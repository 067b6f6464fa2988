"""Inputs of a quickstart's plan: a survey of the user's images, and the machine's speed."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NamedTuple

from duetgan.utils.config.cli import add_table_options, number, table_words
from duetgan.utils.config.model import Stored

SAMPLE = "sample"
WEEK = 7 * 24 * 60  # largest --minutes


def add_request_options(parser: ArgumentParser) -> None:
    """Add the images and the options that determine a plan."""
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        default=SAMPLE,
        metavar="FOLDER",
        help="images: a folder, zip or table (default: the sample images)",
    )
    add(
        "--minutes",
        type=number(float, 1, WEEK),
        default=15.0,
        help="time limit in minutes, for everything",
    )
    add_table_options(parser)
    weights = "ImageNet weights for the classifier (default: see docs/your-data.md)"
    add("--weights", metavar="FILE", help=weights)
    add(
        "--seed",
        type=number(int, 0),
        default=0,
        help="seed of the split and of both trainings (default: 0)",
    )
    add(
        "--quick",
        action="store_true",
        help="train only a few steps, to check that everything works",
    )


def request_words(options: Namespace) -> list[str]:
    """Return the command-line arguments of a plan's request, without --minutes."""
    words = [options.source, *table_words(options)]
    if options.weights:
        words += ["--weights", options.weights]
    if options.seed:
        words += ["--seed", str(options.seed)]
    if options.quick:
        words.append("--quick")
    return words


class Survey(Stored):
    """Properties of the user's images."""

    source: str  # path or name of the images, as the user typed it
    options: list[str] = []  # command-line options that name the columns of a table
    count: int  # images, without the source's own held-out ones
    held_out: int  # the source's own held-out images
    groups: int = 0  # number of groups that a split keeps whole; 0: no option defines groups
    unlabelled: int = 0  # images in folders called `unlabelled`, not in `count`
    classes: int  # 0 if the images have no labels
    smallest_class: int  # images of the rarest class
    largest_class: int
    side: int  # px: median of the shorter sides of the decoded images
    oblong: float = 0.0  # fraction of the decoded images that are far from square
    channels: int  # 1 if all decoded images are grey, else 3
    transparent: bool  # True if some have an alpha channel
    deep: bool = False  # True if some have more than 8 bits per channel
    unreadable: str  # name and error of the first image that cannot be read, or empty
    seconds: float  # time to read and decode one image

    def text(self) -> str:
        """Return the survey as one line of text for the user."""
        text = f"{self.count:,} images"
        if self.held_out:
            text += f", and {self.held_out:,} held out"
        if self.classes > 1:
            text += f", {self.classes} classes of {self.smallest_class:,}"
            if self.largest_class > self.smallest_class:
                text += f" to {self.largest_class:,}"
        else:
            text += ", one class" if self.classes else ", no labels"
        if self.unlabelled:
            text += f", and {self.unlabelled:,} without labels"
        text += f", about {self.side} px, {'grey' if self.channels == 1 else 'colour'}"
        if self.transparent:
            text += ", some transparent (put on white)"
        if self.deep:
            text += ", some of 16 bits (reduced to 8)"
        return text


class Speed(NamedTuple):
    precision: str
    images_per_second: float


class Weights(NamedTuple):
    """A file of ImageNet weights, and the name of the network that they are for."""

    file: str
    network: str
    he_strides: bool  # True if a block's first convolution has the stride of 2, as in He's ResNet


class Machine:
    """A machine with an assumed speed, for `--quick`, whose few steps need no measurement."""

    start = 0.0  # seconds that a training or evaluation takes to start and to finish
    cores = 1
    weights: Weights | None = None  # ImageNet weights on this machine
    # images/s through ResNet-50 for the Frechet distance; 0 if its weights are missing
    features_per_second = 0.0

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        """Return the training speed of a recipe on images of `side` px, otherwise like `images`."""
        return Speed("auto", 1000.0)
