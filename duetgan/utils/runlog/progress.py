"""Show the progress of long work: a bar on a terminal, else an occasional line with time left."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from duetgan.utils.text import duration

# without a terminal, however long a step or an evaluation takes
SECONDS_BETWEEN_LINES = 25.0
RECENT = 30  # latest moments, a second apart or more, from which the time left is estimated


class Bar(tqdm):
    """tqdm's bar, or lines on stderr where no bar can be drawn: a log file, CI, a terminal without
    size.

    A line reads `14:03:21 packing: 1,200 of 5,000 images (24 %), 85.3/s, 45 s left`. The time left
    is estimated from recent progress, without the first item, which includes preparations, and
    without the work inside `pausing`.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str = "",
        total: int | None = None,
        *,
        disable: bool = False,  # show nothing at all
        **options: Any,  # of tqdm
    ) -> None:
        self.lines = not disable and not has_terminal()
        self.suffix = ""  # text at the end of a line
        self.done = int(options.get("initial", 0))
        self._description = desc
        self._unit = options.get("unit", "it")
        self._moments: deque[tuple[float, int]] = deque(maxlen=RECENT)  # (clock, pieces done)
        self._paused_for = 0.0  # seconds in all
        self._pause = ("", 0.0)  # description of the current pause, and its start
        self._closed = threading.Event()
        super().__init__(
            iterable, desc, total, file=sys.stderr, disable=disable or self.lines, **options
        )
        if self.lines:
            threading.Thread(target=self._say_now_and_then, name="progress", daemon=True).start()

    def update(self, n: float | None = 1) -> bool | None:
        self.done += int(n or 0)
        now = time.monotonic() - self._paused_for
        if not self._moments or now - self._moments[-1][0] >= 1:
            self._moments.append((now, self.done))
        return super().update(n)

    @contextmanager
    def pausing(self, description: str) -> Iterator[None]:
        """Exclude the work in the block from the estimate of the time left; lines show its
        `description`.
        """
        if self._pause[0]:
            yield
            return
        self._pause = description, time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - self._pause[1]
            self._paused_for += seconds
            self._pause = ("", 0.0)
            if not self.disable:  # tqdm's own clock
                self.start_t += seconds
                self.last_print_t += seconds

    def __iter__(self) -> Iterator[Any]:
        if not self.lines:
            yield from super().__iter__()
            return
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _say_now_and_then(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_LINES):
            with suppress(OSError, ValueError):  # the stream has been closed
                tqdm.write(f"{time.strftime('%H:%M:%S')} {self.text()}", file=sys.stderr)
                sys.stderr.flush()

    def text(self) -> str:
        """Return the progress line without the time of day."""
        total = self.total
        pause, pause_start = self._pause
        prefix = f"{self._description}: " if self._description else ""
        unit = self._unit
        if unit != "it" and not unit.endswith("s"):
            unit += "es" if unit.endswith("ch") else "s"
        progress = f"{self.done:,} {unit}"
        if total:
            progress = f"{self.done:,} of {total:,} {unit} ({self.done / total:.0%})"
        if pause:
            return f"{pause}: for {duration(time.monotonic() - pause_start)}, at {progress}"
        start, start_done = self._moments[0] if self._moments else (0.0, self.done)
        if self.done == start_done:
            return f"{prefix}{progress}{self.suffix}"
        rate = (self.done - start_done) / max(time.monotonic() - self._paused_for - start, 1e-9)
        time_left = f", {duration((total - self.done) / rate)} left" if total else ""
        return f"{prefix}{progress}, {rate:,.3g}/s{time_left}{self.suffix}"


def has_terminal() -> bool:
    """Return True if stderr can show a bar; the terminals of some containers have 0 columns."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False
