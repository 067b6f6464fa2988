"""The training loop, which takes steps, and logs, saves and evaluates at the config's intervals.

It is independent of models; `training.base.task` is the interface to them. Optional features of a
training are callbacks, which `training.engine.run` lists.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from duetgan.data.reading.loader import Batch, InfiniteLoader
from duetgan.training.base import monitors
from duetgan.training.base.config import RunConfig
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Stateful, Task
from duetgan.training.engine.checkpoints import CheckpointManager, Evaluation
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import DamageError, UserError
from duetgan.utils.runlog import run_folder, run_log


class BrokenWeights(Exception):
    """Raised on all ranks if the weights are broken: they can no longer be trained or evaluated."""


class Callback:
    """Base class of optional features of a training, with methods that the loop calls.

    All ranks call the methods, which do nothing by default. `begin` prepares a new run. An
    iteration is a step, followed by the row of metrics, the evaluation and the checkpoint if they
    are due. `after_row` may go back to an earlier checkpoint. `columns` returns metrics for a row.
    `state_dict` returns entries for the state of the loop.
    """

    def begin(self, loop: "Loop") -> None: ...

    def before_step(self, loop: "Loop") -> None: ...

    def after_step(self, loop: "Loop", metrics: Mapping[str, object]) -> None: ...

    def columns(self, window: monitors.MetricWindow) -> run_log.Metrics:
        return {}

    def after_row(
        self, loop: "Loop", row: run_log.Metrics, window: monitors.MetricWindow
    ) -> None: ...

    def after_iteration(self, loop: "Loop") -> None: ...

    def before_save(self, loop: "Loop") -> None: ...

    def state_dict(self) -> monitors.State:
        return {}

    def load_state_dict(self, state: monitors.State) -> None: ...

    def close(self) -> None: ...


class Loop(monitors.Fields):
    """The training loop, which trains `task` on `loader` and maintains the run folder."""

    STATE = ("step", "images", "best")

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        loader: InfiniteLoader,
        folder: run_folder.RunFolder,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config = config
        self.task = task
        self.loader = loader
        self.folder = folder
        self.callbacks = list(callbacks)
        self.step = 0  # number of updates made
        # training images of these updates, counted because a resume may change the batch size
        self.images = 0
        self.best: dict[str, float | int] = {}
        self.window = monitors.MetricWindow(config.spikes.watched(task.loss_metric))
        self.stopwatch = monitors.Stopwatch()
        self.stopping = monitors.EarlyStopping(
            config.early_stopping, task.best_metric, lower_is_better=task.best_is_lower
        )
        self.log = run_log.RunLog(
            folder.path,
            active=collectives.is_main(),
            tensorboard=config.log.tensorboard,
            total_steps=config.steps,
        )
        self.manager = CheckpointManager(config, folder, loader)

    # --- the state: a checkpoint holds that of everything in the registry

    def registry(self) -> dict[str, Stateful]:
        return {**self.task.registry(), "loader": self.loader, "window": self.window, "loop": self}

    def state_dict(self) -> monitors.State:
        state = super().state_dict() | {"stopping": self.stopping.state_dict()}
        for callback in self.callbacks:
            state |= callback.state_dict()
        return state

    def load_state_dict(self, state: monitors.State) -> None:
        super().load_state_dict(state)
        self.stopping.load_state_dict(state["stopping"])
        for callback in self.callbacks:
            callback.load_state_dict(state)

    def save(self, evaluation: Evaluation | None = None, *, best: bool = False) -> None:
        """Save a checkpoint of the current step.

        `evaluation` is the result of the evaluation at this step, if there was one. `best` is True
        if it is the best result so far.
        """
        self.window.fold()
        for callback in self.callbacks:
            callback.before_save(self)
        metadata = {"shape": dict(self.task.shape), **self.task.provenance()}
        self.manager.save(self.step, self.registry(), metadata, evaluation, best)

    def resume(self) -> bool:
        """Load the newest readable checkpoint; return False if there is none."""
        return self.manager.restore(self.registry()) is not None

    # --- the run

    @property
    def finished(self) -> bool:
        """True if all steps are done or early stopping has ended the training."""
        return self.step >= self.config.steps or self.stopping.reached

    def run(self, max_steps: int | None = None) -> None:
        """Train up to step `max_steps` (default: the config's steps), or until early stopping."""
        target = min(self.config.steps, max_steps or self.config.steps)
        self.log.open(self.step, target, going_on=self.step < target and not self.stopping.reached)
        try:
            if self.step == 0:
                self._begin()
            self.stopwatch.restart(self.step)
            self._train_until(target)
            self.off_the_clock(self.save)
            self.off_the_clock(self.manager.wait)
            if self.stopwatch.step < self.step:  # `max_steps` lies between two rows
                self.log.metrics(self.step, self._row(self.window), partial=True)
            self.manager.check(self.step)
        finally:
            # Wait for checkpoints that are being written, also if the run failed.
            self.manager.wait()
            self.log.close()
            for callback in self.callbacks:
                callback.close()
            self.loader.close()

    def _begin(self) -> None:
        self.task.begin()
        for callback in self.callbacks:
            callback.begin(self)

    def batches(self) -> Iterator[Batch]:
        """Yield the training batches, without end.

        A batch holds images, or features if `task.source` returns cached features for its step.
        """
        while True:
            with phase("data"):
                with self.stopwatch.paused():
                    self.loader.read_from(self.task.source(self.step))
                batch = next(self.loader)
            yield batch

    def is_due(self, interval: int) -> bool:
        """Return True at every `interval`-th step, and at the last step of the config.

        With interval 0 only the last step counts. The argument `max_steps` of `run` has no
        influence, because a run that stops there and is resumed must write the same rows as an
        uninterrupted run.
        """
        is_last = self.step == self.config.steps
        return is_last or (interval > 0 and self.step % interval == 0)

    def _train_until(self, target: int) -> None:
        batches = self.batches()
        while self.step < target and not self.stopping.reached:
            self.take_step(batches)
            step = self.step
            if self.is_due(self.config.log.every):
                self._write_row()
            if self.step < step:  # a callback has gone back to a checkpoint
                continue
            if self.is_due(self.config.evaluation.every):
                self.off_the_clock(self._evaluate)
            elif self.is_due(self.config.checkpoint.every):
                self.off_the_clock(self.save)
            for callback in self.callbacks:
                callback.after_iteration(self)

    def take_step(self, batches: Iterator[Batch]) -> None:
        """Make one update, and count it."""
        for callback in self.callbacks:
            callback.before_step(self)
        metrics = self.task.step(batches, self.step)
        self.window.add(metrics)
        self.images += self.task.images_at(self.step + 1) - self.task.images_at(self.step)
        self.step += 1
        self.log.advance()
        for callback in self.callbacks:
            callback.after_step(self, metrics)

    def off_the_clock(self, action: Callable[[], object]) -> None:
        """Run `action`, and leave its time out of the metric `images_per_second`.

        All ranks must call this. They wait for one another, however long the action takes.
        """
        with self.stopwatch.paused():
            action()
            collectives.barrier()

    # --- rows of metrics, evaluations and status

    def _row(self, window: monitors.MetricWindow) -> run_log.Metrics:
        """Return the metrics of the steps since the last row. All ranks must call this."""
        images = self.task.images_at(self.step) - self.task.images_at(self.stopwatch.step)
        seconds = self.stopwatch.seconds()
        row: run_log.Metrics = {
            "images": self.images,
            "images_per_second": images / seconds,
            "data_wait": min(1.0, self.loader.wait_seconds / seconds),
            **window.means(),
        }
        for callback in self.callbacks:
            row |= callback.columns(window)
        return row

    def _write_row(self) -> None:
        window = self.window.take()
        row = self._row(window)
        self._log(row)
        self.loader.wait_seconds = 0.0
        self.stopwatch.restart(self.step)
        for callback in self.callbacks:
            callback.after_row(self, row, window)

    def _log(self, row: run_log.Metrics) -> None:
        self.log.metrics(self.step, row)
        for line in self.task.warnings(self.step, row):
            run_log.say_main(f"warning: step {self.step}: {line}")

    def _evaluate(self) -> None:
        try:
            metrics = self.task.evaluate()
        except DamageError:
            self.save()  # The training state is good, since only validation images are damaged.
            raise
        except UserError as error:
            # The data was checked before the first step, so the networks must be broken.
            reason = f"the evaluation at step {self.step} failed: {error}"
            raise BrokenWeights(reason) from error
        if metrics:
            self._log({f"val/{name}": value for name, value in metrics.items()})
            texts = [f"{name} {value:.4g}" for name, value in metrics.items()]
            run_log.say_main(f"step {self.step}: {', '.join(texts)}")
        metric = self.task.best_metric
        if metric not in metrics:
            self.save()
            return
        value = metrics[metric]
        sign = -1 if self.task.best_is_lower else 1
        is_best = sign * value > sign * self.best.get(metric, -sign * math.inf)
        if is_best:
            self.best = {metric: value, "step": self.step}
        self.stopping.see(value)
        if self.stopping.reached and self.step < self.config.steps:
            run_log.say_main(f"step {self.step}: {self.stopping.reason}")
        interval = list(self.task.best_interval or ())
        self.save({"metric": metric, "value": value, "interval": interval}, best=is_best)
