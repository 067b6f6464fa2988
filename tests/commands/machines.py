"""Machines and images that plans are made for in tests, without measuring anything."""

from collections.abc import Sequence
from itertools import pairwise

from duetgan.commands.planning.plan import (
    GAN,
    LAST,
    PAIRS,
    SCRATCH,
    STARTED,
    Machine,
    Speed,
    Survey,
    Weights,
)

WEIGHTS = Weights("resnet50.safetensors", "resnet50", True)


class Fast(Machine):
    """Two cores with bf16 units, as measured: images/s of the quickstart's GAN and its classifier.

    Larger images are slower; fine-tuning ResNet-50 at 128 px takes ten times the
    small classifier's time, its last stage four times, its head three; or one and a half where the stages before are
    computed once.
    """

    start, cores = 9.0, 2
    gan, classifier = 380.0, 350.0

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        given = dict(pairwise(overrides))
        speed = self.classifier
        if config in (GAN, PAIRS, STARTED):
            return Speed("bf16", self.gan * (32 / side) ** 3)
        if config == SCRATCH:
            return Speed("bf16", self.classifier * (32 / side) ** 2)
        if config == LAST:
            inside = (128 / int(given["--model.input-size"])) ** 2
            whole = 4 if given["--augment.flip"] == "true" else 3
            return Speed("bf16", inside * speed / (whole if "--finetune.cache" in given else 1.5))
        return Speed("bf16", speed / 10)


class Slow(Fast):
    """A laptop's instruction set."""

    gan, classifier = 140.0, 110.0


class Tiny(Fast):
    """An old core."""

    cores, gan, classifier = 1, 12.0, 10.0


class Accelerator(Fast):
    """A GPU."""

    gan, classifier = 8000.0, 6000.0


def seen(
    count: int, classes: int, *, held_out: int = 0, side: int = 256, channels: int = 3, source: str = "images", **others
) -> Survey:
    """Images as `survey` describes them."""
    share = count // max(1, classes)
    each = {"smallest_class": share, "side": side, "channels": channels, "seconds": 0.003}
    own = {"source": source, "count": count, "held_out": held_out, "classes": classes}
    return Survey(**own, **each, **{"unreadable": "", **others})  # type: ignore[arg-type]


SAMPLE = seen(10_000, 10, held_out=2000, side=28, channels=1)
