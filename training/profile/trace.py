"""torch.profiler's side of a profile: the trace, the operators, and memory by phase read from the trace's timeline."""

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.profile.ranges import OTHER

STEP = "step"  # the range around a training step
CPU_DEVICE, ACCELERATOR_DEVICE = 0, 1  # "Device Type" of the trace's memory events


@dataclass
class PhaseMemory:
    """Bytes, above what is held between steps."""

    adds: float  # allocated less given back in the phase, a step
    peak: int  # held at most while the phase ran


@dataclass
class Timeline:
    """What is read from a trace."""

    memory: dict[str, PhaseMemory]
    peak: int  # bytes
    python_share: float  # of the steps' time in which no operator was running


def tracer(device: torch.device) -> torch.profiler.profile:
    """torch.profiler over the host, and the accelerator where there is one."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its errors about CUDA on machines without it are none
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(getattr(torch.profiler.ProfilerActivity, device.type.upper()))
    return torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what torch says of memory that is older than the trace; everything else is said afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as heard:
        os.dup2(heard.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            heard.seek(0)
            for line in heard.read().splitlines(keepends=True):
                if b"allocated before the profiling started" not in line:
                    os.write(2, line)


def export(profiler: torch.profiler.profile, path: Path, device: torch.device, phases: set[str]) -> Timeline:
    """Write the Chrome trace (gzip) and read memory and Python's share from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kind = CPU_DEVICE if device.type == "cpu" else ACCELERATOR_DEVICE
    return read_timeline(events, phases, kind)


def read_timeline(events: Iterable[Mapping[str, Any]], phases: set[str], device_type: int = CPU_DEVICE) -> Timeline:
    """Memory by phase and Python's share from the events of a Chrome trace by torch.profiler."""
    events = list(events)
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    steps = [_interval(e) for e in ranges if e["name"] == STEP]
    operators = _united(_interval(e) for e in events if e.get("cat") == "cpu_op" and e["ph"] == "X")
    changes = [
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == device_type
    ]
    memory, peak = _memory([(*_interval(e), e["name"]) for e in ranges if e["name"] in phases], changes, steps)
    whole = sum(end - start for start, end in steps)
    busy = sum(_overlap(operators, step) for step in steps)
    return Timeline(memory, peak, 1 - busy / whole if whole else 0.0)


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _united(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals in order: operators call operators, and threads run side by side."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _overlap(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    return sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in intervals)


def _memory(
    ranges: list[tuple[float, float, str]], changes: list[tuple[float, int]], steps: list[tuple[float, float]]
) -> tuple[dict[str, PhaseMemory], int]:
    """Each change of memory goes to the innermost range that is open at its time. What a phase adds is taken from the
    second step on: the first gives nothing back that was allocated before the trace.
    """
    starts = sorted(start for start, _ in steps)
    settled = starts[1] if len(starts) > 1 else 0.0
    found = {OTHER: PhaseMemory(0.0, 0)}
    held = peak = 0
    for at, name, size in _in_order(ranges, changes):
        entry = found.setdefault(name, PhaseMemory(0.0, 0))
        held += size
        if at >= settled:
            entry.adds += size / max(1, len(starts) - 1)
        entry.peak, peak = max(entry.peak, held), max(peak, held)
    return found, peak


def _in_order(
    ranges: list[tuple[float, float, str]], changes: list[tuple[float, int]]
) -> Iterator[tuple[float, str, int]]:
    """(time, innermost phase, bytes) of every range's begin (0 bytes) and every change, in order of time: a range that
    ends goes before one that begins, an outer one begins before its inner ones.
    """
    marks = [(end, 0, -start, name, 0) for start, end, name in ranges]
    marks += [(start, 1, -end, name, 0) for start, end, name in ranges]
    marks += [(at, 2, 0.0, "", size) for at, size in changes]
    open_ranges: list[str] = []
    for at, kind, _, name, size in sorted(marks):
        if kind == 0:
            open_ranges.pop()
            continue
        if kind == 1:
            open_ranges.append(name)
        yield at, open_ranges[-1] if open_ranges else OTHER, size


def operators(
    profiler: torch.profiler.profile, steps: int, device: torch.device
) -> list[tuple[str, float, float, float]]:
    """(name, calls a step, own seconds a step, share of all operators' time), the most costly first."""
    rows = []
    for average in profiler.key_averages():
        # an accelerator's kernels have rows of their own, besides those of the operators that started them
        if not average.is_user_annotation and average.device_type == torch.autograd.DeviceType.CPU:
            time = average.self_cpu_time_total if device.type == "cpu" else average.self_device_time_total
            rows.append((average.key, average.count / steps, time / 1e6 / steps))
    total = sum(seconds for *_, seconds in rows) or 1.0
    return sorted(((*row, row[2] / total) for row in rows), key=lambda row: row[2], reverse=True)
