"""Content of checkpoints, their writing, and the restoring of the newest one.

- Content: `CheckpointManager.save` lists the entries. The entry `state` has the state dict of each
  object of `Loop.registry` (loop.py), by name: those of `Task.registry` (gan/task.py,
  classifier/task.py), such as networks, averages, optimizers and the loss scaler; and the loader's
  position, the window of metrics, and the loop with its callbacks. Random number generators have no
  state, because each draw has its own seed (docs/randomness.md).
- Restoring: `Loop.resume` calls `CheckpointManager.restore` on all ranks, which checks the newest
  readable file and calls `load_state_dict` of each object; the manager itself restores the lineage,
  the history of the data and the best evaluation. Other programs build a network alone
  from a checkpoint, by models/restore.py.

utils/checkpoint writes and reads the files.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

from torch import Tensor, nn

from duetgan.data.reading.loader import InfiniteLoader
from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Stateful
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.provenance import Lineage, TrainedOn, data_history, join, recorded
from duetgan.utils.checkpoint.state_schema import FAULTS, check_tensors
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.config.build import to_tree
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import say, say_main
from duetgan.utils.runlog.versions import versions

Registry = Mapping[str, Stateful]
Evaluation = Mapping[str, object]  # metric, value and interval of an evaluation


class CheckpointManager:
    """The checkpoints of one run: rank 0 writes them, every rank reads them."""

    def __init__(self, config: RunConfig, folder: RunFolder, loader: InfiniteLoader) -> None:
        self.config = config
        self.folder = folder
        self.loader = loader
        self.lineage = Lineage.of()  # all data that the weights were trained on
        # The other run's checkpoint with which this run started (training.engine.transfer).
        self.origin: Mapping[str, object] | None = None
        # The images that the run was trained on, in order; the present ones are last.
        self.history = [self._present_images(0)]
        # Changes a checkpoint of other images so that the run continues with the present ones.
        self.adapt: Callable[[checkpoints.Checkpoint], str] | None = None
        self.new_data = False  # False: a checkpoint of other images is refused
        # The last healthy step, while updates are being skipped. The two newest checkpoints up to
        # it are not deleted, because later ones may be broken.
        self.healthy: int | None = None
        # The next three attributes are set on rank 0 only.
        self.saved_step = -1  # step of the newest checkpoint that was written or restored
        self._best_step = -1  # step of the best checkpoint
        self._failure = ""  # the reason why the last write failed
        # The interpreter waits for this thread at exit.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self._versions: Mapping[str, object] = {}

    def save(
        self,
        step: int,
        registry: Registry,
        metadata: checkpoints.Checkpoint,
        evaluation: Evaluation | None = None,
        best: bool = False,
    ) -> None:
        """Write the states of the objects in `registry` as the checkpoint of `step`, once.

        `last.json` then points at it. If the disk is full, a warning is printed and the previous
        checkpoint remains; see `check`. With `checkpoint.asynchronous` a thread writes, and this
        method only waits for the previous write.

        Args:
            metadata: Entries of the checkpoint besides the state.
            evaluation: Metric, value and interval of an evaluation, for `last.json`.
            best: True to point `best.json` at this checkpoint too.
        """
        if not collectives.is_main():
            return
        self.wait()
        if self.saved_step == step:
            return
        images = self.loader.dataset.meta
        content = {
            "schema": checkpoints.SCHEMA,
            "task": self.config.task,
            "step": step,
            "config": to_tree(self.config),
            # empty for an unconditional generator, even if its images have classes
            "classes": list(images.classes)[: metadata["shape"]["classes"]],
            "data": {
                "content_hash": images.content_hash,
                "count": images.count,
                "resize_filter": images.resize_filter,
                "history": [images.model_dump() for images in self.history],
            },
            "lineage": self.lineage.document(),
            "versions": self._versions or versions(),
            "figure": evaluation or {},
            "origin": self.origin,
            **metadata,
            "state": {name: part.state_dict() for name, part in registry.items()},
        }
        snapshot = Snapshot(content, copy_cpu=self.config.checkpoint.asynchronous)
        self._job = self._thread.submit(self._write, snapshot, best, self.healthy)
        if not self.config.checkpoint.asynchronous:
            self.wait()

    def _write(self, snapshot: Snapshot, best: bool, healthy: int | None) -> None:
        folder, step = self.folder.checkpoints, snapshot.step
        options, evaluation = self.config.checkpoint, snapshot.content["figure"]
        try:
            checkpoints.sweep(folder)  # The remains of an interrupted write may fill the disk.
            path = checkpoints.save(folder, snapshot)
            checkpoints.point(folder, "last", path, **evaluation)
            self.saved_step = step
            if best:
                checkpoints.point(folder, "best", path, **evaluation)
                self._best_step = step
            protected = {self._best_step}
            if healthy is not None:
                protected.update(self.steps_up_to(healthy)[:2])
            checkpoints.rotate(
                folder, options.keep, keep_every=options.keep_every, also=protected, until=step
            )
        except OSError as error:
            problem = "was not written"
            consequence = "; the previous one is kept, training continues"
            if self.saved_step == step:
                problem = "was written, but not all that follows"
                consequence = ""
            self._failure = f"checkpoint of step {step} {problem} ({error.strerror})"
            say(f"warning: {self._failure}{consequence}")

    def wait(self) -> None:
        """Wait until every saved checkpoint is on disk, or its failure has been reported."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def check(self, *, last: int | None = None) -> None:
        """Raise TrainingHalted on all ranks if a checkpoint that the run must have was not written.

        Args:
            last: The last step, if the run has ended. A run without its last checkpoint has failed,
                also with `checkpoint.on_disk_full` warn.
        """
        only_warns = self.config.checkpoint.on_disk_full == "warn"
        if only_warns and last is None:
            return
        collectives.barrier()  # rank 0 may have waited for the disk
        reason = "checkpoint.on_disk_full is stop"
        problem = self._failure
        if only_warns:
            reason = "it is the run's last"
            problem = self._failure if self.saved_step != last else ""
        if problem := collectives.broadcast_object(problem):
            raise TrainingHalted(
                f"{problem} and {reason}; make room, then the same command resumes"
            )

    def steps_up_to(self, step: int) -> list[int]:
        """Return the steps of the run's checkpoints that are at most `step`, newest first."""
        steps = map(checkpoints.step_of, checkpoints.newest_first(self.folder.checkpoints))
        return [saved for saved in steps if saved <= step]

    def restore(
        self, registry: Registry, *, up_to: int | None = None
    ) -> checkpoints.Checkpoint | None:
        """Load the newest readable checkpoint of the run folder into the objects of `registry`.

        Args:
            up_to: Load a checkpoint of at most this step, and delete newer ones.

        Returns: The checkpoint; None if there is none.

        Raises UserError if it does not fit the data or the task.
        """
        self.wait()
        # Record the versions at the start, since the source code may change during the run.
        self._versions = versions()
        path = collectives.from_main_process(lambda: self._find(up_to))
        if path is None:
            return None
        content = checkpoints.load(Path(path), verify=False)
        self._check_images(content)
        self._load(registry, content, path)
        self.lineage = join(self.lineage, recorded(content))
        self.origin = content.get("origin")
        self.saved_step = content["step"]
        self._best_step = content["state"].get("loop", {}).get("best", {}).get("step", -1)
        if collectives.is_main():
            self._point(Path(path), content.get("figure", {}))
        return content

    def _find(self, up_to: int | None) -> str | None:
        """Delete checkpoints after step `up_to`; return the path of the newest readable one.

        Without `up_to`, the limit is the step of `last.json` if training broke after that step.
        Called on rank 0.
        """
        folder = self.folder.checkpoints
        last = checkpoints.pointer(folder, "last")
        if up_to is None and last is not None and "broken_until" in last:
            up_to = checkpoints.find_step(last["file"])
            say(
                f"going back to the checkpoint of step {up_to}: training broke after it and stopped "
                f"at step {last['broken_until']}; checkpoints from between are deleted"
            )
        if up_to is not None and not checkpoints.forget_after(folder, up_to):
            return None
        newest = checkpoints.load_latest(folder, warn=say)
        return None if newest is None else str(newest[0])

    def _present_images(self, step: int) -> TrainedOn:
        images = self.loader.dataset.meta
        path = str(self.config.data.path)
        return TrainedOn(step=step, content_hash=images.content_hash, count=images.count, path=path)

    def _check_images(self, content: checkpoints.Checkpoint) -> None:
        """Set `history`; if the images are not the checkpoint's, adapt its state or refuse it."""
        self.history = data_history(content)
        images = self.loader.dataset.meta
        earlier = self.history[-1]
        if earlier.content_hash != images.content_hash:
            if self.adapt is None or not self.new_data:
                raise UserError(
                    f"{self.folder.path}: was trained on other images ({earlier.count} then, "
                    f"{images.count} in {self.config.data.path} now); set data.path to its "
                    "images, add --new-data to continue with these, or choose another --run-dir"
                )
            say_main(self.adapt(content))
            self.history.append(self._present_images(content["step"]))
        # A later roll-back may reach a checkpoint of the earlier images.
        self.new_data |= len(self.history) > 1

    def _load(self, registry: Registry, content: checkpoints.Checkpoint, path: str) -> None:
        """Check that the whole state fits the objects of `registry`, then load it.

        Raises UserError that names the file and the key.
        """
        state, name = content["state"], ""
        parts = dict(registry)
        for key, part in registry.items():
            if key not in state and getattr(part, "optional", False):
                del parts[key]
        try:
            for name, part in parts.items():
                _check_part(f"state.{name}", part, state[name])
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except UserError:
            raise
        except FAULTS as error:
            # The text of a LookupError is only the key.
            kind = type(error).__name__ if isinstance(error, LookupError) else ""
            problem = shorten(" ".join(f"{kind} {error}".split()), 160)
            raise UserError(
                f"{path}: the state of {name!r} does not fit ({problem}); data.resolution or "
                "another setting of the networks has changed, or the file is damaged: give the "
                "run's own, or choose another --run-dir"
            ) from error

    def _point(self, path: Path, evaluation: Evaluation) -> None:
        """Point `last.json`, and `best.json` if due, at `path`.

        A process that was killed after writing `path` may not have done so.
        """
        with suppress(OSError):  # If the disk is full, the next save reports a remedy.
            checkpoints.point(path.parent, "last", path, **evaluation)
            if self._best_step == self.saved_step:
                checkpoints.point(path.parent, "best", path, **evaluation)


def _check_part(name: str, part: Stateful, state: object) -> None:
    """Check a network's saved tensors; other parts of a training check their state as they load it."""
    current = part.state_dict()
    is_network = isinstance(getattr(part, "model", part), nn.Module)
    if is_network and current and all(isinstance(value, Tensor) for value in current.values()):
        check_tensors(name, state, current)
