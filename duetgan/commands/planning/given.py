"""The inputs of a plan: a survey of the images, and the machine's speed."""

from collections.abc import Sequence
from typing import NamedTuple

from duetgan.utils.config.model import Stored


class Survey(Stored):
    """A summary of a source of images."""

    source: str  # as the user named it
    options: list[str] = []  # options that describe a table's columns
    count: int  # training images, and held-out ones unless the source has them separately
    held_out: int  # images of the source's own held-out part; 0: it has none
    unlabelled: int = 0  # images in a folder of that name, not in `count`
    classes: int  # 0: unlabelled
    smallest_class: int  # images
    largest_class: int
    side: int  # px: median of the shorter sides of the decoded images
    oblong: float = 0.0  # fraction of the decoded images that are far from square
    channels: int  # 1: all decoded images are grey
    transparent: bool  # True if some have an alpha channel
    deep: bool = False  # True if some have more than 8 bits
    unreadable: str  # the first image that cannot be read, or empty
    seconds: float  # to read and decode one image

    def text(self) -> str:
        """Return the summary as a line for people."""
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
    """A file of ImageNet weights and the network that it belongs to."""

    file: str
    network: str
    he_strides: bool  # the stride of 2 is in the first convolution of a block, as in He's network


class Machine:
    """The machine that a plan is for, not measured; for `--quick`, where lengths do not matter."""

    start = 0.0  # seconds that each training and evaluation takes in addition to its work
    cores = 1
    weights: Sequence[Weights] = ()  # ImageNet weights on this machine
    # images/s through ResNet-50 for the Frechet distance; 0: its weights are missing
    features_per_second = 0.0

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        """Return the training speed of a recipe on images like `images`, scaled to `side` px."""
        return Speed("auto", 1000.0)
