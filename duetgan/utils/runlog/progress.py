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

IS_SHOWN = ContextVar("progress is shown", default=True)  # False inside `showing(False)`
SECONDS_BETWEEN_LINES = 25.0  # without a terminal
LINE = "{n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left{postfix}"


class Bar(tqdm):
    """A progress bar of tqdm, or lines on stderr where no bar can be drawn.

    A log file, CI and a terminal without a size get lines such as `14:03:21 packing: 1200 of 5000,
    85.3image/s, 00:45 left`. A library function with an argument `progress` passes `disable=not
    progress`, or wraps calls that draw bars in `showing`.
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
        self._prints_lines = not has_terminal()
        self._last_line = time.monotonic()
        if self._prints_lines:
            options |= {"file": io.StringIO(), "bar_format": (f"{desc}: " if desc else "") + LINE}
        super().__init__(iterable, desc, total, disable=disable or not IS_SHOWN.get(), **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar, or print a line if the last one is older than SECONDS_BETWEEN_LINES."""
        if not self._prints_lines:
            super().display(msg, pos)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {self}", file=sys.stderr, flush=True)


@contextmanager
def showing(progress: bool) -> Iterator[None]:
    """Hide the progress bars of the block if `progress` is False."""
    token = IS_SHOWN.set(progress and IS_SHOWN.get())
    try:
        yield
    finally:
        IS_SHOWN.reset(token)


def has_terminal() -> bool:
    """Return True if a progress bar can be drawn, in a notebook or on a terminal.

    The terminals of some containers have 0 columns and cannot show one.
    """
    if "ipykernel" in sys.modules:
        return True
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False
