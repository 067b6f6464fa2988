"""Show the progress of long work: a bar on a terminal, else an occasional line with time left."""

import io
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

from duetgan.utils.text import duration

IS_SHOWN = ContextVar("progress is shown", default=True)  # False inside `showing(False)`
# without a terminal, however long a step or an evaluation takes
SECONDS_BETWEEN_LINES = 25.0


class _Nowhere(io.TextIOBase):
    """A stream that drops what is written."""

    def write(self, text: str, /) -> int:
        return len(text)


class Bar(tqdm):
    """tqdm's bar, or lines on stderr where no bar can be drawn: a log file, CI, a terminal without
    size.

    A line reads `14:03:21 packing: 1,200 of 5,000 images (24%), 85.3/s, 45 s left`. The time left
    is estimated from recent progress, without the work inside `pausing`. Functions of the library
    with an argument `progress` pass `disable=not progress`, or call others inside `showing`.
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
        self._pause = ""  # description of the current pause
        self._closed = threading.Event()
        disable = disable or not IS_SHOWN.get()
        prints_lines = not disable and not has_terminal()
        stream = _Nowhere() if prints_lines else sys.stderr
        super().__init__(iterable, desc, total, file=stream, disable=disable, **options)
        if prints_lines:
            threading.Thread(target=self._print_lines, name="progress", daemon=True).start()

    @contextmanager
    def pausing(self, description: str) -> Iterator[None]:
        """Exclude the work in the block from the estimate of the time left; lines show its
        `description`.
        """
        if self._pause or self.disable:
            yield
            return
        self._pause = description
        started = time.time()
        try:
            yield
        finally:
            self._pause = ""
            seconds = time.time() - started
            self.start_t += seconds
            self.last_print_t += seconds

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _print_lines(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_LINES):
            with suppress(OSError, ValueError):  # the stream has been closed
                tqdm.write(f"{time.strftime('%H:%M:%S')} {self.text()}", file=sys.stderr)
                sys.stderr.flush()

    def text(self) -> str:
        """Return the progress line without the time of day."""
        units = f"{self.unit}es" if self.unit.endswith("ch") else f"{self.unit}s"
        progress = f"{self.n:,} {units}"
        if self.total:
            progress = f"{self.n:,} of {self.total:,} {units} ({self.n / self.total:.0%})"
        if self._pause:
            return f"{self._pause}, at {progress}"
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
