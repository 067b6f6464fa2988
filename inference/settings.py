"""What generate.py and export.py can be asked for, with the defaults, and the checks that need no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from utils.errors import UserError

GRID, DATASET = (8, 64), (1000, 10_000)  # images of a class, and of a generator without classes, unless said
ENCODINGS = ("raw", "png", "jpeg")  # of a data set
FEATURES = ("resnet50", "pixels")  # that a projection compares
FORMATS = ("safetensors", "torch-export", "onnx", "int8", "executorch", "nvidia", "rosinality", "folder")
FASTEST_GIF = 50  # frames a second: viewers show shorter delays than 2/100 s as 10/100 s

Space = Literal["w", "w+"]
SPACES: dict[str, tuple[Space, ...]] = {"w": ("w",), "w+": ("w+",), "both": ("w", "w+")}  # that a projection searches


@dataclass(kw_only=True)
class FilmConfig:
    """What a film shows and how. Raises UserError for a film that cannot be made."""

    space: Literal["z", "w"] | None = None  # where the way is straight; None: w if the generator has one, else z
    keyframes: int | None = None  # samples it goes through; None: 8, or one of each class up to 16
    frames: int = 30  # from one sample to the next
    fps: int = 30  # frames a second
    scale: int | None = None  # each pixel becomes scale x scale; None: to about 256 px

    def __post_init__(self) -> None:
        if self.keyframes is not None and self.keyframes < 2:
            raise UserError(f"--n {self.keyframes}: a film needs at least two keyframes; give 2 or more")
        if self.frames < 1 or self.fps < 1 or (self.scale is not None and self.scale < 1):
            raise UserError("--frames, --fps and --scale must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig:
    """How a projection searches. Raises UserError for values out of range."""

    steps: int = 500  # of each of the two searches
    lr: float = 0.1  # Adam's, at its highest
    shake: float = 0.05  # w's noise at the start, in units of the spread of w
    noise_mode: Literal["const", "none", "optimise"] = "const"  # the maps: stored ones, none, searched for as well
    noise_weight: float = 1e5  # keeps searched maps free of correlation, so that they hold no part of the image
    pixel_weight: float = 1.0  # of the mean squared difference of pixels beside the features' distance

    def __post_init__(self) -> None:
        if self.steps < 1 or self.lr <= 0:
            raise UserError("--steps must be 1 or more, --lr above 0")
        if min(self.shake, self.noise_weight, self.pixel_weight) < 0:
            raise UserError("--pixel-weight and --noise-weight must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class EditConfig:
    """How a direction from class to class is found, and how far an image is moved. UserError for what cannot be."""

    space: Literal["w", "z"] | None = None  # None: w if the generator has one, else z
    samples: int = 100  # of each of the two classes, on which a direction is found
    pixel_weight: float = 0.1  # of the change of pixels that a direction avoids
    keep_weight: float = 0.1  # of the change of other classes' logits that it avoids
    reach: float = 0.5  # probability of the class asked for at which an image has arrived
    limit: float = 4.0  # the largest step, in units of the samples' spread

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise UserError(f"--samples {self.samples}: two of each class are needed at least; give more")
        if not all(0 <= weight < math.inf for weight in (self.pixel_weight, self.keep_weight)):
            raise UserError("--pixel-weight and --keep-weight must be 0 or more")
        if not (0 < self.reach < 1 and 0 < self.limit < math.inf):
            raise UserError("--reach must lie between 0 and 1, --limit above 0")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """One export."""

    format: str  # one of FORMATS
    out: Path
    overwrite: bool = False
    licence: str = "unknown"  # that a model card names
    data: str | None = None  # packed images of the check; None: as the config says
    calibration: str | None = None  # likewise, for int8's ranges
    n: int = 1000  # images of the check, at most
    calibrated: int = 256  # images of the calibration, at most
    batch_size: int = 64
    repeats: int = 5


def check_film(path: Path, *, fps: int) -> None:
    """Raise UserError unless a film of this name and speed can be written here."""
    if path.suffix.lower() not in (".mp4", ".gif"):
        raise UserError(f"--out {path}: a film is an MP4 or a GIF; its name must end in .mp4 or .gif")
    if path.suffix.lower() == ".gif" and fps > FASTEST_GIF:
        raise UserError(f"--fps {fps}: a GIF shows at most {FASTEST_GIF} frames a second; write an .mp4 or go slower")


def check_suffix(path: Path, suffix: str, what: str = "this is a PNG file", *, option: str = "--out") -> None:
    """Raise UserError unless the file's name ends so."""
    if path.suffix.lower() != suffix:
        raise UserError(f"{option} {path}: {what}; its name must end in {suffix}")


def parse_psis(text: str) -> list[float]:
    """Numbers with commas between. Raises UserError for anything else."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise UserError(f"--psis {text}: not numbers with commas between; write them like 0,0.5,1")
    return values
