"""Options of generate.py and export.py with their defaults, and the checks that need no torch."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

# default numbers of images: of each class, and in all if the generator has no classes
GRID, DATASET = (8, 64), (1000, 10_000)
LABEL_SETS = 20  # default number of label sets to sample, the most frequent ones
ENCODINGS = ("raw", "png", "jpeg")  # encodings of the images in a data set
FEATURES = ("resnet50", "pixels")  # features that a projection compares
FRAMES, FPS = 30, 30  # of a film: frames from one sample to the next, frames a second
FASTEST_GIF = 50  # frames a second: viewers show shorter delays than 2/100 s as 10/100 s

Space = Literal["w", "w+"]
# option -> the spaces that a projection searches
SPACES: dict[str, tuple[Space, ...]] = {"w": ("w",), "w+": ("w+",), "both": ("w", "w+")}


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig:
    """Settings of a projection."""

    space: str = "both"  # one of SPACES; both: the search in w+ starts from the result in w
    # one of FEATURES; None: resnet50 if its weights are present, else pixels
    features: str | None = None
    weights: str | Path | None = None  # file of the features' weights
    steps: int = 500  # optimisation steps in each space
    lr: float = 0.1  # the highest learning rate of Adam
    shake: float = 0.05  # noise on w at the start, in units of the spread of w
    # noise maps: const (the generator's stored ones), none, or optimised with w
    noise_mode: Literal["const", "none", "optimise"] = "const"
    # weight of the penalty on correlations in optimised maps, which should hold no part of the
    # image
    noise_weight: float = 1e5
    # weight of the mean squared difference of pixels, which is added to the features' distance
    pixel_weight: float = 1.0


MAX_SEED, MAX_SEEDS = 2**32 - 1, 100_000  # largest seed of NumPy; most seeds in a range
LATENTS = (".safetensors", ".safetensors:w", ".safetensors:w+")  # ends of file names


def numbers(text: str, high: int) -> list[int]:
    """Parse numbers and ascending ranges from 0 to `high`, such as `2,3,10-80`.

    Raises ValueError if a part is neither, or is a range of more than MAX_SEEDS numbers. The
    message is this part.
    """
    result: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= high or last - first >= MAX_SEEDS:
            raise ValueError(part.strip())
        result += range(first, last + 1)
    return result


def ranges(seeds: Iterable[int]) -> str:
    """Return seeds as a text that `numbers` parses."""
    spans: list[list[int]] = []
    for seed in seeds:
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def sources(text: str) -> list[int | str]:
    """Parse the value of an option: seeds and files of latents, e.g. `2,3,10-80,found.safetensors`.

    Raises argparse.ArgumentTypeError for other texts.
    """
    result: list[int | str] = []
    for part in map(str.strip, text.split(",")):
        if part.endswith(LATENTS):
            result.append(part)
            continue
        try:
            result += numbers(part, MAX_SEED)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a seed, a range of seeds or a .safetensors file; write them like "
                "2,3,10-80,found.safetensors"
            ) from None
    return result


def check_film(path: Path, *, fps: int) -> None:
    """Raise UserError if `path` is a GIF and `fps`, the frames a second, are too many for it."""
    if path.suffix.lower() == ".gif" and fps > FASTEST_GIF:
        raise UserError(
            f"--fps {fps}: a GIF shows at most {FASTEST_GIF} frames a second; write an .mp4 or go slower"
        )


def label_of(name: str, classes: Sequence[str], option: str) -> int:
    """Return the label of the class `name`, its index in `classes`.

    If a class is a set of labels, they may have any order: "b;a" names the set "a; b". Raises
    UserError for an unknown class; the message names the `option`.
    """
    if name not in classes and ";" in name:
        parts = _parts(name)
        name = next((existing for existing in classes if _parts(existing) == parts), name)
    if name not in classes:
        raise UserError(
            f"{option}: no class {name!r}{did_you_mean(name, classes)}; there are {', '.join(classes)}"
        )
    return classes.index(name)


def _parts(name: str) -> frozenset[str]:
    return frozenset(map(str.strip, name.split(";")))
