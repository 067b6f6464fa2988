"""Where numbers go: the console, `metrics.jsonl`, TensorBoard, a tracker. Rank 0 writes; others are
silent.
"""

import json
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from duetgan.utils.distributed import collectives
from duetgan.utils.files import replace_file
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.runlog.trackers import Tracker

Metrics = dict[str, float | int]


def say(message: str) -> None:
    """One line for a person, on stderr, that does not tear the progress bar. Stdout is left to
    results.
    """
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


def say_main(message: str) -> None:
    if collectives.is_main():
        say(message)


def say_refused(path: Path, error: Exception, without: str) -> None:
    """Warn that `path` cannot be written. `error`: an OSError, or what was raised from it."""
    reason = getattr(error.__cause__ or error, "strerror", None) or error
    say(f"warning: {path}: cannot be written ({reason}); training continues without {without}")


class Events:
    """A folder of TensorBoard events. A disk that refuses them ends them, which is said once, and
    not the training.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer: SummaryWriter | None = None
        self.refused = False  # by the disk: nothing more is written
        if threading.excepthook is not _excepthook:
            _USUAL.append(threading.excepthook)
            threading.excepthook = _excepthook
        with self._ending():
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add("scalar", name, value, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Add a uint8 [H, W] or [H, W, 3] image."""
        self.add("image", name, pixels, step, dataformats="HW" if pixels.ndim == 2 else "HWC")

    def add(self, what: str, *arguments: Any, **options: Any) -> None:
        """As the writer's `add_scalar`, `add_text`, ..., while it can write."""
        with self._ending():
            if self._writer is not None:
                getattr(self._writer, f"add_{what}")(*arguments, **options)

    def close(self) -> None:
        with self._ending():
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """An OSError inside, or of the thread that wrote something earlier, ends the events."""
        try:
            yield
        except OSError as error:
            say_refused(self._folder, error, "TensorBoard")
            self.refused = True
            writer, self._writer = self._writer, None
            if writer is not None:
                inner: Any = writer.file_writer
                with suppress(OSError):
                    # ends its thread; SummaryWriter.close() flushes first, which raises
                    inner.event_writer.close()


_USUAL = [threading.excepthook]


