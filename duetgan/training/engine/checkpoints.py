"""Writing a run's checkpoints and taking the newest again. The loop decides what a checkpoint
holds.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Any

from duetgan.data.reading.loader import InfiniteLoader
from duetgan.training.base.config import RunConfig
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.state_schema import FAULTS, check_part
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.config.build import to_tree
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.provenance import Lineage, join, recorded
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import say
from duetgan.utils.versions import versions

Registry = dict[str, Any]  # name -> object with state_dict and load_state_dict


class CheckpointManager:
    """Keeps the checkpoints of one run: rank 0 writes, every rank reads."""

    def __init__(self, config: RunConfig, folder: RunFolder, loader: InfiniteLoader) -> None:
        self.config, self.folder, self.loader = config, folder, loader
        self.lineage = Lineage.of()  # what the weights see and have seen
        self.saved_step = -1  # rank 0: of the newest checkpoint that was written, or resumed from
        self._best_step = -1  # rank 0: of the best one
        self._failure = ""  # rank 0: why the last write failed
        # the process waits for it at its end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self._versions: dict[str, Any] = {}

    def save(
        self,
        step: int,
        registry: Registry,
        about: dict[str, Any],
        figure: dict[str, Any] | None = None,
        best: bool = False,
        healthy: int | None = None,
    ) -> None:
        """Write the registry's state as the checkpoint of `step` unless that is there, and point
        `last.json` at it.

        `about`: what it tells besides the state. `figure`: the metric, value and interval of an
        evaluation, for `last.json`; with `best`, the best so far, `best.json` is pointed at it too.
        `healthy`: while updates are being skipped, the last step known to be sound; the newest
        checkpoint up to it stays, and the one before it, should that be broken too. A full disk is
        a warning, the old checkpoint stays; see `failure`. With `checkpoint.asynchronous` a thread
        writes: here it is only waited for the checkpoint before.
        """
        if not collectives.is_main():
            return
        self.wait()
        if self.saved_step == step:
            return
        meta = self.loader.reader.meta
        content = {
            "schema": checkpoints.SCHEMA,
            "task": self.config.task,
            "step": step,
            "config": to_tree(self.config),
            # none of an unconditional generator
            "classes": list(meta.classes)[: about["shape"]["classes"]],
            "data": {
                "content_hash": meta.content_hash,
                "count": meta.count,
                "resize_filter": meta.resize_filter,
            },
            "lineage": self.lineage.document(),
            "versions": self._versions or versions(),
            "figure": figure or {},
            **about,
            "state": {name: part.state_dict() for name, part in registry.items()},
        }
        taken = Snapshot(content, own=self.config.checkpoint.asynchronous)
        self._job = self._thread.submit(self._write, taken, best, healthy)
        if not self.config.checkpoint.asynchronous:
            self.wait()

    def _write(self, taken: Snapshot, best: bool, healthy: int | None) -> None:
        folder, step, wanted = self.folder.checkpoints, taken.step, self.config.checkpoint
        figure = taken.content["figure"]
        try:
            checkpoints.sweep(folder)  # what a killed write has left may be what fills the disk
            path = checkpoints.save(folder, taken)
            checkpoints.point(folder, "last", path, **figure)
            self.saved_step = step
            if best:
                checkpoints.point(folder, "best", path, **figure)
                self._best_step = step
            also = {self._best_step, *([] if healthy is None else self.steps_up_to(healthy)[:2])}
            checkpoints.rotate(folder, wanted.keep, every=wanted.keep_every, also=also, until=step)
        except OSError as error:
            what, then = "was not written", "; the previous one is kept, training continues"
            if self.saved_step == step:
                what, then = "was written, but not all that follows", ""
            self._failure = f"checkpoint of step {step} {what} ({error.strerror})"
            say(f"warning: {self._failure}{then}")

    def wait(self) -> None:
        """Return when everything that was saved is on the disk, or a warning has told why not."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def failure(self, *, last: int | None = None) -> str:
        """Why training must stop for a checkpoint that could not be written, on all ranks; empty:
        it goes on. `last`: the step of the run's last checkpoint, without which no run has ended
        well.
        """
        warns = self.config.checkpoint.on_disk_full == "warn"
        if warns and last is None:
            return ""
        collectives.barrier()  # rank 0 may have waited for the disk
        lacks = last is not None and self.saved_step != last
        reason = collectives.broadcast_object(self._failure if lacks or not warns else "")
        why = "it is the run's last" if warns else "checkpoint.on_disk_full is stop"
        return reason and f"{reason} and {why}; make room, then the same command resumes"

    def steps_up_to(self, step: int) -> list[int]:
        """Return the steps of the run's checkpoints up to `step`, newest first."""
        every = map(checkpoints.step_of, checkpoints.newest_first(self.folder.checkpoints))
        return [each for each in every if each <= step]

    def restore(
        self, registry: Registry, *, up_to: int | None = None
    ) -> checkpoints.Checkpoint | None:
        """Load the newest checkpoint of the run folder that can be read into the registry; returns
        the checkpoint, or None when there is none. `up_to`: of at most this step; younger ones are
        deleted then.

        Raises UserError when it does not fit the data or the task.
        """
        self.wait()
        self._versions = versions()  # now: later the checkout may be another

        def find() -> str | None:
            folder, last = (
                self.folder.checkpoints,
                checkpoints.pointer(self.folder.checkpoints, "last") or {},
            )
            until = up_to
            if until is None and "broken_until" in last:
                until = checkpoints.find_step(last["file"])
                say(
                    f"going back to the checkpoint of step {until}: training broke after it and stopped at step "
                    f"{last['broken_until']}; checkpoints from between are deleted"
                )
            if until is not None and not checkpoints.forget_after(folder, until):
                return None
            newest = checkpoints.load_latest(folder, warn=say)
            return None if newest is None else str(newest[0])

        if (path := collectives.from_main_process(find)) is None:
            return None
        content = checkpoints.load(Path(path), verify=False)
        data = content.get("data") or {}
        meta = self.loader.reader.meta
        if data.get("content_hash") != meta.content_hash:
            raise UserError(
                f"{self.folder.path}: was trained on other images ({data.get('count')} then, {meta.count} in "
                f"{self.config.data.path} now); choose another --run-dir or give its own data"
            )
        self._load(registry, content, path)
        self.lineage = join(self.lineage, recorded(content))
        self.saved_step = content["step"]
        self._best_step = content["state"].get("loop", {}).get("best", {}).get("step", -1)
        if collectives.is_main():
            self._point(Path(path), content.get("figure", {}))
        return content

    def _load(self, registry: Registry, content: checkpoints.Checkpoint, path: str) -> None:
        """Compare the whole state with the registry, then load it. Raises UserError naming file and
        key.
        """
        state, name = content["state"], ""
        parts = {
            name: part
            for name, part in registry.items()
            if name in state or not getattr(part, "optional", False)
        }
        try:
            for name, part in parts.items():
                if name not in state:
                    problem = f"lacks the state of {name!r}, so another version wrote it"
                    raise UserError(f"{path}: {problem}; start in another --run-dir")
                check_part(f"state.{name}", part, state[name])
            for name, part in parts.items():
                part.load_state_dict(state[name])
            name = "loop"
            if state.get("loop", {}).get("step", content["step"]) != content["step"]:
                raise ValueError(f"state.loop.step is not the checkpoint's step, {content['step']}")
        except UserError:
            raise
        except FAULTS as error:
            problem = shorten(
                f"{type(error).__name__ * isinstance(error, LookupError)} {error}", 160
            )
            raise UserError(
                f"{path}: the state of {name!r} does not fit ({problem}); data.resolution or another setting of the "
                "networks has changed, or the file is damaged: give the run's own, or choose another --run-dir"
            ) from error

    def _point(self, path: Path, figure: dict[str, Any]) -> None:
        """Write the pointers that a kill after a checkpoint has left undone."""
        folder = self.folder.checkpoints
        try:
            for which in ("last", "best") if self._best_step == self.saved_step else ("last",):
                if (checkpoints.pointer(folder, which) or {}).get("file") != path.name:
                    checkpoints.point(folder, which, path, **figure)
        except OSError as error:  # the next checkpoint will say more
            say(
                f"warning: {folder}: last.json or best.json could not be updated ({error.strerror})"
            )
