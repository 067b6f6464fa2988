"""How far something is that takes a while: a bar on a terminal, else a line now and then with clock
and time left.
"""

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

# where no bar can be drawn, however long a step or an evaluation takes
SECONDS_BETWEEN_LINES = 25.0
RECENT = 30  # moments, a second apart or more, that the estimate of the time left looks back on


class Bar(tqdm):
    """tqdm's bar; where none can be drawn (a log file, CI, a terminal without a size) lines on
    stderr instead: `14:03:21 packing: 1,200 of 5,000 images (24 %), 85.3/s, 45 s left`. The time
    left is estimated from recent progress, without the first piece, which includes preparations,
    and without `pausing`.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str = "",
        total: int | None = None,
        *,
        disable: bool = False,  # show nothing at all
        **more: Any,
    ) -> None:
        self.lines = not disable and not has_terminal()
        self.more = ""  # what a line says besides
        self.done = int(more.get("initial", 0))
        self._what, self._unit = desc, more.get("unit", "it")
        self._moments: deque[tuple[float, int]] = deque(maxlen=RECENT)  # (clock, pieces done)
        # seconds in all; what is being done instead, since when
        self._paused_for, self._pause = 0.0, ("", 0.0)
        self._closed = threading.Event()
        super().__init__(
            iterable, desc, total, file=sys.stderr, disable=disable or self.lines, **more
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
    def pausing(self, what: str) -> Iterator[None]:
        """Leave other work out of the time left; meanwhile lines say that `what` is being done."""
        if self._pause[0]:
            yield
            return
        self._pause = what, time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - self._pause[1]
            self._paused_for, self._pause = self._paused_for + seconds, ("", 0.0)
            if not self.disable:  # tqdm's own clock
                self.start_t += seconds
                self.last_print_t += seconds

    def __iter__(self) -> Iterator[Any]:
        if not self.lines:
            yield from super().__iter__()
            return
        try:
            for each in self.iterable:
                yield each
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
        """What a line says, but for the clock."""
        total, (pause, since) = self.total, self._pause
        what = f"{self._what}: " if self._what else ""
        plural = (
            ""
            if self._unit.endswith("s") or self._unit == "it"
            else "es"
            if self._unit.endswith("ch")
            else "s"
        )
        unit = self._unit + plural
        far = (
            f"{self.done:,} of {total:,} {unit} ({self.done / total:.0%})"
            if total
            else f"{self.done:,} {unit}"
        )
        if pause:
            return f"{pause}: for {duration(time.monotonic() - since)}, at {far}"
        first, before = self._moments[0] if self._moments else (0.0, self.done)
        if self.done == before:
            return f"{what}{far}{self.more}"
        rate = (self.done - before) / max(time.monotonic() - self._paused_for - first, 1e-9)
        left = f", {duration((total - self.done) / rate)} left" if total else ""
        return f"{what}{far}, {rate:,.3g}/s{left}{self.more}"


def has_terminal() -> bool:
    """Whether a bar can be drawn on stderr: some containers' terminals are 0 columns wide."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False
