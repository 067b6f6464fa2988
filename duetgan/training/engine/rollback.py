"""The handling of broken weights: roll-backs after loss spikes, and stops after skipped updates."""

from collections.abc import Mapping

from duetgan.training.base.monitors import (
    COUNTED,
    MetricWindow,
    SpikeDetector,
    SpikesConfig,
    State,
)
from duetgan.training.engine.loop import BrokenWeights, Callback, Loop
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.runlog.run_log import Metrics, say_main

QUIET = 64  # steps without a skipped update after which training counts as healthy again


class SkippedUpdates(Callback):
    """A callback that counts skipped updates, which are those with non-finite gradients.

    It raises BrokenWeights if there are more than `cap`, without those whose gradients may have
    overflowed because of fp16's loss scale.
    """

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
        """Set the checkpoint manager's `healthy`, the last step with surely unbroken weights.

        It is None if no update was skipped in the last QUIET steps. Otherwise it is two steps
        before the first skipped update of the present series, because the update between them may
        have broken the weights.
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

    The same command then resumes from that checkpoint. If no checkpoint is healthy, `last.json`
    does not change. `reason` begins the message of the error.
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


class SpikeRollback(Callback):
    """A callback that warns of a spike in the loss, or rolls back to the checkpoint before it.

    `spikes.action` chooses between the two. After a roll-back, training skips the batches that it
    had read since that checkpoint. A spike after `spikes.limit` roll-backs raises TrainingHalted.
    """

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.detector = SpikeDetector(config)
        self.count = 0  # number of roll-backs

    def state_dict(self) -> State:
        return {"spikes": self.detector.state_dict(), "roll_backs": self.count}

    def load_state_dict(self, state: State) -> None:
        self.detector.load_state_dict(state["spikes"])
        self.count = state["roll_backs"]

    def after_step(self, loop: Loop, metrics: Mapping[str, object]) -> None:
        watched = loop.window.watched
        if watched is None or watched in metrics:
            return
        names = [name for name in metrics if name.startswith(("loss/", "gradient_norm/"))]
        raise UserError(
            f"spikes.metric {watched}: not a metric of every step; "
            f"choose one of {', '.join(sorted(names))}"
        )

    def columns(self, window: MetricWindow) -> Metrics:
        return {"roll_backs": self.count} if self.config.action == "roll-back" else {}

    def after_row(self, loop: Loop, row: Metrics, window: MetricWindow) -> None:
        values = window.values
        jump = self.detector.see(loop.step - len(values), values)
        if jump is None:
            return
        spike, value, median = jump
        problem = (
            f"{window.watched} jumped to {value:.4g} in step {spike}, from {median:.4g} in the "
            "steps before"
        )
        if self.config.action != "roll-back":
            say_main(f"warning: {problem}")
        elif self.count >= self.config.limit:
            raise TrainingHalted(
                f"{problem}, after {self.count} roll-backs (spikes.limit); lower the learning rate, "
                "clip gradients, or check the data"
            )
        else:
            loop.off_the_clock(lambda: self.roll_back(loop, spike, problem))

    def roll_back(self, loop: Loop, spike: int, problem: str) -> None:
        """Go back to the last checkpoint before step `spike`, and continue with other images.

        If there is no such checkpoint, only print a warning. `problem` is a text that describes the
        spike in the messages.
        """
        broken_step, count = loop.step, self.count + 1
        position = loop.loader.state_dict()
        content = loop.manager.restore(loop.registry(), up_to=spike)
        if content is None:
            say_main(
                f"warning: {problem}; there is no checkpoint from before it to go back to: lower "
                "log.every, at which spikes are checked, or raise checkpoint.keep"
            )
            return
        # The step, which selects the stage of progressive growing, is the checkpoint's.
        restored = content["state"]["loader"]
        position |= {key: restored[key] for key in ("step", "batch") if key in restored}
        loop.loader.load_state_dict(position)
        self.count = count
        loop.stopwatch.step = loop.step
        loop.log.close()
        loop.log.open(loop.step)
        say_main(
            f"warning: {problem}; went back to the checkpoint of step {loop.step} and on from there "
            f"with other images: those of the {broken_step - loop.step} steps since are left out "
            f"(roll-back {count} of {self.config.limit})"
        )
