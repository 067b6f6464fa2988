"""Read the content of a run folder, for reports."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from duetgan.utils import files

MAX_VALUE = 1e100  # larger values would overflow the ticks of a chart
COUNTS = ("step", "images", "val/n")  # keys of metrics.jsonl that are no curves
Record = dict[str, Any]  # a JSON object
Document = Mapping[str, Any]  # a JSON object that is only read


class Run:
    """The content of a run folder. A missing or damaged file counts as empty."""

    def __init__(self, folder: str | Path) -> None:
        """Read the folder. Missing and damaged files raise nothing."""
        from duetgan.metrics.tables import credible  # imports torch

        self.folder = Path(folder)
        self.config = self._text("config.yaml")
        self.records = self._records()  # of metrics.jsonl: one for each step, in order of steps
        self.status = self._object("status.json")
        self.last = self._object("checkpoints/last.json")
        self.best = self._object("checkpoints/best.json")
        self.data = self._object("data.json")  # descriptions of the data sets, by role
        self.evaluation = credible(self._object("eval/metrics.json"))
        grids = self.folder.glob("samples/step-*.png")
        # The grids are in the order of steps.
        self.samples = sorted(path for path in grids if path.stem[5:].isdecimal())
        self.images = sorted(self.folder.glob("eval/*.png"))
        order = self.evaluation.get("images")
        if isinstance(order, list):  # Files that an earlier evaluation left are not listed in it.
            images = [path for path in self.images if path.name in order]
            self.images = sorted(images, key=lambda path: order.index(path.name))

    def _text(self, name: str) -> str:
        """Return the text of a file; empty if it is missing or unreadable."""
        try:
            return files.read_file(self.folder / name, files.TABLE).decode(errors="replace")
        except OSError:
            return ""

    def _object(self, name: str) -> Record:
        try:
            value = json.loads(self._text(name) or "{}")
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _records(self) -> list[Record]:
        """Return one record for each step in metrics.jsonl, in order of steps.

        If a step has several records, they are merged, and later values replace earlier ones.
        Damaged lines are skipped.
        """
        by_step: dict[int, Record] = {}
        for line in self._text("metrics.jsonl").splitlines():
            with suppress(ValueError, OverflowError, TypeError, KeyError, RecursionError):
                record = json.loads(line)
                step = int(record["step"])
                by_step[step] = by_step.get(step, {}) | record
        return [by_step[step] for step in sorted(by_step)]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def series(self) -> dict[str, list[tuple[float, float]]]:
        """The points (step, value) of each number in metrics.jsonl, by key.

        The keys in COUNTS are left out. A value is NaN if it was not finite or exceeds MAX_VALUE.
        """
        series: dict[str, list[tuple[float, float]]] = {}
        for record in self.records:
            for key, value in record.items():
                if value is None:  # null stands for a non-finite value
                    value = math.nan
                if key in COUNTS or type(value) not in (int, float):
                    continue
                y = value if abs(value) < MAX_VALUE else math.nan
                series.setdefault(key, []).append((float(record["step"]), float(y)))
        return series

    @property
    def task(self) -> str:
        """The `task` of the config; empty if the config is missing or unreadable."""
        match = re.search(r"^task: (\w+)", self.config, re.MULTILINE)
        return match[1] if match else ""
