"""The training loop: steps, cadence, signals, checkpoints and logging. It knows no model.

A task owns its networks, optimizers, losses and evaluation; see `Task`.
"""

import os
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torchvision
from torch import Tensor

from data.loader import Batch, InfiniteLoader
from data.staged import StagedLoader
from data.store import DamageError
from training import profile_measure, profile_text
from training.config import RunConfig
from training.layer_log import LayerLog
from training.profile import phase
from training.stopping import EarlyStopping
from utils import checkpoint as checkpoints
from utils import distributed
from utils.config import to_tree
from utils.errors import StoppedBySignal, TrainingHalted, UserError
from utils.files import replace_file
from utils.images import save_png
from utils.logging import Metrics, RunLog, say
from utils.run_folder import RunFolder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Task(Protocol):
    """What the loop asks of a task."""

    shape: dict[str, int]  # channels, classes, resolution: what a checkpoint's models are built from
    best_metric: str  # key of `evaluate()` that chooses the best checkpoint
    best_is_lower: bool

    def registry(self) -> dict[str, Any]:
        """Name -> object with state_dict and load_state_dict."""

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """One update from the next batch, or batches; 0-d values on the device that add up over the ranks."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, the same on all ranks."""

    def sample_grid(self, step: int) -> np.ndarray | None:
        """A uint8 picture to save, if there is something to show."""

    def networks(self) -> dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]:
        """Name -> network and example inputs."""

    def images_at(self, step: int) -> int:
        """Training pictures seen before update number `step`; a step counts its batch once, whatever it does with
        it.
        """

    def describe(self) -> list[str]:
        """What the plan says of a training that changes on its way, a row each."""

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint tells about this training besides its state: plain data."""

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """What a row of metrics says is going wrong, in words, each with what to try; the same on all ranks."""


class MetricWindow:
    """Means of the steps' metrics since the last log tick; they stay on the device until `fold` collects them at
    once.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[Tensor]] = {}
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self._pending.setdefault(name, []).append(value)

    def fold(self) -> None:
        """Add the pending values up over steps and ranks: one transfer and one collective."""
        if not self._pending:
            return
        names = sorted(self._pending)
        totals = distributed.all_reduce_sum_(
            torch.stack([torch.stack(self._pending[name]).double().sum() for name in names])
        )
        for name, total in zip(names, totals.tolist(), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + len(self._pending[name])
        self._pending.clear()

    def total(self, prefix: str) -> float:
        """Sum of the folded metrics `prefix/...` so far."""
        return sum(total for name, total in self._sums.items() if name.startswith(f"{prefix}/"))

    def take(self) -> dict[str, float]:
        """The means, and start anew."""
        self.fold()
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending, self._sums, self._counts = {}, dict(state["sums"]), dict(state["counts"])


class Loop:
    """Trains `task` on `loader` and keeps the run folder; its own state is the step, the best figure and the log
    window.
    """

    def __init__(self, config: RunConfig, task: Task, loader: InfiniteLoader | StagedLoader, folder: RunFolder) -> None:
        self.config, self.task, self.loader, self.folder = config, task, loader, folder
        self.step = 0  # updates done
        self.best: dict[str, float | int] = {}
        self.origin: dict[str, Any] | None = None  # the checkpoint that the run started from (training.transfer)
        self.updates = {"skipped_updates": 0.0, "nonfinite_updates": 0.0}  # in all; a network's update each
        self.window = MetricWindow()
        self.stopping = EarlyStopping(config.early_stopping, task.best_metric, lower_is_better=task.best_is_lower)
        self.log = RunLog(
            folder.path, active=distributed.is_main(), tensorboard=config.log.tensorboard, total_steps=config.steps
        )
        self.layers = LayerLog(config.log, task.registry(), folder.path)
        self._signal: int | None = None
        self._saved_step = -1
        self._tick_started, self._tick_step = 0.0, 0
        self._pauses = 0.0  # seconds since the last log tick that were not training

    def registry(self) -> dict[str, Any]:
        """Everything that changes during training."""
        return {**self.task.registry(), "loader": self.loader, "window": self.window, "loop": self}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "best": dict(self.best),
            "updates": dict(self.updates),
            "stopping": self.stopping.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best, self.updates = state["step"], dict(state["best"]), dict(state["updates"])
        if "stopping" in state:  # older runs have none
            self.stopping.load_state_dict(state["stopping"])

    # --- saving and resuming

    def save(self) -> Path | None:
        """Write a checkpoint of this step and point `last.json` at it; a full disk is a warning, the old one stays."""
        if self._saved_step == self.step:
            return None
        self.window.fold()
        if not distributed.is_main():
            return None
        meta = self.loader.reader.meta
        content = {
            "schema": checkpoints.SCHEMA,
            "task": self.config.task,
            "step": self.step,
            "config": to_tree(self.config),
            "classes": list(meta.classes),
            "shape": dict(self.task.shape),
            "data": {"content_hash": meta.content_hash, "count": meta.count, "resize_filter": meta.resize_filter},
            "origin": self.origin,
            "versions": versions(),
            **self.task.provenance(),
            "state": {name: part.state_dict() for name, part in self.registry().items()},
        }
        try:
            path = checkpoints.save(self.folder.checkpoints, content)
            checkpoints.point(self.folder.checkpoints, "last", path)
            checkpoints.rotate(self.folder.checkpoints, self.config.checkpoint.keep)
            self._saved_step = self.step
            return path
        except OSError as error:
            say(
                f"warning: checkpoint of step {self.step} was not written ({error.strerror}); the one before is "
                "kept, training goes on"
            )
            return None

    def resume(self) -> bool:
        """Take the newest checkpoint of the run folder that can be read; False when there is none.

        Raises UserError when it does not fit the data or the task.
        """
        path = distributed.on_main(self._find_latest)
        if path is None:
            return False
        content = checkpoints.load(Path(path), verify=False)
        data = content.get("data", {})
        meta = self.loader.reader.meta
        if data.get("content_hash") != meta.content_hash:
            raise UserError(
                f"{self.folder.path}: was trained on other pictures ({data.get('count')} then, {meta.count} in "
                f"{self.config.data.path} now); choose another --run-dir or give its own data"
            )
        for name, part in self.registry().items():
            if name not in content["state"]:
                if getattr(part, "optional", False):
                    continue
                raise UserError(
                    f"{path}: lacks the state of {name!r}, so another version wrote it; start in another --run-dir"
                )
            part.load_state_dict(content["state"][name])
        self.origin = content.get("origin")
        self._saved_step = self.step
        return True

    def _find_latest(self) -> str | None:
        found = checkpoints.load_latest(self.folder.checkpoints, warn=say)
        return None if found is None else str(found[0])

    # --- the run

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all steps are done, or early stopping has ended it."""
        return self.step >= self.config.steps or self.stopping.reached

    def run(self, max_steps: int | None = None, *, profile: int | None = None) -> None:
        """Train up to step `max_steps` (default: the config's), evaluating, saving and logging on the way.

        `profile`: a few steps to warm up and this many more, which are measured first: RUN/profile/. Raises
        StoppedBySignal after a signal has been obeyed, TrainingHalted at the non-finite cap.
        """
        target = min(self.config.steps, max_steps or self.config.steps)
        self.log.open(self.step)
        handlers = {signum: signal.signal(signum, self._on_signal) for signum in STOP_SIGNALS}
        try:
            self._show_start()
            self._tick_started, self._tick_step = time.perf_counter(), self.step
            if profile is not None:
                target = self.step + profile_measure.WARM_UP + profile
                self._run_until(target - profile)
                self._pause(lambda: self._profile(profile))
            self._run_until(target)
            self._pause(self.save)
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            self.log.close()
            self.layers.close()
            self.loader.close()

    def _show_start(self) -> None:
        if self.step == 0:
            self._samples()
            if self.config.log.tensorboard and distributed.is_main():
                for name, (network, inputs) in self.task.networks().items():
                    self.log.graph(name, network, inputs)

    def _batches(self) -> Iterator[Batch]:
        while True:
            with phase("data"):
                batch = next(self.loader)
            yield batch

    def _run_until(self, target: int) -> None:
        config, batches = self.config, self._batches()
        while self.step < target and not self.stopping.reached:
            try:
                with self.layers.watching(self.step + 1):
                    self.window.add(self.task.step(batches, self.step))
            except TrainingHalted as error:
                self._halt(str(error))
            self.step += 1
            self.log.advance()
            # not at `max_steps`: a run that is stopped there and goes on writes the rows of one that was not
            if self.step % config.log.every == 0 or self.step == config.steps:
                self._log_tick()
            if config.log.samples_every and (self.step % config.log.samples_every == 0 or self.step == config.steps):
                self._pause(self._samples)
            if (config.evaluation.every and self.step % config.evaluation.every == 0) or self.step == config.steps:
                self._pause(self._evaluate)
            elif self.step % config.checkpoint.every == 0:
                self._pause(self.save)
            self._obey_signal()

    def _profile(self, count: int) -> None:
        """Measure the next `count` steps and go back to where they begin (rank 0 writes); nothing after a signal."""
        self.window.fold()
        waited, batches, registry = self.loader.wait_seconds, self._batches(), self.registry()

        def step() -> bool:
            self.window.add(self.task.step(batches, self.step))
            self.step += 1
            return not distributed.agree(self._signal or 0)

        if distributed.is_main():
            folder = self.folder.path / "profile"
            trace = folder / profile_measure.TRACE
            found = profile_measure.measure(step, count, registry, self.loader.device, trace)
            if found is not None:
                text = profile_text.render(found, self._profile_heading(count), str(trace))
                replace_file(folder / profile_measure.SUMMARY, text.encode())
        else:
            profile_measure.accompany(step, count, registry)
        self.loader.wait_seconds = waited

    def _profile_heading(self, count: int) -> str:
        world = distributed.world_size()
        images = (self.task.images_at(self.step + count) - self.task.images_at(self.step)) / count
        return (
            f"{self.config.task}: steps {self.step} to {self.step + count - 1}, {images:g} pictures a step on {world} "
            f"process{'es' * (world > 1)}, rank 0 measured ({self.loader.device}, {torch.get_num_threads()} threads, "
            f"{self.config.precision})"
        )

    def _pause(self, action: Any) -> None:
        """Do something that is not training; its time does not count in images per second."""
        started = time.perf_counter()
        action()
        self._pauses += time.perf_counter() - started

    def _log_tick(self) -> None:
        self.window.fold()
        for name in self.updates:
            self.updates[name] += self.window.total(name)
        means = self.window.take()
        now = time.perf_counter()
        seconds = max(1e-9, now - self._tick_started - self._pauses)
        images = self.task.images_at(self.step)
        rate = (images - self.task.images_at(self._tick_step)) / seconds
        row: Metrics = {"images": images, "images_per_second": rate}
        row["data_wait"] = min(1.0, self.loader.wait_seconds / seconds)
        row |= {name: mean for name, mean in means.items() if name.partition("/")[0] not in self.updates}
        row |= {name: round(count) for name, count in self.updates.items()}
        if self.config.data.on_damage == "skip":
            damaged = torch.tensor(float(self.loader.damaged_records))
            row["damaged_records"] = round(distributed.all_reduce_sum_(damaged).item())  # replaced, by all processes
        self.log.metrics(self.step, row)
        self._warn(row)
        self.loader.wait_seconds, self._tick_started, self._pauses = 0.0, now, 0.0
        self._tick_step = self.step
        if self.updates["nonfinite_updates"] > self.config.nonfinite_cap:
            self._halt(
                f"{round(self.updates['nonfinite_updates'])} updates had non-finite gradients, more than nonfinite_cap "
                f"{self.config.nonfinite_cap}; lower the learning rate or use --precision fp32, then start again from "
                "the last checkpoint"
            )

    def _warn(self, row: Metrics) -> None:
        for line in self.task.warnings(self.step, row):
            say_main(f"warning: step {self.step}: {line}")

    def _halt(self, reason: str) -> NoReturn:
        """Training stops itself: the reason goes into status.json and to the user; exit code 4."""
        self.folder_status("failed", reason, TrainingHalted.exit_code)
        raise TrainingHalted(reason)

    def _samples(self) -> None:
        if not distributed.is_main():
            return
        picture = self.task.sample_grid(self.step)
        if picture is not None:
            self.folder.samples.mkdir(exist_ok=True)
            save_png(picture, self.folder.samples / f"step-{self.step:08d}.png")
            self.log.image(self.step, "samples", picture)

    def _evaluate(self) -> None:
        """Evaluate, note the figures, save, and keep this checkpoint as the best if it is."""
        try:
            figures = self.task.evaluate()
        except DamageError:
            self.save()  # the training is sound, only its held-out pictures are not
            raise
        except UserError as error:  # the data was checked before the first step: what is left are broken networks
            self._halt(f"the evaluation at step {self.step} failed: {error}")
        if figures:
            row: Metrics = {f"val/{name}": value for name, value in figures.items()}
            self.log.metrics(self.step, row)
            self._warn(row)
            say_main(f"step {self.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        value = figures.get(self.task.best_metric)
        previous = self.best.get(self.task.best_metric)
        better = False
        if value is not None:
            better = previous is None or (value < previous if self.task.best_is_lower else value > previous)
        if better and value is not None:
            self.best = {self.task.best_metric: value, "step": self.step}
        if value is not None:
            self.stopping.see(value)
            if self.stopping.reached and self.step < self.config.steps:
                say_main(f"step {self.step}: {self.stopping.reason}")
        path = self.save()
        if better and value is not None and path is not None:
            checkpoints.point(self.folder.checkpoints, "best", path, metric=self.task.best_metric, value=value)
            checkpoints.rotate(self.folder.checkpoints, self.config.checkpoint.keep)

    # --- signals

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + signum)  # asked twice: leave at once
        self._signal = signum

    def _obey_signal(self) -> None:
        """If any rank was told to stop, all of them save after this same step and leave."""
        signum = distributed.agree(self._signal or 0)
        if not signum:
            return
        self.save()
        name = signal.Signals(signum).name
        saved = distributed.broadcast_object(self._saved_step)
        self.folder_status("stopped", name, StoppedBySignal.exit_code)
        raise StoppedBySignal(
            f"{name} at step {self.step}; saved at step {saved}. The same command goes on from there."
        )

    def folder_status(self, state: str, reason: str = "", exit_code: int | None = None) -> None:
        """Write status.json (rank 0)."""
        if distributed.is_main():
            self.folder.write_status(state, self.step, reason, exit_code)


def say_main(message: str) -> None:
    """`say` on rank 0 only."""
    if distributed.is_main():
        say(message)


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
    }
