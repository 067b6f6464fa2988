"""The way back from weights that non-finite updates have broken: the last healthy checkpoint."""

from duetgan.training.base.monitors import COUNTED, MetricWindow, State
from duetgan.training.engine.loop import BrokenWeights, Callback, Loop
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import TrainingHalted
from duetgan.utils.runlog.run_log import Metrics

QUIET = 64  # steps without a skipped update after which training counts as healthy again


class SkippedUpdates(Callback):
    """Counts skipped updates, and stops training after too many with non-finite gradients."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        # First and last step of the latest range in which updates were skipped; empty without one.
        self.span: list[int] = []
        self.totals = dict.fromkeys(COUNTED, 0.0)  # of the updates of all networks

    def state_dict(self) -> State:
        return {"updates": dict(self.totals), "failing": list(self.span)}

    def load_state_dict(self, state: State) -> None:
        self.totals = dict(state["updates"])
        # Checkpoints of earlier versions lack "failing".
        self.span = list(state.get("failing", []))

    def before_save(self, loop: Loop) -> None:
        """Set the last healthy step of the loop's manager, None if no updates are being skipped.

        It is two steps before the first skipped update, because the update in between may have
        broken the weights.
        """
        failed = loop.window.failed
        for step, is_failed in enumerate(failed, loop.step - len(failed) + 1):
            if is_failed:
                goes_on = self.span and step - self.span[1] <= QUIET
                self.span = [self.span[0] if goes_on else step, step]
        failed.clear()
        is_failing = self.span and loop.step - self.span[1] <= QUIET
        loop.manager.healthy = self.span[0] - 2 if is_failing else None

    def columns(self, window: MetricWindow) -> Metrics:
        return {name: round(total + window.total(name)) for name, total in self.totals.items()}

    def after_row(self, loop: Loop, row: Metrics, window: MetricWindow) -> None:
        self.before_save(loop)
        for name in self.totals:
            self.totals[name] += window.total(name)
        count = self.totals["nonfinite_updates"]
        if count > self.cap:
            raise BrokenWeights(
                f"{round(count)} updates had non-finite gradients, more than nonfinite_cap {self.cap}"
            )


def stop_broken(loop: Loop, reason: str) -> TrainingHalted:
    """Point `last.json` at the last healthy checkpoint; return the error that ends the training.

    The same command then resumes from that checkpoint.
    """
    manager = loop.manager
    healthy = loop.step - 1 if manager.healthy is None else manager.healthy
    manager.wait()

    def select() -> int | None:
        folder, steps = manager.folder.checkpoints, manager.steps_up_to(healthy)
        if not steps:
            return None
        path = folder / checkpoints.file_name(steps[0])
        checkpoints.point(folder, "last", path, broken_until=loop.step)
        return steps[0]

    step = collectives.from_main_process(select)
    sections = vars(loop.config).items()
    keys = [f"{name}.lr" for name, section in sections if hasattr(section, "clip_norm")]
    remedy = f"lower the learning rate ({' and '.join(keys)})"
    if loop.config.precision != "fp32":
        remedy += " or use --precision fp32"
    if step is None:
        remedy += " and start in another --run-dir: no checkpoint is from before that"
    else:
        remedy += f"; the same command then goes on from step {step}, the last checkpoint from before that"
    return TrainingHalted(f"{reason}; {remedy}")
