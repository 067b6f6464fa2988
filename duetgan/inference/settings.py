"""What generate.py and export.py can be asked for, with the defaults, and the checks that need no
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

# images of a class, and of a generator without classes, unless said
GRID, DATASET = (8, 64), (1000, 10_000)
SETS = 20  # of labels, the most frequent ones, that are asked for unless said
ENCODINGS = ("raw", "png", "jpeg")  # of a data set
FEATURES = ("resnet50", "pixels")  # that a projection compares
FORMATS = (
    "safetensors",
    "torch-export",
    "onnx",
    "int8",
    "executorch",
    "nvidia",
    "rosinality",
    "folder",
)
FRAMES, FPS = 30, 30  # of a film: from one sample to the next, and a second
FASTEST_GIF = 50  # frames a second: viewers show shorter delays than 2/100 s as 10/100 s

Space = Literal["w", "w+"]
# that a projection searches
SPACES: dict[str, tuple[Space, ...]] = {"w": ("w",), "w+": ("w+",), "both": ("w", "w+")}


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig:
    """How a projection searches."""

    space: str = "both"  # one of SPACES; w+ starts where w ended if both are searched
    # one of FEATURES; None: resnet50 where its weights are, else pixels
    features: str | None = None
    weights: str | Path | None = None  # of the features
    steps: int = 500  # of each of the two searches
    lr: float = 0.1  # Adam's, at its highest
    shake: float = 0.05  # w's noise at the start, in units of the spread of w
    # the maps: stored ones, none, searched for as well
    noise_mode: Literal["const", "none", "optimise"] = "const"
    # keeps searched maps free of correlation, so that they hold no part of the image
    noise_weight: float = 1e5
    # of the mean squared difference of pixels beside the features' distance
    pixel_weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EditConfig:
    """How a direction from class to class is found, and how far an image is moved."""

    space: Literal["w", "z"] | None = None  # None: w if the generator has one, else z
    samples: int = 100  # of each of the two classes, on which a direction is found
    pixel_weight: float = 0.1  # of the change of pixels that a direction avoids
    keep_weight: float = 0.1  # of the change of other classes' logits that it avoids
    reach: float = 0.5  # probability of the class asked for at which an image has arrived
    limit: float = 4.0  # the largest step, in units of the samples' spread


def check_film(path: Path, *, fps: int) -> None:
    """Raise UserError unless a film of this speed can be written here."""
    if path.suffix.lower() == ".gif" and fps > FASTEST_GIF:
        raise UserError(
            f"--fps {fps}: a GIF shows at most {FASTEST_GIF} frames a second; write an .mp4 or go slower"
        )


def label_of(name: str, classes: Sequence[str], option: str) -> int:
    """The label of the class that an option names; of a set of classes in any order: "b;a" is "a;
    b". Raises UserError for an unknown class.
    """
    if name not in classes and ";" in name:
        parts = [frozenset(map(str.strip, known.split(";"))) for known in (name, *classes)]
        name = next(
            (known for known, of in zip(classes, parts[1:], strict=True) if of == parts[0]), name
        )
    if name not in classes:
        raise UserError(
            f"{option}: no class {name!r}{did_you_mean(name, classes)}; there are {', '.join(classes)}"
        )
    return classes.index(name)