def _excepthook(ended: threading.ExceptHookArgs) -> None:
    """What ends a SummaryWriter's thread is raised again where it is next called; no traceback
    besides.
    """
    writes = type(ended.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
    if not (writes and isinstance(ended.exc_value, OSError)):
        _USUAL[-1](ended)


class _SideBySide(nn.ModuleDict):
    """Networks in one module, so that one graph shows them all."""

    def forward(self, *inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        return tuple(network(*own) for network, own in zip(self.values(), inputs, strict=True))


class RunLog:
    """`metrics.jsonl` (one JSON object a log tick), TensorBoard events and the progress bar of one
    run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        active: bool,
        tensorboard: bool,
        total_steps: int,
        tracker: str = "none",
    ) -> None:
        self._folder, self._path = folder, folder / "metrics.jsonl"
        self._active, self._tensorboard = active, tensorboard and active
        self._total = total_steps
        self._tracker = Tracker(folder, tracker) if active and tracker != "none" else None
        self._events: Events | None = None
        self._bar: Bar | None = None
        self._refused: set[str] = set()  # by the disk

    def open(self, step: int, total: int | None = None, *, going_on: bool = True) -> None:
        """Begin at `step` of `total` (None: as before): later rows, of a run that died after its
        checkpoint, go; if `going_on` partial ones too.
        """
        self._total = total or self._total
        if not self._active:
            return
        cut_back(self._path, step, partial=going_on)
        if self._tensorboard:
            self._events = Events(self._folder / "tensorboard", purge_step=step + 1)
            config = self._folder / "config.yaml"
            if config.is_file():  # shown as code in Markdown
                self._events.add(
                    "text",
                    "config",
                    textwrap.indent(config.read_text(encoding="utf-8"), "    "),
                    step,
                )
        self._bar = Bar(
            total=self._total, initial=step, unit="step", dynamic_ncols=True, mininterval=1.0
        )

    def pausing(self, what: str) -> AbstractContextManager[None]:
        """Return a context for work that is no step: `Bar.pausing`."""
        return nullcontext() if self._bar is None else self._bar.pausing(what)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def metrics(self, step: int, metrics: Metrics, *, partial: bool = False) -> None:
        """Append a row; NaN and infinity are written as null, which JSON can say. `partial`: of a
        run that stops between two log ticks; it is in metrics.jsonl alone, until the run goes on.
        """
        if not self._active:
            return
        row: dict[str, Any] = {"step": step} | ({"partial": True} if partial else {})
        for key, value in metrics.items():
            row[key] = (
                value
                if isinstance(value, int)
                else (float(f"{value:.6g}") if np.isfinite(value) else None)
            )
        if self._events is not None and not partial:
            self._events.scalars(step, metrics)
        self._append(json.dumps(row) + "\n")
        self._track()
        losses = {
            f"{key[5:]} loss": f"{value:.3g}"
            for key, value in metrics.items()
            if key.startswith("loss/")
        }
        if self._bar is not None and losses:
            self._bar.set_postfix(losses, refresh=False)
            rate = (
                {"images/s": f"{metrics['images_per_second']:.4g}"}
                if "images_per_second" in metrics
                else {}
            )
            self._bar.more = "".join(f", {name} {value}" for name, value in (losses | rate).items())

    def _track(self, *, close: bool = False) -> None:
        """Send the tracker what it lacks. Whatever it raises costs its rows, and not the training."""
        if self._tracker is None:
            return
        try:
            self._tracker.send()
            if close:
                self._tracker.close()
        except Exception as error:
            say(
                f"warning: {self._tracker.name}: {error}; training continues without it; `python -m "
                f"utils.runlog.trackers {self._folder} --to {self._tracker.name}` sends the rows later"
            )
            self._tracker = None

    def _append(self, line: str) -> None:
        """A full disk costs rows, and not the training. Half a row is taken away, or the next would
        be glued to it.
        """
        left = line.encode()
        try:
            # a buffer would write its rest when it is closed
            with open(self._path, "ab", buffering=0) as file:
                before = file.tell()
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(before)
                    raise
        except OSError as error:
            self.refused(self._path, error, "its rows")

    def refused(self, path: Path, error: Exception, without: str) -> None:
        """`say_refused`, once for each thing that training continues `without`."""
        if without not in self._refused:
            self._refused.add(without)
            say_refused(path, error, without)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """A uint8 [H, W] or [H, W, 3] image for TensorBoard."""
        if self._events is not None:
            self._events.image(step, name, pixels)

    def graph(self, networks: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
        """One graph of all networks for TensorBoard's graph tab: name -> network and example
        inputs.
        """
        if self._events is None or self._events.refused:
            return
        together = _SideBySide({name: network for name, (network, _) in networks.items()})
        inputs = tuple(values for _, values in networks.values())
        modes = {module: module.training for module in together.modules()}
        # TensorBoard traces with torch.jit, which warns that it is deprecated and that shapes
        # become constants; without gradients nothing is computed again, which cannot be traced
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            # fills caches of constants first: a tensor made while tracing must not be kept
            together(*inputs)
            self._events.add("graph", together, inputs, use_strict_trace=False)
        # the tracer leaves all of them in the mode of the outermost
        for module, training in modes.items():
            module.training = training

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._tensorboard = not self._events.refused
            self._events = None
        self._track(close=True)
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def cut_back(path: Path, step: int, *, partial: bool = True) -> None:
    """Drop the rows of `metrics.jsonl` after `step`, `partial` ones, and a last line that a crash
    left half written.
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
        os.truncate(path, len(content))  # which a full disk does not refuse
    else:
        replace_file(path, content)
