"""What a plan is made for: the images, and the machine."""

from collections.abc import Sequence
from typing import NamedTuple

from duetgan.utils.config.model import Stored


class Survey(Stored):
    """What is known of a source of images."""

    source: str  # as the user named it
    options: list[str] = []  # of a table: its columns
    count: int  # images for training, the held-out ones included where they are not apart
    held_out: int  # images of the source's own held-out part; 0: it has none
    unlabelled: int = 0  # images in a folder of that name, not counted above
    classes: int  # 0: unlabelled
    smallest_class: int  # images
    largest_class: int
    side: int  # px: median of the shorter sides of the images looked at
    oblong: float = 0.0  # share of those that are far from square
    channels: int  # 1: all of those are grey
    transparent: bool  # whether some have an alpha channel
    deep: bool = False  # whether some have more than 8 bits
    unreadable: str  # the first that cannot be read, or empty
    seconds: float  # reading and decoding one image

    def text(self) -> str:
        most = f" to {self.largest_class:,}" if self.largest_class > self.smallest_class else ""
        several = f"{self.classes} classes of {self.smallest_class:,}{most}"
        kind = {0: "no labels", 1: "one class"}.get(self.classes, several)
        apart = f", and {self.held_out:,} held out" if self.held_out else ""
        kind += f", and {self.unlabelled:,} without labels" if self.unlabelled else ""
        lost = (
            ", some transparent (put on white)" * self.transparent
            + ", some of 16 bits (cut to 8)" * self.deep
        )
        colour = "grey" if self.channels == 1 else "colour"
        return f"{self.count:,} images{apart}, {kind}, about {self.side} px, {colour}{lost}"


class Speed(NamedTuple):
    precision: str
    images_per_second: float


class Weights(NamedTuple):
    file: str
    network: str
    he_strides: bool  # its stride of 2 is where He's is


class Machine:
    """The machine that a plan is for. This one is not measured: for `--quick`, where lengths do not
    matter.
    """

    start = 0.0  # seconds that training and evaluating take before their work and after it
    cores = 1
    weights: Sequence[Weights] = ()  # of ImageNet, that are at hand
    # images through ResNet-50 for the distance; 0: there are no weights for it
    features_per_second = 0.0

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        """How fast the recipe trains on such images of `side` px."""
        return Speed("auto", 1000.0)
