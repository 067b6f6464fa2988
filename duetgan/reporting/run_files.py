"""What a run folder holds, read for a report: tolerant of what is missing, open about what is
damaged.
"""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from duetgan.utils import bounded
from duetgan.utils.config import yaml_files

FAR = 1e100  # no figure of a training; a chart's ticks would overflow
COUNTS = ("step", "images", "val/n")  # keys of metrics.jsonl that are no curves
# folders whose files are shown elsewhere or not at all; ranks that end remove the last one
OWN = ("checkpoints", "eval", "samples", "tensorboard", "heartbeat")
OUTPUTS = (".png", ".gif", ".mp4", ".onnx", ".pt2", ".safetensors", ".lmdb")


def _integer(digits: str) -> float:
    """A JSON integer; one that no float holds is infinite, as JSON's other numbers are."""
    return int(digits) if len(digits) < 300 else float(digits)


class Run:
    """What a run folder holds, read tolerantly: what is missing is empty, what is damaged has a
    line in `notes`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Never raises for missing or damaged files."""
        from duetgan.metrics.tables import credible  # brings torch along

        self.folder, self.notes = Path(folder), list[str]()
        self.config = self._text("config.yaml")
        self.records = self._records()  # of metrics.jsonl, one a step, in order of steps
        self.status = self._object("status.json")
        self.last, self.best = (
            self._object("checkpoints/last.json"),
            self._object("checkpoints/best.json"),
        )
        self.data = self._object("data.json")  # facts of the images, by their role
        self.evaluation = credible(self._object("eval/metrics.json"))
        grids = self.folder.glob("samples/step-*.png")
        # in order of steps
        self.samples = sorted(path for path in grids if path.stem[5:].isdecimal())
        self.images = sorted(self.folder.glob("eval/*.png"))
        order = self.evaluation.get("images")  # another evaluation's leftovers are not shown
        if isinstance(order, list):
            self.images = sorted(
                (p for p in self.images if p.name in order), key=lambda path: order.index(path.name)
            )
        files = list(self.folder.glob("*"))
        files += [path for place in files if place.name not in OWN for path in place.glob("*")]
        # what predict.py, generate.py and export.py wrote into the folder
        self.outputs = sorted(
            p for p in files if p.suffix in OUTPUTS and p.is_file() and p.name[0] != "."
        )

    def _text(self, name: str) -> str:
        """A text file, or nothing and a note; nothing at all where there is none."""
        path = self.folder / name
        if not path.exists():
            return ""
        try:
            return bounded.read_file(path, bounded.TABLE).decode(errors="replace")
        except OSError as error:
            self.notes.append(f"{path.name} cannot be read: {error}")
            return ""

    def _object(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._text(name) or "{}", parse_int=_integer)
            if not isinstance(value, dict):
                raise ValueError("it does not hold an object")
            return value
        except (ValueError, RecursionError) as error:
            self.notes.append(f"{Path(name).name} cannot be read: {error}")
            return {}

    def _records(self) -> list[dict[str, Any]]:
        """The records of one step become one; the later value of a key counts; torn lines are
        counted in `notes`.
        """
        by_step: dict[int, dict[str, Any]] = {}
        torn = 0
        for line in self._text("metrics.jsonl").splitlines():
            try:
                record = json.loads(line, parse_int=_integer)
                if abs(step := int(record["step"])) >= FAR:
                    raise ValueError("no step")
                by_step[step] = by_step.get(step, {}) | record
            except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
                torn += 1
        if torn:
            self.notes.append(f"{torn} line(s) of metrics.jsonl cannot be read")
        return [by_step[step] for step in sorted(by_step)]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def series(self) -> dict[str, list[tuple[float, float]]]:
        """(step, value) of every scalar of metrics.jsonl but COUNTS, by key; NaN: it was not
        finite, or beyond FAR.
        """
        series: dict[str, list[tuple[float, float]]] = {}
        for record in self.records:
            for key, value in record.items():
                # null stands for a value that was not finite
                value = math.nan if value is None else value
                if (
                    key not in COUNTS
                    and isinstance(value, int | float)
                    and not isinstance(value, bool)
                ):
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
