"""The runs that the explorer shows: their models, what the page is told of them, and their training images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.classifier import Classifier
from models.gan import ImageGenerator
from models.restore import classifier_from, generator_from
from reporting.run_files import Run, read_run
from utils.checkpoint import load, resolve_for_people
from utils.errors import UserError

QUICKSTART = Path("runs/quickstart")  # what is shown where nothing is named


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One model and the run folder that it came from."""

    name: str
    path: Path  # as it was named: a run folder or a checkpoint
    checkpoint: dict[str, Any]  # without its state
    model: ImageGenerator | Classifier

    @property
    def task(self) -> str:
        """gan or classifier."""
        return self.checkpoint["task"]

    @property
    def classes(self) -> list[str]:
        """The names of the classes; none where a generator is unconditional."""
        return self.checkpoint["classes"] if self.model.classes else []

    def files(self) -> Run:
        """What the run folder holds now: one that is still training has more later. Empty for a checkpoint file."""
        return read_run(self.path) if self.path.is_dir() else Run(folder=self.path)

    def facts(self) -> dict[str, Any]:
        """What the page is told."""
        styles = isinstance(self.model, Classifier) or not self.model.has_styles
        return {
            "name": self.name,
            "task": self.task,
            "step": self.checkpoint["step"],
            "classes": self.classes,
            "resolution": self.model.resolution,
            "layers": 0 if styles else getattr(self.model, "num_ws", 0),
            "steps": [int(path.stem.removeprefix("step-")) for path in self.files().samples],
        }


def open_runs(named: Sequence[str], *, which: str, device: torch.device) -> list[Shown]:
    """Load the models; a folder that is no run stands for the runs in it, and no name for the quickstart's.
    GANs come first.

    Raises UserError for what holds no checkpoint.
    """
    paths = list(dict.fromkeys(run for name in named or [str(QUICKSTART)] for run in _runs_in(Path(name))))
    if not named and not QUICKSTART.is_dir():
        raise UserError(f"there is no {QUICKSTART}; name a run with --checkpoint RUN, or run quickstart.py first")
    names = _told_apart(paths)
    opened = [_open(path, name, which, device) for path, name in zip(paths, names, strict=True)]
    return sorted(opened, key=lambda shown: shown.task != "gan")


def _told_apart(paths: Sequence[Path]) -> list[str]:
    """A name for each: its last part, with as many before it as are needed where others end so, too."""
    parts = [path.resolve().parts for path in paths]
    names = ["" for _ in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        names = [name or (end if ends.count(end) == 1 else "") for name, end in zip(names, ends, strict=True)]
    return names


def _runs_in(path: Path) -> list[Path]:
    """A run or a file itself; of another folder the runs in it, e.g. a quickstart's `gan` and `classifier`."""
    inside = sorted(file.parent.parent for file in path.glob("*/checkpoints/last.json"))
    return inside if inside and not (path / "checkpoints").is_dir() else [path]


def _open(path: Path, name: str, which: str, device: torch.device) -> Shown:
    checkpoint = load(resolve_for_people(path, which))
    task = checkpoint["task"]
    if task not in ("gan", "classifier"):
        raise UserError(f"{path}: is of task {task!r}; the explorer shows GANs and classifiers")
    model = (generator_from if task == "gan" else classifier_from)(checkpoint, device)
    del checkpoint["state"]  # the largest part, and no longer needed
    return Shown(name=name, path=path, checkpoint=checkpoint, model=model)
