"""The training loop: steps, evaluation, checkpoints, logging and signals.

It is independent of models; `training.base.task` is the interface to them.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from duetgan.data.errors import DamageError
from duetgan.data.reading.loader import Batch, InfiniteLoader
from duetgan.training.base.config import RunConfig
from duetgan.training.base.monitors import (
    EarlyStopping,
    Failing,
    Fields,
    MetricWindow,
    Pace,
    SpikeDetector,
    State,
)
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Stateful, Task
from duetgan.training.engine import health, recovery
from duetgan.training.engine import profile as profiling
from duetgan.training.engine.checkpoints import CheckpointManager, Evaluation
from duetgan.training.optim.updater import Updater
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import Heartbeat
from duetgan.utils.distributed.launch import handling, obeyed_signals
from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from duetgan.utils.images import save_png
from duetgan.utils.machine import peak_bytes
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Metrics, RunLog, say, say_main


class Loop(Fields):
    """The training loop, which trains `task` on `loader` and maintains the run folder.

    Its own state is the step, the best evaluation and counters.
    """

    STATE = ("step", "images", "best", "updates", "roll_backs")

    def __init__(
        self, config: RunConfig, task: Task, loader: InfiniteLoader, folder: RunFolder
    ) -> None:
        self.config = config
        self.task = task
        self.loader = loader
        self.folder = folder
        self.step = 0  # number of updates made
        # training images of these updates, counted because a resume may change the batch size
        self.images = 0
        self.best: dict[str, float | int] = {}
        # The checkpoint of another run from which this run started (training.engine.transfer).
        self.origin: Mapping[str, object] | None = None
        # Totals of the updates of all networks.
        self.updates = {"skipped_updates": 0.0, "nonfinite_updates": 0.0}
        self.failing = Failing()
        self.spikes = SpikeDetector(config.spikes)
        watched = None
        if config.spikes.action != "off":
            watched = config.spikes.metric or task.loss_metric
        self.window = MetricWindow(watched)
        self.pace = Pace(config.threads, loader.device)
        self.roll_backs = 0
        # Damaged records that any process has replaced (data.on_damage: skip).
        self.damaged: set[int] = set()
        self.heartbeat: Heartbeat | None = None
        self.stopping = EarlyStopping(
            config.early_stopping, task.best_metric, lower_is_better=task.best_is_lower
        )
        self.log = RunLog(
            folder.path,
            active=collectives.is_main(),
            tensorboard=config.log.tensorboard,
            total_steps=config.steps,
            tracker=config.log.tracker,
        )
        self.manager = CheckpointManager(config, folder, loader)
        self.layers = health.LayerLog(config.log, task.registry(), folder.path)
        self._first_step_here = True  # True until this process has made a step
        self._signal = 0  # first signal that this process has received
        self._tick_started = 0.0
        self._tick_step = 0
        self._pauses = 0.0  # seconds since the last log tick that were not spent on training

    def registry(self) -> dict[str, Stateful]:
        """Return every object whose state a checkpoint holds, by name."""
        return {**self.task.registry(), "loader": self.loader, "window": self.window, "loop": self}

    def _fold(self) -> None:
        """Add up the metrics of the steps since the last call, waiting for the device."""
        self.window.fold()
        self.failing.see(self.step, self.window.failed)

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "stopping": self.stopping.state_dict(),
            "spikes": self.spikes.state_dict(),
            "damaged": sorted(self.damaged),
            "threads": dict(self.pace.by_step),
            "failing": list(self.failing.span),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.stopping.load_state_dict(state["stopping"])
        self.spikes.load_state_dict(state["spikes"])
        self.damaged |= set(state["damaged"])
        # Checkpoints of earlier versions lack "threads" and "failing".
        self.pace.resume(self.step, state.get("threads", {}))
        self.failing.span = list(state.get("failing", []))

    # --- saving and resuming

    def save(self, evaluation: Evaluation | None = None, *, best: bool = False) -> None:
        """Save a checkpoint of the current step.

        Args:
            evaluation: The metric, its value and its interval, if the step was evaluated.
            best: True if this is the best evaluation so far.
        """
        self._fold()
        self._collect_damage()
        metadata = {
            "shape": dict(self.task.shape),
            "origin": self.origin,
            **self.task.provenance(),
        }
        self.manager.save(
            self.step,
            self.registry(),
            metadata,
            evaluation,
            best,
            self.failing.healthy(self.step),
        )
        self.folder_status("running")
        self._check_saving()

    def _collect_damage(self) -> None:
        if self.config.data.on_damage == "skip":
            self.damaged = self.damaged.union(
                *collectives.gather_objects(self.loader.damaged_records)
            )

    def _check_saving(self, *, at_the_end: bool = False) -> None:
        """Halt all ranks if a checkpoint that the run must have could not be written."""
        if reason := self.manager.failure(last=self.step if at_the_end else None):
            self.halt(reason)

    def resume(self) -> bool:
        """Load the newest readable checkpoint; return False if there is none.

        Raises UserError if it does not fit the config or the data.
        """
        content = self.manager.restore(self.registry())
        if content is None:
            return False
        self.origin = content.get("origin")
        return True

    # --- the run

    @property
    def finished(self) -> bool:
        """True if all steps are done or early stopping has ended the training."""
        return self.step >= self.config.steps or self.stopping.reached

    def run(self, max_steps: int | None = None, *, profile: int | None = None) -> None:
        """Train up to step `max_steps` (default: the config's steps).

        Evaluates, saves and logs at the intervals of the config.

        Args:
            profile: Number of steps to profile first, after a few warm-up steps; the result is
                written to RUN/profile/.

        Raises StoppedBySignal after a signal, once the state is saved, and TrainingHalted if
        training cannot continue.
        """
        target = min(self.config.steps, max_steps or self.config.steps)
        self.log.open(self.step, target, going_on=self.step < target and not self.stopping.reached)
        with handling(self._receive, obeyed_signals()):
            try:
                if self.step == 0:
                    self._prepare()
                self._tick_started = time.perf_counter()
                self._tick_step = self.step
                if profile is not None:
                    target = self.step + profiling.WARM_UP + profile
                    self._run_until(target - profile)
                    self.off_the_clock(lambda: profiling.profile_steps(self, profile), "profiling")
                self._run_until(target)
                self.off_the_clock(self.save)
                self.off_the_clock(self.manager.wait)
                if self._tick_step < self.step:  # `max_steps` lies between two log ticks
                    self.log.metrics(self.step, self._row(time.perf_counter()), partial=True)
                self._check_saving(at_the_end=True)
            finally:
                # Wait for checkpoints that are being written, also if the run failed.
                self.manager.wait()
                self.log.close()
                self.layers.close()
                self.loader.close()

    def _prepare(self) -> None:
        with self.log.pausing("before the first step"):
            self.task.begin(self.folder.path)
            self._samples()
            if self.config.log.tensorboard and collectives.is_main():
                self.log.graph(self.task.networks())

    def batches(self) -> Iterator[Batch]:
        """Yield the training batches, of images or of the data from `task.source`."""
        while True:
            with phase("data"):
                started = time.perf_counter()
                with self.log.pausing("computing the features of frozen layers"):
                    self.loader.read_from(self.task.source(self.step, self.folder.path))
                self._pauses += time.perf_counter() - started
                batch = next(self.loader)
            yield batch

    def _run_until(self, target: int) -> None:
        log = self.config.log
        evaluate_every = self.config.evaluation.every
        save_every = self.config.checkpoint.every
        batches = self.batches()
        while self.step < target and not self.stopping.reached:
            self._take_step(batches)
            self.log.advance()
            # Not at `max_steps`, because a run that stops there and is resumed must write the same
            # rows as an uninterrupted one.
            is_last = self.step == self.config.steps
            if is_last or self.step % log.every == 0:
                tick_step = self.step
                self._log_tick()
                if self.step < tick_step:  # true after a roll-back
                    continue
            if log.samples_every and (is_last or self.step % log.samples_every == 0):
                self.off_the_clock(self._samples, "drawing samples")
            if is_last or (evaluate_every and self.step % evaluate_every == 0):
                self.off_the_clock(self._evaluate, "evaluating")
            elif self.step % save_every == 0:
                self.off_the_clock(self.save)
            self._obey_signal()

    def _take_step(self, batches: Iterator[Batch]) -> None:
        if self.heartbeat is not None:
            self.heartbeat.step = self.step
        self.pace.begin(self.step)
        try:
            with self.layers.watching(self.step + 1):
                metrics = self.task.step(batches, self.step)
            self._check_watched(metrics)
            self.window.add(metrics)
            if self._first_step_here:
                self._first_step_here = False
                self._after_first_step()
            self.images += self.task.images_at(self.step + 1) - self.task.images_at(self.step)
            self.step += 1
            interval = self.config.distributed.check_every
            if interval and self.step % interval == 0 and collectives.world_size() > 1:
                health.check_equal(self.task.registry(), self.step, self.loader.device)
        except TrainingHalted as error:
            self.halt(str(error))
        except (RuntimeError, MemoryError, ValueError) as error:
            resolution = self.task.shape["resolution"]
            reason = health.explain(error, self.config, self.step, resolution)
            if reason is None:
                raise
            self.halt(reason, rank_specific=True)

    def _check_watched(self, metrics: Mapping[str, object]) -> None:
        watched = self.window.watched
        if watched is None or watched in metrics:
            return
        names = [name for name in metrics if name.startswith(("loss/", "gradient_norm/"))]
        raise UserError(
            f"spikes.metric {watched}: not a metric of every step; "
            f"choose one of {', '.join(sorted(names))}"
        )

    def _after_first_step(self) -> None:
        """Set the shorter timeout after compilation, and warn of parameters without gradients."""
        collectives.set_timeout(self.config.distributed.timeout)
        if unused := health.unused_parameters(self.task.registry()):
            say_main(f"warning: {unused}")

    def off_the_clock(
        self, action: Callable[[], object], activity: str = "saving a checkpoint"
    ) -> None:
        """Run `action` on all ranks, without counting its time in images per second.

        The ranks wait for one another, however long it takes. The progress bar shows `activity`.
        """
        started = time.perf_counter()
        with self.log.pausing(activity):
            action()
            collectives.barrier()
        self._pauses += time.perf_counter() - started

    def _row(self, now: float) -> Metrics:
        """Return the metrics of the steps since the last log tick; all ranks must call this."""
        means = self.window.means()
        images = self.task.images_at(self.step) - self.task.images_at(self._tick_step)
        seconds = max(1e-9, now - self._tick_started - self._pauses)
        row: Metrics = {
            "images": self.images,
            "images_per_second": images / seconds,
            "data_wait": min(1.0, self.loader.wait_seconds / seconds),
            # peak of the process with the highest one
            "memory_mib": collectives.all_reduce_max(peak_bytes(self.loader.device) >> 20),
        }
        for name, mean in means.items():
            if name.partition("/")[0] not in self.updates:
                row[name] = mean
        for name, part in self.task.registry().items():
            if isinstance(part, Updater):
                row[f"lr/{name}"] = max(group["lr"] for group in part.optimizer.param_groups)
        for name, count in self.updates.items():
            row[name] = round(count + self.window.total(name))
        if self.config.spikes.action == "roll-back":
            row["roll_backs"] = self.roll_backs
        if self.config.data.on_damage == "skip":
            self._collect_damage()
            row["damaged_records"] = len(self.damaged)
        return row

    def _log_tick(self) -> None:
        self._fold()
        now = time.perf_counter()
        row = self._row(now)
        watched_values = self.window.values
        for name in self.updates:
            self.updates[name] += self.window.total(name)
        self.window.take()
        self._write_row(row)
        self._warn_if_slow(float(row["images_per_second"]), float(row["data_wait"]))
        self.loader.wait_seconds = 0.0
        self._tick_started = now
        self._pauses = 0.0
        self._tick_step = self.step
        self._check_saving()
        count, cap = self.updates["nonfinite_updates"], self.config.nonfinite_cap
        if count > cap:
            reason = (
                f"{round(count)} updates had non-finite gradients, more than nonfinite_cap {cap}"
            )
            recovery.halt_broken(self, reason)
        recovery.check_spikes(self, watched_values)

    def _warn_if_slow(self, images_per_second: float, data_wait: float) -> None:
        spans = self.config.spans(self.task.shape["resolution"])
        span = [first for first, *_ in spans if first < self.step][-1]
        if problem := self.pace.tick(span, images_per_second, data_wait):
            say_main(f"warning: step {self.step}: {problem}")

    def _write_row(self, row: Metrics) -> None:
        self.log.metrics(self.step, row)
        for line in self.task.warnings(self.step, row):
            say_main(f"warning: step {self.step}: {line}")

    def rolled_back(self, count: int) -> None:
        """Continue the log from the current step, after roll-back number `count`."""
        self.roll_backs = count
        self._tick_step = self.step
        self.log.close()
        self.log.open(self.step)

    def halt(self, reason: str, *, rank_specific: bool = False) -> NoReturn:
        """Stop training with exit code 4, and write the reason to status.json.

        `rank_specific` is True if the other ranks do not know the reason.
        """
        self.folder_status("failed", reason, TrainingHalted.exit_code)
        raise TrainingHalted(reason, rank_specific=rank_specific)

    def _samples(self) -> None:
        if not collectives.is_main() or not self.config.log.samples_every:
            return
        if (image := self.task.sample_grid(self.step)) is not None:
            path = self.folder.samples / f"step-{self.step:08d}.png"
            try:
                save_png(image, path)
            except UserError as error:  # raised if the disk is full
                self.log.refused(path, error, "sample grids")
            self.log.image(self.step, "samples", image)

    def _evaluate(self) -> None:
        try:
            metrics = self.task.evaluate()
        except DamageError:
            self.save()  # The training state is good, since only validation images are damaged.
            raise
        except UserError as error:
            # The data was checked before the first step, so the networks must be broken.
            recovery.halt_broken(self, f"the evaluation at step {self.step} failed: {error}")
        if metrics:
            self._write_row({f"val/{name}": value for name, value in metrics.items()})
            texts = [f"{name} {value:.4g}" for name, value in metrics.items()]
            say_main(f"step {self.step}: {', '.join(texts)}")
        value = metrics.get(self.task.best_metric)
        if value is None:
            self.save()
        else:
            self._save_evaluated(value)

    def _save_evaluated(self, value: float) -> None:
        metric = self.task.best_metric
        previous = self.best.get(metric)
        if previous is None:
            is_best = True
        elif self.task.best_is_lower:
            is_best = value < previous
        else:
            is_best = value > previous
        if is_best:
            self.best = {metric: value, "step": self.step}
        self.stopping.see(value)
        if self.stopping.reached and self.step < self.config.steps:
            say_main(f"step {self.step}: {self.stopping.reason}")
        interval = list(self.task.best_interval or ())
        self.save({"metric": metric, "value": value, "interval": interval}, best=is_best)

    # --- signals that stop a run: SIGTERM, SIGINT, SIGHUP, and SIGUSR1, which SLURM sends before it
    # ends a job

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        """Remember the first signal until the end of the step; exit immediately at a second one."""
        is_first = not self._signal
        # SLURM may deliver SIGUSR1 twice: to all processes, and through their launcher.
        exits = not is_first and signum != signal.SIGUSR1
        message = "saving after this step, and what is under way; a second signal leaves at once"
        if exits:
            message = (
                f"left without saving; the last checkpoint is of step {self.manager.saved_step}"
            )
        if (exits or is_first) and collectives.is_main():
            with suppress(OSError):  # The terminal may be closed, or the disk full.
                os.write(2, f"{signal.Signals(signum).name}: {message}\n".encode())
        if exits:
            os._exit(128 + signum)
        self._signal = self._signal or signum

    def agreed_signal(self) -> int:
        """Return a signal that any rank has received, the same on all ranks; 0 without one."""
        return collectives.all_reduce_max(self._signal)

    def _obey_signal(self) -> None:
        signum = self.agreed_signal()
        if not signum:
            return
        self.save()
        self.off_the_clock(self.manager.wait)  # The other ranks wait at its barrier.
        name = signal.Signals(signum).name
        saved = collectives.broadcast_object(self.manager.saved_step)
        self.folder_status("stopped", name, StoppedBySignal.exit_code)
        message = f"{name} at step {self.step}; saved at step {saved}. The same command resumes from there."
        raise StoppedBySignal(message)

    def folder_status(self, state: str, reason: str = "", exit_code: int | None = None) -> None:
        if collectives.is_main():
            try:
                self.folder.write_status(
                    state, self.step, reason, exit_code, threads=self.pace.by_step
                )
            except OSError as error:
                say(
                    f"warning: {self.folder.path / 'status.json'}: cannot be written ({error.strerror})"
                )
