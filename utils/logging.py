"""Where numbers go: the console, `metrics.jsonl`, TensorBoard. Only rank 0 writes; the others hold a silent log."""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

SECONDS_BETWEEN_LINES = 30.0
Metrics = dict[str, float | int]


def say(message: str) -> None:
    """One line for a person, on stderr, that does not tear the progress bar. Stdout is left to results."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


class RunLog:
    """`metrics.jsonl` (one JSON object a log tick), TensorBoard events and the progress bar of one run."""

    def __init__(self, folder: Path, *, active: bool, tensorboard: bool, total_steps: int) -> None:
        self._path = folder / "metrics.jsonl"
        self._folder = folder
        self._active = active
        self._tensorboard = tensorboard and active
        self._total = total_steps
        self._writer: SummaryWriter | None = None
        self._bar: tqdm[Any] | None = None
        self._said = time.monotonic()
        self._refused = False  # by the disk

    def open(self, step: int) -> None:
        """Begin at `step`: rows of later steps, written by a run that died after its last checkpoint, are cut off."""
        if not self._active:
            return
        cut_back(self._path, step)
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step + 1)
        self._bar = tqdm(
            total=self._total, initial=step, unit="step", dynamic_ncols=True, mininterval=1.0, disable=None
        )

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def metrics(self, step: int, metrics: Metrics) -> None:
        """Append a row; NaN and infinity are written as null, which JSON can say."""
        if not self._active:
            return
        row: dict[str, Any] = {"step": step}
        for key, value in metrics.items():
            row[key] = value if isinstance(value, int) else (float(f"{value:.6g}") if np.isfinite(value) else None)
            if self._writer is not None:
                self._writer.add_scalar(key, value, step)
        self._append(json.dumps(row) + "\n")
        self._progress_line(step, metrics)
        losses = {
            key.removeprefix("loss/"): f"{value:.3g}" for key, value in metrics.items() if key.startswith("loss/")
        }
        if self._bar is not None and losses:
            self._bar.set_postfix(losses, refresh=False)

    def _append(self, line: str) -> None:
        """A full disk costs rows, which is said once, and not the training; half a row is cut off at a resume."""
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._refused:
                say(f"warning: {self._path}: rows cannot be written ({error.strerror}); training goes on without them")
            self._refused = True

    def _progress_line(self, step: int, metrics: Metrics) -> None:
        """Where no bar can be drawn (a log file, CI): a line about twice a minute."""
        if self._bar is None or not self._bar.disable or time.monotonic() - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = time.monotonic()
        shown = {k: v for k, v in metrics.items() if k.startswith("loss/") or k == "images_per_second"}
        say(f"step {step} of {self._total}: " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items()))

    def image(self, step: int, name: str, picture: np.ndarray) -> None:
        """A uint8 [H, W] or [H, W, 3] picture for TensorBoard."""
        if self._writer is not None:
            self._writer.add_image(name, picture, step, dataformats="HW" if picture.ndim == 2 else "HWC")

    def graph(self, name: str, model: "nn.Module", inputs: Any) -> None:
        """The model's graph for TensorBoard's graph tab."""
        if self._writer is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        # add_graph keeps one graph a writer, so each model gets a folder of its own
        writer = SummaryWriter(str(self._folder / "tensorboard" / name))
        with warnings.catch_warnings():
            # TensorBoard traces with torch.jit, which warns that it is deprecated and that shapes become constants
            warnings.simplefilter("ignore")
            with torch.no_grad():
                model(*inputs)  # fills caches of constants first: a tensor made while tracing must not be kept
            writer.add_graph(model, inputs, use_strict_trace=False)
        writer.close()

    def close(self) -> None:
        """Flush everything to the disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def cut_back(path: Path, step: int) -> None:
    """Drop the rows of `metrics.jsonl` after `step`, and a last line that a crash left half written."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
