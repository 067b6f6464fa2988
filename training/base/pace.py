"""How fast a run goes: the threads of each step, and a line where it falls to half its speed that says why."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from duetgan.utils import threads
from duetgan.utils.distributed import collectives
from duetgan.utils.memory import CGROUP
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.text import listed

LOOK = 1.0  # seconds from one look at other programs to the next
PATIENCE = 5.0  # seconds that cores must have been free before they are taken back; twice as many the next time
VMSTAT = Path("/proc/vmstat")
SHORT = 2.0  # seconds; a log tick that is shorter tells nothing
SWAPPING = 100.0  # pages a second that come back from the disk


class Pace:
    """Sets torch's threads before each step, as `setting` says: their number here; by step; or `adapt`: by what other
    programs leave. What was set is kept in `by_step`, which repeats the run as `--threads '{0: 2, 120: 1}'`.
    """

    def __init__(self, setting: Any, device: torch.device) -> None:
        here = torch.get_num_threads()
        self.by_step: dict[int, int] = {0: here}  # first step -> threads from there on
        self._given = dict(setting) if isinstance(setting, dict) else {0: here}
        self._cpu = device.type == "cpu"
        self._adapts = setting == "adapt" and self._cpu and collectives.world_size() == 1
        self._load, self._looked, self._patience = threads.Load(), time.monotonic(), PATIENCE
        self._free_since: float | None = None
        self._span: Any = None  # what is trained: images of another size have another speed
        self._rates: list[float] = []
        self._told = False
        self._tick, self._counts = threads.Load(), _counts()

    def resume(self, step: int, by_step: dict[int, int]) -> None:
        """Take what a checkpoint of that step holds; where this process computes in another number, from there on."""
        self.by_step = {first: count for first, count in by_step.items() if first <= step} or self.by_step
        if not self._adapts:
            self._change(step, _at(self._given, step))

    def _change(self, step: int, count: int) -> None:
        if count != _at(self.by_step, step):
            self.by_step[step] = count

    def begin(self, step: int) -> None:
        """Before every update: set its threads."""
        if not self._adapts and step in self._given:
            self._change(step, self._given[step])
        if self._adapts and time.monotonic() - self._looked >= LOOK:
            self._look(step)
        if self._cpu and torch.get_num_threads() != (count := _at(self.by_step, step)):
            torch.set_num_threads(count)

    def _look(self, step: int) -> None:
        now, others, count = time.monotonic(), self._load.others(), _at(self.by_step, step)
        self._looked, fitting = now, threads.fitting(others)
        if fitting <= count:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        if fitting < count or (self._free_since is not None and now - self._free_since >= self._patience):
            self._patience *= 1 if fitting < count else 2
            self._free_since = None
            self._change(step, fitting)
            why = f"{threads.others_text(others)} (threads: adapt)"
            say_main(f"step {step}: {count} -> {threads.counted(fitting)}: {why}")

    # --- the watch

    def tick(self, span: Any, rate: float, waited: float) -> str:
        """What to say at a log tick since which `rate` images/s were trained, `waited` of the time for images; `span`:
        what was trained.
        """
        others, before, self._counts = self._tick.others(), self._counts, _counts()
        if self._counts[0] - before[0] < SHORT:
            return ""
        if span != self._span:  # the tick before may have been of both
            self._span, self._rates, self._told = span, [], False
            return ""
        usual = median(self._rates or [rate])
        if rate >= usual / 2:
            self._rates.append(rate)
            self._told = self._told and rate < 0.75 * usual
            return ""
        seconds, throttled, swapped = (now - then + 1e-9 for now, then in zip(self._counts, before, strict=True))
        why = {
            f"waiting for images took {waited:.0%} of the time (raw ones need no decoding: docs/lmdb.md)": waited > 0.5,
            f"the container's CPU quota held it back {throttled / seconds:.0%} of the time": throttled > 0.1 * seconds,
            f"memory is short, {swapped / seconds:,.0f} pages/s come from the disk (close programs, or make "
            "micro_batch smaller)": swapped > SWAPPING * seconds,
            f"{threads.others_text(others)} (stop them, or start again with --threads adapt)": self._cpu
            and others > threads.ROOM
            and not self._adapts,
        }
        causes = [text for text, holds in why.items() if holds]
        if self._told or not causes:
            return ""
        self._told = True
        return f"{rate:,.3g} images/s instead of {usual:,.3g}: {listed(causes, 4)}"


def _at(by_step: dict[int, int], step: int) -> int:
    return by_step[max(first for first in by_step if first <= step)]


def _counts() -> tuple[float, float, float]:
    """Seconds by the clock, seconds held back by the container's quota, pages that came back from the disk."""
    kept = {"throttled_usec": 0.0, "pswpin": 0.0}
    for file in (CGROUP / "cpu.stat", VMSTAT):
        if file.exists():
            kept |= {key: float(value) for key, value in map(str.split, file.read_text().splitlines()) if key in kept}
    return time.monotonic(), kept["throttled_usec"] / 1e6, kept["pswpin"]
