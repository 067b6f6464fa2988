"""What a run folder holds, read for a report: tolerant of what is missing, open about what is damaged."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from utils import bounded
from utils.config import yaml_files

FAR = 1e100  # no figure of a training; a chart's ticks would overflow
COUNTS = ("step", "images", "val/n")  # keys of metrics.jsonl that are no curves
# folders whose files are shown elsewhere or not at all; ranks that end remove the last one
OWN = ("checkpoints", "eval", "samples", "tensorboard", "heartbeat")
OUTPUTS = (".png", ".gif", ".mp4", ".onnx", ".pt2", ".safetensors", ".lmdb")


@dataclass(kw_only=True)
class Run:
    """What a run folder holds, read tolerantly: what is missing is empty, what is damaged has a line in `notes`."""

    folder: Path
    config: str = ""  # the text of config.yaml
    records: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl, one a step, in order of steps
    status: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)  # checkpoints/last.json
    best: dict[str, Any] = field(default_factory=dict)  # checkpoints/best.json
    data: dict[str, Any] = field(default_factory=dict)  # data.json: facts of the images, by their role
    evaluation: dict[str, Any] = field(default_factory=dict)  # eval/metrics.json
    samples: list[Path] = field(default_factory=list)  # in order of steps
    images: list[Path] = field(default_factory=list)  # eval/*.png
    outputs: list[Path] = field(default_factory=list)  # what predict.py, generate.py, export.py wrote into the folder
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's own."""
        return self.folder.resolve().name

    @property
    def series(self) -> dict[str, list[tuple[float, float]]]:
        """(step, value) of every scalar of metrics.jsonl but COUNTS, by key; NaN: it was not finite, or beyond FAR."""
        series: dict[str, list[tuple[float, float]]] = {}
        for record in self.records:
            for key, value in record.items():
                value = math.nan if value is None else value  # null stands for a value that was not finite
                if key not in COUNTS and isinstance(value, int | float) and not isinstance(value, bool):
                    point = float(record["step"]), float(value) if abs(value) < FAR else math.nan
                    series.setdefault(key, []).append(point)
        return series

    @property
    def task(self) -> str:
        """What the config says that is trained; empty without a readable one."""
        try:
            config = yaml_files.load(self.config)
        except (yaml.YAMLError, ValueError):
            config = None
        return str(config.get("task", "")) if isinstance(config, dict) else ""


def read_run(folder: str | Path) -> Run:
    """Read a run folder; never raises for missing or damaged files."""
    folder = Path(folder)
    run = Run(folder=folder)
    run.config = _read_text(folder / "config.yaml", run.notes)
    run.records = _read_records(folder / "metrics.jsonl", run.notes)
    run.status = _read_object(folder / "status.json", run.notes)
    run.last = _read_object(folder / "checkpoints" / "last.json", run.notes)
    run.best = _read_object(folder / "checkpoints" / "best.json", run.notes)
    run.data = _read_object(folder / "data.json", run.notes)
    run.evaluation = _read_object(folder / "eval" / "metrics.json", run.notes)
    run.samples = sorted(path for path in (folder / "samples").glob("step-*.png") if path.stem[5:].isdecimal())
    run.images = sorted((folder / "eval").glob("*.png"))
    files = list(folder.glob("*"))
    files += [path for place in files if place.name not in OWN for path in place.glob("*")]
    run.outputs = sorted(path for path in files if path.suffix in OUTPUTS and path.is_file() and path.name[0] != ".")
    order = run.evaluation.get("images")  # as the evaluation lists them; another evaluation's leftovers are not shown
    if isinstance(order, list):
        run.images = sorted((p for p in run.images if p.name in order), key=lambda path: order.index(path.name))
    return run


def _read_text(path: Path, notes: list[str]) -> str:
    """A text file, or nothing and a note; nothing at all where there is none."""
    if not path.exists():
        return ""
    try:
        return bounded.read_file(path, bounded.TABLE).decode(errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return ""


def _integer(digits: str) -> float:
    """A JSON integer; one that no float holds is infinite, as JSON's other numbers are."""
    return int(digits) if len(digits) < 300 else float(digits)


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path, notes) or "{}", parse_int=_integer)
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} does not hold an object")
        return {}
    return value


def _read_records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The records of one step become one; the later value of a key counts; torn lines are counted in `notes`."""
    by_step: dict[int, dict[str, Any]] = {}
    torn = 0
    for line in _read_text(path, notes).splitlines():
        try:
            record = json.loads(line, parse_int=_integer)
            if abs(step := int(record["step"])) >= FAR:
                raise ValueError("no step")
            by_step[step] = by_step.get(step, {}) | record
        except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
            torn += 1
    if torn:
        notes.append(f"{torn} line(s) of {path.name} cannot be read")
    return [by_step[step] for step in sorted(by_step)]
