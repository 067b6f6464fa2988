"""The training loop: steps, cadence, signals, checkpoints, logging. It knows no model, see
`training.base.task`.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

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
)
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Task
from duetgan.training.engine import health, recovery
from duetgan.training.engine import profile as profiling
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.training.optim.updater import Updater
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import Heartbeat
from duetgan.utils.distributed.launch import handling, obeyed_signals
from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from duetgan.utils.images import save_png
from duetgan.utils.memory import peak_bytes
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Metrics, RunLog, say, say_main


class Loop(Fields):
    """Trains `task` on `loader` and keeps the run folder; its own state is the step, the best
    figure and counters.
    """

    STATE = ("step", "images", "best", "updates", "roll_backs")

    def __init__(
        self, config: RunConfig, task: Task, loader: InfiniteLoader, folder: RunFolder
    ) -> None:
        self.config, self.task, self.loader, self.folder = config, task, loader, folder
        self.step = 0  # updates done
        self.images = 0  # that they have seen: counted, as a resume may have another batch size
        self.best: dict[str, float | int] = {}
        # the checkpoint that the run started from (training.engine.transfer)
        self.origin: dict[str, Any] | None = None
        # in all; a network's update each
        self.updates = {"skipped_updates": 0.0, "nonfinite_updates": 0.0}
        self.failing = Failing()
        self.spikes = SpikeDetector(config.spikes)
        watched = (
            None if config.spikes.action == "off" else config.spikes.metric or task.loss_metric
        )
        self.window = MetricWindow(watched)
        self.pace = Pace(config.threads, loader.device)
        self.roll_backs = 0
        # records that any process has replaced (data.on_damage: skip)
        self.damaged: set[int] = set()
        self.heartbeat: Heartbeat | None = None  # told where the run stands, if there is one
        self.stopping = EarlyStopping(
            config.early_stopping, task.best_metric, lower_is_better=task.best_is_lower
        )
        log, main = config.log, collectives.is_main()
        self.log = RunLog(
            folder.path,
            active=main,
            tensorboard=log.tensorboard,
            total_steps=config.steps,
            tracker=log.tracker,
        )
        self.manager = CheckpointManager(config, folder, loader)
        self.layers = health.LayerLog(config.log, task.registry(), folder.path)
        self._fresh = True  # no step has been done by this process
        self._signal = 0  # the first that this process has received
        self._tick_started, self._tick_step = 0.0, 0
        self._pauses = 0.0  # seconds since the last log tick that were not training

    def registry(self) -> dict[str, Any]:
        return {**self.task.registry(), "loader": self.loader, "window": self.window, "loop": self}

    def _fold(self) -> None:
        """Add up what the steps since the last time have shown."""
        self.window.fold()
        self.failing.see(self.step, self.window.failed)

    def state_dict(self) -> dict[str, Any]:
        parts = {"stopping": self.stopping.state_dict(), "spikes": self.spikes.state_dict()}
        more = {
            "damaged": sorted(self.damaged),
            "threads": dict(self.pace.by_step),
            "failing": list(self.failing.span),
        }
        return super().state_dict() | parts | more

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stopping.load_state_dict(state["stopping"])
        self.spikes.load_state_dict(state["spikes"])
        self.damaged |= set(state["damaged"])
        # earlier versions kept no record of them
        self.pace.resume(self.step, state.get("threads", {}))
        self.failing.span = list(state.get("failing", []))

    # --- saving and resuming

    def save(self, figure: dict[str, Any] | None = None, *, best: bool = False) -> None:
        """Save this step's state; `figure`: metric, value and interval of an evaluation, `best`:
        the best so far.
        """
        self._fold()
        self._collect_damage()
        about = {"shape": dict(self.task.shape), "origin": self.origin, **self.task.provenance()}
        self.manager.save(
            self.step, self.registry(), about, figure, best, self.failing.healthy(self.step)
        )
        self.folder_status("running")
        self._check_saving()

    def _collect_damage(self) -> None:
        if self.config.data.on_damage == "skip":
            self.damaged = self.damaged.union(
                *collectives.gather_objects(self.loader.damaged_records)
            )

    def _check_saving(self, *, at_the_end: bool = False) -> None:
        """Stop where a checkpoint could not be written and the config says so, or it is the last;
        on all ranks.
        """
        if reason := self.manager.failure(last=self.step if at_the_end else None):
            self.halt(reason)

    def resume(self) -> bool:
        """Take the newest checkpoint that can be read; False without one. Raises UserError when it
        does not fit.
        """
        if (content := self.manager.restore(self.registry())) is not None:
            self.origin = content.get("origin")
        return content is not None

    # --- the run

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all steps are done, or early stopping has ended
        it.
        """
        return self.step >= self.config.steps or self.stopping.reached

    def run(self, max_steps: int | None = None, *, profile: int | None = None) -> None:
        """Train up to step `max_steps` (default: the config's), evaluating, saving and logging on
        the way.

        `profile`: a few steps to warm up and this many more, which are measured first:
        RUN/profile/. Raises StoppedBySignal after a signal has been obeyed, TrainingHalted at the
        non-finite cap.
        """
        target = min(self.config.steps, max_steps or self.config.steps)
        self.log.open(self.step, target, going_on=self.step < target and not self.stopping.reached)
        with handling(self._receive, obeyed_signals()):
            try:
                if self.step == 0:
                    with self.log.pausing("before the first step"):
                        self.task.begin(self.folder.path)
                        self._samples()
                        if self.config.log.tensorboard and collectives.is_main():
                            self.log.graph(self.task.networks())
                self._tick_started, self._tick_step = time.perf_counter(), self.step
                if profile is not None:
                    target = self.step + profiling.WARM_UP + profile
                    self._run_until(target - profile)
                    self.pause(lambda: profiling.profile_steps(self, profile), "profiling")
                self._run_until(target)
                self.pause(self.save)
                self.pause(self.manager.wait)
                if self._tick_step < self.step:  # `max_steps` lies between two log ticks
                    self.log.metrics(self.step, self._row(time.perf_counter()), partial=True)
                self._check_saving(at_the_end=True)
            finally:
                # whatever ended the run: what was saved is on the disk before the process leaves
                self.manager.wait()
                self.log.close()
                self.layers.close()
                self.loader.close()

    def batches(self) -> Iterator[Batch]:
        while True:
            with phase("data"):
                begun = time.perf_counter()
                with self.log.pausing("computing what stays frozen"):
                    self.loader.read_from(self.task.source(self.step, self.folder.path))
                self._pauses += time.perf_counter() - begun
                batch = next(self.loader)
            yield batch

    def _run_until(self, target: int) -> None:
        config, batches = self.config, self.batches()
        while self.step < target and not self.stopping.reached:
            self._take_step(batches)
            self.log.advance()
            # not at `max_steps`: a run that is stopped there and goes on writes the rows of one
            # that was not
            if self.step % config.log.every == 0 or self.step == config.steps:
                here = self.step
                self._log_tick()
                if self.step < here:  # rolled back
                    continue
            if config.log.samples_every and (
                self.step % config.log.samples_every == 0 or self.step == config.steps
            ):
                self.pause(self._samples, "drawing samples")
            if (
                config.evaluation.every and self.step % config.evaluation.every == 0
            ) or self.step == config.steps:
                self.pause(self._evaluate, "evaluating")
            elif self.step % config.checkpoint.every == 0:
                self.pause(self.save)
            self._obey_signal()

    def _take_step(self, batches: Iterator[Batch]) -> None:
        if self.heartbeat is not None:
            self.heartbeat.step = self.step
        self.pace.begin(self.step)
        try:
            with self.layers.watching(self.step + 1):
                metrics = self.task.step(batches, self.step)
            if self.window.watched not in (None, *metrics):
                names = ", ".join(
                    sorted(name for name in metrics if name.startswith(("loss/", "gradient_norm/")))
                )
                raise UserError(
                    f"spikes.metric {self.window.watched}: not a metric of every step; choose one of {names}"
                )
            self.window.add(metrics)
            if self._fresh:  # looks back on how it started
                self._fresh = False
                collectives.set_timeout(self.config.distributed.timeout)
                if unused := health.unused_parameters(self.task.registry()):
                    say_main(f"warning: {unused}")
            self.images += self.task.images_at(self.step + 1) - self.task.images_at(self.step)
            self.step += 1
            every = self.config.distributed.check_every
            if every and self.step % every == 0 and collectives.world_size() > 1:
                health.check_equal(self.task.registry(), self.step, self.loader.device)
        except TrainingHalted as error:
            self.halt(str(error))
        except (RuntimeError, MemoryError, ValueError) as error:
            if (
                reason := health.explain(
                    error, self.config, self.step, self.task.shape["resolution"]
                )
            ) is None:
                raise
            self.halt(reason, rank_specific=True)

    def pause(self, action: Any, what: str = "saving a checkpoint") -> None:
        """Do what is not training, not counted in images per second. The ranks wait for one
        another, however long.
        """
        started = time.perf_counter()
        with self.log.pausing(what):
            action()
            collectives.barrier()
        self._pauses += time.perf_counter() - started

    def _row(self, now: float) -> Metrics:
        """What the steps since the last log tick have shown. Collective."""
        means = self.window.means()
        updaters = {
            name: part for name, part in self.task.registry().items() if isinstance(part, Updater)
        }
        seconds = max(1e-9, now - self._tick_started - self._pauses)
        row: Metrics = {
            "images": self.images,
            "images_per_second": (
                self.task.images_at(self.step) - self.task.images_at(self._tick_step)
            )
            / seconds,
            "data_wait": min(1.0, self.loader.wait_seconds / seconds),
            # of the fullest process
            "memory_mib": collectives.all_reduce_max(peak_bytes(self.loader.device) >> 20),
            **{
                name: mean
                for name, mean in means.items()
                if name.partition("/")[0] not in self.updates
            },
            **{
                f"lr/{n}": max(group["lr"] for group in u.optimizer.param_groups)
                for n, u in updaters.items()
            },
            **{
                name: round(count + self.window.total(name)) for name, count in self.updates.items()
            },
        }
        if self.config.spikes.action == "roll-back":
            row["roll_backs"] = self.roll_backs
        if self.config.data.on_damage == "skip":
            self._collect_damage()
            row["damaged_records"] = len(self.damaged)
        return row

    def _log_tick(self) -> None:
        self._fold()  # and wait for the device
        now = time.perf_counter()
        row, values = self._row(now), self.window.values
        for name in self.updates:
            self.updates[name] += self.window.total(name)
        self.window.take()
        self._write_row(row)
        speed, waited = float(row["images_per_second"]), float(row["data_wait"])
        span = [
            first
            for first, *_ in self.config.spans(self.task.shape["resolution"])
            if first < self.step
        ][-1]
        if slow := self.pace.tick(span, speed, waited):
            say_main(f"warning: step {self.step}: {slow}")
        self.loader.wait_seconds, self._tick_started, self._pauses = 0.0, now, 0.0
        self._tick_step = self.step
        self._check_saving()
        if self.updates["nonfinite_updates"] > self.config.nonfinite_cap:
            recovery.halt_broken(
                self,
                f"{round(self.updates['nonfinite_updates'])} updates had non-finite gradients, more than nonfinite_cap "
                f"{self.config.nonfinite_cap}",
            )
        recovery.check_spikes(self, values)

    def _write_row(self, row: Metrics) -> None:
        self.log.metrics(self.step, row)
        for line in self.task.warnings(self.step, row):
            say_main(f"warning: step {self.step}: {line}")

    def rolled_back(self, count: int) -> None:
        """Log from the present step on, after the roll-back number `count`."""
        self.roll_backs, self._tick_step = count, self.step
        self.log.close()
        self.log.open(self.step)

    def halt(self, reason: str, *, rank_specific: bool = False) -> NoReturn:
        """Stop by itself: exit code 4, the reason in status.json too. `rank_specific`: the others
        do not know it.
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
            except UserError as error:  # a full disk
                self.log.refused(path, error, "sample grids")
            self.log.image(self.step, "samples", image)

    def _evaluate(self) -> None:
        try:
            figures = self.task.evaluate()
        except DamageError:
            self.save()  # the training is sound, only its held-out images are not
            raise
        except (
            UserError
        ) as error:  # the data was checked before the first step: what is left are broken networks
            recovery.halt_broken(self, f"the evaluation at step {self.step} failed: {error}")
        if figures:
            self._write_row({f"val/{name}": value for name, value in figures.items()})
            say_main(
                f"step {self.step}: "
                + ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            )
        metric = self.task.best_metric
        figure, best = None, False
        if (value := figures.get(metric)) is not None:
            before = self.best.get(metric)
            figure = {
                "metric": metric,
                "value": value,
                "interval": list(self.task.best_interval or ()),
            }
            best = before is None or (value < before if self.task.best_is_lower else value > before)
            if best:
                self.best = {metric: value, "step": self.step}
            self.stopping.see(value)
            if self.stopping.reached and self.step < self.config.steps:
                say_main(f"step {self.step}: {self.stopping.reason}")
        self.save(figure, best=best)

    # --- signals that ask a run to stop: SIGTERM, SIGINT, SIGHUP, and SIGUSR1, with which SLURM
    # warns of a job's end

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        """Keep the first signal for the end of the step; at a second one the process ends at once."""
        # SIGUSR1 may come twice: SLURM gives it to all processes and to their launcher
        leaves, first = self._signal and signum != signal.SIGUSR1, not self._signal
        message = "saving after this step, and what is under way; a second signal leaves at once"
        if leaves:
            message = (
                f"left without saving; the last checkpoint is of step {self.manager.saved_step}"
            )
        if (leaves or first) and collectives.is_main():
            with suppress(OSError):  # a terminal that is gone, or a full disk
                os.write(2, f"{signal.Signals(signum).name}: {message}\n".encode())
        if leaves:
            os._exit(128 + signum)
        self._signal = self._signal or signum

    def agreed_signal(self) -> int:
        """The signal that a rank has received, the same on all ranks; 0: none has."""
        return collectives.all_reduce_max(self._signal)

    def _obey_signal(self) -> None:
        signum = self.agreed_signal()
        if not signum:
            return
        self.save()
        self.pause(self.manager.wait)  # the others wait at the barrier, however long it takes
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
