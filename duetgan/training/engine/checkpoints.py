"""Checkpoints of a run: their content, their writing, and the restoring of the newest one.

- Content: `CheckpointManager.save` lists the entries, and docs/checkpoints.md explains each. The
  entry `state` is a dict from the name of each object of `Loop.registry` (loop.py) to its state
  dict. The registry has the objects of `Task.registry` (gan/task.py, classifier/task.py), such as
  networks, averages, optimizers and the loss scaler. It also has the loader, the window of metrics,
  and the loop with its callbacks. Random number generators have no state, because each draw has its
  own seed (docs/randomness.md).
- Restoring: every start of a run calls `Loop.resume` (`_resume` in run.py), which calls
  `CheckpointManager.restore` on all ranks. Rank 0 finds the newest readable file, and each rank
  loads it. base/restoring.py checks its content and calls `load_state_dict` of each object. The
  manager itself restores the lineage and the step of the best checkpoint. A roll-back (rollback.py)
  calls `restore` with `up_to`. Programs that need only a network use models/restore.py instead.

utils/checkpoint writes and reads the files.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from duetgan.data.reading.loader import InfiniteLoader
from duetgan.training.base.config import RunConfig
from duetgan.training.base.restoring import ImageHistory, load_states
from duetgan.training.base.task import Stateful
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.provenance import Lineage, join, recorded
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.config.build import to_tree
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import say
from duetgan.utils.runlog.versions import versions

Registry = Mapping[str, Stateful]
Evaluation = Mapping[str, object]  # metric, value and interval of an evaluation


class CheckpointManager:
    """A manager that saves and restores the checkpoints of one run.

    Rank 0 writes them, and every rank reads them.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, loader: InfiniteLoader) -> None:
        self.config = config
        self.folder = folder
        self.images = ImageHistory(str(config.data.path), loader.dataset.meta)
        self.lineage = Lineage.of()  # all data that the weights were trained on
        # The other run's checkpoint with which this run started (training.engine.transfer).
        self.origin: Mapping[str, object] | None = None
        # The last healthy step, while updates are being skipped. The two newest checkpoints up to
        # it are not deleted, because later ones may be broken.
        self.healthy: int | None = None
        # Only rank 0's values of the next three attributes count.
        self.saved_step = -1  # step of the newest checkpoint that was written or restored
        self._best_step = -1  # step of the best checkpoint
        self._failure = ""  # the reason why the last write failed
        # The interpreter waits for this thread at exit.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        # Recorded at the start, since the source code may change during the run.
        self._versions = versions()

    def save(
        self,
        step: int,
        registry: Registry,
        metadata: checkpoints.Checkpoint,
        evaluation: Evaluation | None = None,
        best: bool = False,
    ) -> None:
        """Write a checkpoint of `step` with the states of all objects in `registry`.

        On ranks other than 0 this does nothing. A step that is already saved is not written again.
        `metadata` holds further entries of the checkpoint. After the write, `last.json` points at
        the file, and `best.json` too if `best` is True; both record `evaluation`. If the write
        fails, for example because the disk is full, only a warning is printed; see `check`. With
        `checkpoint.asynchronous` a thread writes, and this method waits only for the previous
        write.
        """
        if not collectives.is_main():
            return
        self.wait()
        if self.saved_step == step:
            return
        content = {
            "schema": checkpoints.SCHEMA,
            "task": self.config.task,
            "step": step,
            "config": to_tree(self.config),
            # empty for an unconditional generator, even if its images have classes
            "classes": list(self.images.meta.classes)[: metadata["shape"]["classes"]],
            "data": self.images.document(),
            "lineage": self.lineage.document(),
            "versions": self._versions,
            "figure": evaluation or {},  # the file format's key for the evaluation
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
            self._point(path, evaluation, step, best)
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

    def check(self, last: int) -> None:
        """Raise TrainingHalted on all ranks if writing the checkpoint of step `last` failed.

        All ranks must call this. `last` is the step at which the training has ended.
        """
        collectives.barrier()  # rank 0 may have waited for the disk
        problem = self._failure if self.saved_step != last else ""
        if problem := collectives.broadcast_object(problem):
            raise TrainingHalted(
                f"{problem} and it is the run's last; make room, then the same command resumes"
            )

    def steps_up_to(self, step: int) -> list[int]:
        """Return the steps up to `step` that have a checkpoint, newest first."""
        steps = map(checkpoints.step_of, checkpoints.newest_first(self.folder.checkpoints))
        return [saved for saved in steps if saved <= step]

    def restore(
        self, registry: Registry, *, up_to: int | None = None
    ) -> checkpoints.Checkpoint | None:
        """Load the newest readable checkpoint into the objects of `registry`; return its content.

        If `up_to` is given, checkpoints of later steps do not count, and are deleted. Return None,
        and delete nothing, if there is no checkpoint that counts. Raises UserError if the
        checkpoint was trained on other images (without `--new-data`), or if its states do not fit
        the objects.
        """
        self.wait()
        path = collectives.from_main_process(lambda: self._find(up_to))
        if path is None:
            return None
        content = checkpoints.load(Path(path), verify=False)
        self.images.restore(content, self.folder)
        load_states(registry, content["state"], path)
        self.lineage = join(self.lineage, recorded(content))
        self.origin = content.get("origin")
        self.saved_step = content["step"]
        self._best_step = content["state"].get("loop", {}).get("best", {}).get("step", -1)
        if collectives.is_main():
            # A process that was killed after writing the file may not have pointed at it. If the
            # disk is full, the next save reports a remedy.
            with suppress(OSError):
                is_best = self._best_step == self.saved_step
                self._point(Path(path), content.get("figure", {}), self.saved_step, is_best)
                self._renew_best()
        return content

    def _renew_best(self) -> None:
        """Point `best.json` at the best checkpoint if it names none.

        It may have named a later checkpoint, which `restore` has deleted.
        """
        folder = self.folder.checkpoints
        path = folder / checkpoints.file_name(max(0, self._best_step))
        if self._best_step < 0 or not path.is_file() or checkpoints.pointer(folder, "best"):
            return
        with suppress(UserError):  # The file is damaged.
            checkpoints.point(folder, "best", path, **checkpoints.load(path).get("figure", {}))

    def _find(self, up_to: int | None) -> str | None:
        """Return the path of the newest readable checkpoint up to step `up_to`; delete later ones.

        If `up_to` is None, and `last.json` records that training broke after the checkpoint that it
        names, the step of this checkpoint is the limit. Otherwise None means no limit. Return None,
        and delete nothing, if there is no checkpoint up to the limit. Called on rank 0.
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

    def _point(self, path: Path, evaluation: Evaluation, step: int, is_best: bool) -> None:
        """Point `last.json` at `path`, the checkpoint of `step`; also `best.json` if `is_best`.

        Both files record `evaluation`.
        """
        checkpoints.point(path.parent, "last", path, **evaluation)
        self.saved_step = step
        if is_best:
            checkpoints.point(path.parent, "best", path, **evaluation)
            self._best_step = step
