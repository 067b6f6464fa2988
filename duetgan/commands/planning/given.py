"""Inputs of a quickstart's plan: a survey of the user's images, and the machine's speed."""

from collections.abc import Sequence
from typing import NamedTuple

from duetgan.utils.config.model import Stored


class Survey(Stored):
    """Properties of the user's images."""

    source: str  # path or name of the images, as the user typed it
    options: list[str] = []  # command-line options that name the columns of a table
    count: int  # images, without the source's own held-out ones
    held_out: int  # the source's own held-out images
    groups: int = 0  # number of groups that a split keeps whole; 0: no option defines groups
    held_out_groups: list[int] = []  # number of images in each held-out group
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
