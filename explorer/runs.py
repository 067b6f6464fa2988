"""The runs that the explorer shows: their models, what the page is told of them, and two of them side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duetgan.models.ready_made import read
from duetgan.models.restore import classifier_from, generator_from
from duetgan.reporting import figures
from duetgan.reporting.compare import shared_charts
from duetgan.reporting.report import render
from duetgan.reporting.run_files import Run
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.errors import UserError

QUICKSTART = Path("runs/quickstart")  # what is shown where nothing is named


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """One model and the run folder that it came from."""

    name: str
    path: Path  # as it was named: a run folder or a checkpoint
    checkpoint: dict[str, Any]  # without its state
    model: Any  # ImageGenerator or Classifier, by its task

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
        return Run(self.path)

    def facts(self) -> dict[str, Any]:
        """What the page is told."""
        return {
            "name": self.name,
            "task": self.task,
            "step": self.checkpoint["step"],
            "classes": self.classes,
            "resolution": self.model.resolution,
            "layers": self.model.num_ws if getattr(self.model, "has_styles", False) else 0,
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
    checkpoint = read(resolve_for_people(path, which))
    task = checkpoint["task"]
    if task not in ("gan", "classifier"):
        raise UserError(f"{path}: is of task {task!r}; the explorer shows GANs and classifiers")
    model = (generator_from if task == "gan" else classifier_from)(checkpoint, device)
    del checkpoint["state"]  # the largest part, and no longer needed
    return Shown(name=name, path=path, checkpoint=checkpoint, model=model)


def compare_page(a: Shown, b: Shown) -> str:
    """The HTML of two runs side by side, whatever they are, to be put into the page: their figures in a table, their
    curves in the same charts. Whether a difference is more than chance `python -m reporting.compare` says, of runs that
    were evaluated alike.
    """
    names, runs = (a.name, b.name), (a.files(), b.files())
    pairs = dict(zip(names, runs, strict=True))
    notes = [f"{name}: {note}" for name, run in pairs.items() for note in run.notes]
    results = [_results(run) for run in runs]
    progress = [{what: value for value, what in figures.progress(run)} for run in runs]  # how far and how fast
    both = (results, progress)
    rows = [(what, left.get(what, "-"), right.get(what, "-")) for left, right in both for what in left | right]
    return render("side_by_side.html.j2", names=names, rows=rows, charts_of_both=shared_charts(pairs), notes=notes)


def _results(run: Run) -> dict[str, str]:
    """The evaluation's figures by what they are; how sure one is stands beside it, for that is another for each run."""
    side: dict[str, str] = {}
    for row in figures.TILES:
        for value, text in figures.results(run, [row]):
            side[row.meaning] = f"{value}{text.removeprefix(row.meaning)}"
    for value, text in figures.headline(run):
        what, bracket, rest = text.partition(" (real images: ")  # of a distance
        if bracket:
            side[what] = f"{value} (real images: {rest}"
    return side
