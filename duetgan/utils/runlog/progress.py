"""Show the progress of long work: a bar on a terminal, else an occasional line with time left."""

import io
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

from duetgan.utils.text import duration

IS_SHOWN = ContextVar("progress is shown", default=True)  # False inside `showing(False)`
SECONDS_BETWEEN_LINES = 25.0  # without a terminal


class Bar(tqdm):
    """tqdm's bar, or lines on stderr where no bar can be drawn: a log file, CI, a terminal without
    size.

    A line reads `14:03:21 packing: 1,200 of 5,000 images (24%), 85.3/s, 45 s left`. The time left
    is estimated from recent progress, without the work inside `pausing`. A library function with an
    argument `progress` passes `disable=not progress`, or wraps calls that draw bars in `showing`.
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
        self.suffix = ""  # text at the end of a line
        self._prints_lines = not has_terminal()
        self._last_line = time.monotonic()
        stream = io.StringIO() if self._prints_lines else sys.stderr
        disable = disable or not IS_SHOWN.get()
        super().__init__(iterable, desc, total, file=stream, disable=disable, **options)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Exclude the work in the block from the estimate of the time left."""
        started = time.time()
        yield
        if not self.disable:
            seconds = time.time() - started
            self.start_t += seconds
            self.last_print_t += seconds

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar, or print a line if the last one was SECONDS_BETWEEN_LINES ago."""
        if not self._prints_lines:
            super().display(msg, pos)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {self.text()}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Return the progress line without the time of day."""
        units = f"{self.unit}es" if self.unit.endswith("ch") else f"{self.unit}s"
        progress = f"{self.n:,} {units}"
        if self.total:
            progress = f"{self.n:,} of {self.total:,} {units} ({self.n / self.total:.0%})"
        state = self.format_dict
        rate = state["rate"] or (self.n - self.initial) / max(state["elapsed"], 1e-9)
        if rate:
            progress += f", {rate:,.3g}/s"
        if rate and self.total:
            progress += f", {duration((self.total - self.n) / rate)} left"
        prefix = f"{self.desc}: " if self.desc else ""
        return f"{prefix}{progress}{self.suffix}"


@contextmanager
def showing(progress: bool) -> Iterator[None]:
    """Hide the progress bars of the work in the block unless `progress` is True."""
    token = IS_SHOWN.set(progress and IS_SHOWN.get())
    try:
        yield
    finally:
        IS_SHOWN.reset(token)


def has_terminal() -> bool:
    """Return True if stderr can show a bar, as notebooks can; the terminals of some containers have
    0 columns.
    """
    if "ipykernel" in sys.modules:
        return True
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False
