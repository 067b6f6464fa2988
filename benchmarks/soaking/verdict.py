"""What the log of a soak says: whether memory, files and threads of a process are flat; whether two runs end alike."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HUGE_PAGE = 2.0  # MiB
# measure -> what a trend may add up to over a lifetime and still count as flat. Memory: two huge pages, in which the
# heap grows (utils/heap.py); a leak adds up with time, however little it is.
MEASURES = {"anon_mib": 2 * HUGE_PAGE + 0.5, "files": 0.5, "threads": 0.5}
# What of a lifetime is not judged, because pools and caches fill: a share of it, at least so long, and until it has
# saved so often (every second time after an evaluation): on a busy machine a minute is a few steps.
WARM_UP, WARM_SECONDS, WARM_SAVES = 1 / 3, 60.0, 4
COOL_SECONDS = 20.0  # at a lifetime's end, not judged either: the report is drawn
SHORTEST = 120.0  # seconds that a trend is read from
FEWEST = 20  # samples, likewise


class Trend(NamedTuple):
    """A straight line through a process's samples."""

    slope: float  # a second
    error: float  # standard error of the slope, as wide as neighbouring samples resemble each other
    level: float  # mean
    seconds: float

    @property
    def most(self) -> float:
        """The steepest slope, a second, that the samples do not exclude (two standard errors)."""
        return self.slope + 2 * self.error

    def flat(self, allowed: float) -> bool:
        """Whether the slope is within its noise, or adds up to at most `allowed`."""
        return self.slope <= 2 * self.error or self.slope * self.seconds <= allowed


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Least squares, three samples or more. The residuals' correlation r of neighbours counts: n samples of a slowly
    wandering figure are worth n (1 - r) / (1 + r) independent ones.
    """
    n = len(times)
    middle, level = math.fsum(times) / n, math.fsum(values) / n
    spread = math.fsum((t - middle) ** 2 for t in times)
    slope = math.fsum((t - middle) * (v - level) for t, v in zip(times, values, strict=True)) / spread
    left = [v - level - slope * (t - middle) for t, v in zip(times, values, strict=True)]
    squares = math.fsum(e * e for e in left)
    pairs = math.fsum(a * b for a, b in itertools.pairwise(left))
    r = min(0.99, max(0.0, pairs / squares)) if squares > 0 else 0.0
    error = math.sqrt(squares / (n - 2) / spread * (1 + r) / (1 - r))
    return Trend(slope, error, level, times[-1] - times[0])


def trends(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], dict[str, Trend]]:
    """(run, start, role) -> measure -> its trend between warm-up and end; lifetimes that are too short are left out."""
    lives: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "role" in row:
            lives.setdefault((row["run"], row["start"], row["role"]), []).append(row)
    found = {}
    for life, samples in lives.items():
        first, last = samples[0]["time"], samples[-1]["time"]
        begin = max(first + WARM_SECONDS, first + WARM_UP * (last - first), _saved(samples, WARM_SAVES))
        kept = [row for row in samples if begin <= row["time"] <= last - COOL_SECONDS]
        if len(kept) >= FEWEST and kept[-1]["time"] - kept[0]["time"] >= SHORTEST:
            times = [row["time"] for row in kept]
            found[life] = {name: trend(times, [row[name] for row in kept]) for name in MEASURES}
    return found


def _saved(samples: Sequence[Mapping[str, Any]], times: int) -> float:
    """When a process had saved so often: time of the sample, infinity if it never did."""
    changes = (row["time"] for before, row in itertools.pairwise(samples) if row["saved"] != before["saved"])
    return next(itertools.islice(changes, times - 1, None), math.inf)


def other_rows(straight: Path, disturbed: Path) -> list[int]:
    """Steps whose rows of metrics.jsonl differ in more than times and memory. A full disk may have cost rows, and only
    one of the runs stops at --max-steps, with a partial row.
    """
    timing = ("images_per_second", "data_wait", "memory_mib")
    rows: list[list[dict[str, Any]]] = [
        [{k: v for k, v in json.loads(line).items() if k not in timing} for line in file.read_text().splitlines()]
        for file in (straight / "metrics.jsonl", disturbed / "metrics.jsonl")
    ]
    return [row["step"] for row in rows[1] if row not in rows[0] and "partial" not in row]
