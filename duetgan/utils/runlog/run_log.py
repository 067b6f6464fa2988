"""Write a run's metrics to the console, `metrics.jsonl` and TensorBoard, on rank 0."""

import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from duetgan.utils.distributed import collectives
from duetgan.utils.files import replace_file
from duetgan.utils.runlog.progress import Bar

Metrics = dict[str, float | int]


def say(message: str) -> None:
    """Print a line for people on stderr, above the progress bar. Results go to stdout instead."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


def say_main(message: str) -> None:
    if collectives.is_main():
        say(message)


def say_refused(path: Path, error: Exception, without: str) -> None:
    """Warn that `path` cannot be written and that training continues without a feature, `without`.

    `error` is an OSError, or an exception that was raised from one.
    """
    reason = getattr(error.__cause__ or error, "strerror", None) or error
    say(f"warning: {path}: cannot be written ({reason}); training continues without {without}")


class Events:
    """A writer of TensorBoard events.

    After a disk error it prints one warning and writes nothing more; training continues.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer: SummaryWriter | None = None
        self.refused = False  # True after an error of the disk: nothing more is written
        threading.excepthook = _excepthook
        with self._ending():
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add("scalar", name, value, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Add a uint8 [H, W] or [H, W, 3] image."""
        self.add("image", name, pixels, step, dataformats="HW" if pixels.ndim == 2 else "HWC")

    def add(self, kind: str, *arguments: object, **options: object) -> None:
        """Call the method `add_KIND` of TensorBoard's writer, such as `add_scalar`.

        Does nothing after a disk error.
        """
        with self._ending():
            if self._writer is not None:
                getattr(self._writer, f"add_{kind}")(*arguments, **options)

    def close(self) -> None:
        with self._ending():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Catch an OSError of TensorBoard's writer in the block, warn, and stop writing events.

        The OSError may have occurred in the writer's thread, before the block.
        """
        try:
            yield
        except OSError as error:
            say_refused(self._folder, error, "TensorBoard")
            self.refused = True
            writer, self._writer = self._writer, None
            if writer is not None:
                inner: Any = writer.file_writer
                with suppress(OSError):
                    # This ends the thread. SummaryWriter.close() would flush first, and raise.
                    inner.event_writer.close()


def _excepthook(args: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread's exception, unless it is an OSError of TensorBoard's writer.

    The writer's next call raises such an OSError again.
    """
    is_writer = type(args.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
    if not (is_writer and isinstance(args.exc_value, OSError)):
        threading.__excepthook__(args)


class RunLog:
    """The log of a run: `metrics.jsonl`, TensorBoard events and the progress bar.

    `metrics.jsonl` has a row, a JSON object, for each step whose metrics are logged. If `active` is
    False, as on all ranks but 0, nothing is logged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        active: bool,
        tensorboard: bool,
        total_steps: int,
    ) -> None:
        self._folder, self._path = folder, folder / "metrics.jsonl"
        self._active, self._tensorboard = active, tensorboard and active
        self._total = total_steps
        self.events: Events | None = None
        self._bar: Bar | None = None
        self._refused: set[str] = set()  # features whose failed writes were reported

    def open(self, step: int, total: int | None = None, *, going_on: bool = True) -> None:
        """Start logging at `step` of `total` steps (None: the previous number).

        Rows after `step` are deleted; a run that was killed some time after its checkpoint leaves
        such rows. `going_on` is True if training continues; then partial rows (see `metrics`) are
        deleted too.
        """
        self._total = total or self._total
        if not self._active:
            return
        cut_back(self._path, step, partial=going_on)
        if self._tensorboard:
            self.events = Events(self._folder / "tensorboard", purge_step=step + 1)
            config = self._folder / "config.yaml"
            if config.is_file():  # shown as code in Markdown
                self.events.add(
                    "text",
                    "config",
                    textwrap.indent(config.read_text(encoding="utf-8"), "    "),
                    step,
                )
        self._bar = Bar(
            total=self._total, initial=step, unit="step", dynamic_ncols=True, mininterval=1.0
        )

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def metrics(self, step: int, metrics: Metrics, *, partial: bool = False) -> None:
        """Log the metrics of a step. NaN and infinity become null in metrics.jsonl.

        Args:
            partial: True if the run stops at a step that is not usually logged. TensorBoard does
                not get such metrics, and their row is deleted when the run continues.
        """
        if not self._active:
            return
        row: dict[str, object] = {"step": step}
        if partial:
            row["partial"] = True
        for key, value in metrics.items():
            if isinstance(value, int):
                row[key] = value
            else:
                row[key] = float(f"{value:.6g}") if np.isfinite(value) else None
        if self.events is not None and not partial:
            self.events.scalars(step, metrics)
        self._append(json.dumps(row) + "\n")
        values = {}
        for key, value in metrics.items():
            if key.startswith("loss/"):
                values[f"{key[5:]} loss"] = f"{value:.3g}"
        if self._bar is not None and values:
            if "images_per_second" in metrics:
                values["images/s"] = f"{metrics['images_per_second']:.4g}"
            self._bar.set_postfix(values, refresh=False)

    def _append(self, line: str) -> None:
        """Append a line to metrics.jsonl; if the disk is full, warn and lose the line.

        A line that is only partly written is removed, so that the next one begins on a new line.
        """
        remaining = line.encode()
        try:
            # Unbuffered, because a buffer would write its content when the file is closed.
            with open(self._path, "ab", buffering=0) as file:
                start = file.tell()
                try:
                    while remaining:
                        remaining = remaining[file.write(remaining) :]
                except OSError:
                    file.truncate(start)
                    raise
        except OSError as error:
            self.refused(self._path, error, "its rows")

    def refused(self, path: Path, error: Exception, without: str) -> None:
        """Call `say_refused`, but only once for each feature `without`."""
        if without not in self._refused:
            self._refused.add(without)
            say_refused(path, error, without)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Add a uint8 [H, W] or [H, W, 3] image to TensorBoard."""
        if self.events is not None:
            self.events.image(step, name, pixels)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()
            self._tensorboard = not self.events.refused
            self.events = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def cut_back(path: Path, step: int, *, partial: bool) -> None:
    """Delete the rows after `step` from the metrics.jsonl at `path`.

    Also deletes incomplete lines and, if `partial` is True, partial rows (see `RunLog.metrics`).
    """
    if not path.is_file():
        return
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if row["step"] <= step and not (partial and row.get("partial")):
                lines.append(line + "\n")
    content = "".join(lines).encode()
    if path.read_bytes().startswith(content):
        os.truncate(path, len(content))  # works on a full disk
    else:
        replace_file(path, content)
