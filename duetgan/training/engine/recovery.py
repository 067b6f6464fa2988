"""Recovery from a loss spike by going back, and from non-finite updates by stopping."""

from typing import TYPE_CHECKING, NoReturn

from duetgan.training.engine import health
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.distributed import collectives
from duetgan.utils.runlog.run_log import say_main

if TYPE_CHECKING:
    from duetgan.training.engine.loop import Loop


def halt_broken(loop: "Loop", reason: str) -> NoReturn:
    """Stop training because the weights are broken.

    The same command then resumes from the last healthy checkpoint.
    """
    healthy = loop.failing.healthy(loop.step)
    step = select_healthy(loop.manager, loop.step - 1 if healthy is None else healthy, loop.step)
    loop.halt(f"{reason}; {health.remedy_for_broken(loop.config, step)}")


def select_healthy(manager: CheckpointManager, healthy: int, step: int) -> int | None:
    """Point `last.json`, from which a resume continues, at the newest checkpoint up to `healthy`.

    `step` is the one at which training stopped. Returns the checkpoint's step, the same on all
    ranks; None if there is none.
    """
    manager.wait()

    def find() -> int | None:
        folder, steps = manager.folder.checkpoints, manager.steps_up_to(healthy)
        if not steps:
            return None
        checkpoints.point(
            folder, "last", folder / checkpoints.file_name(steps[0]), broken_until=step
        )
        return steps[0]

    return collectives.from_main_process(find)


def check_spikes(loop: "Loop", values: list[float]) -> None:
    """Warn of a spike in `values`, the metric of the latest steps, or roll back.

    Raises TrainingHalted after `spikes.limit` roll-backs.
    """
    if (jump := loop.spikes.see(loop.step - len(values), values)) is None:
        return
    spike, value, median = jump
    problem = (
        f"{loop.window.watched} jumped to {value:.4g} in step {spike}, from {median:.4g} in the "
        "steps before"
    )
    if loop.config.spikes.action != "roll-back":
        say_main(f"warning: {problem}")
    elif loop.roll_backs >= loop.config.spikes.limit:
        loop.halt(
            f"{problem}, after {loop.roll_backs} roll-backs (spikes.limit); lower the learning rate, clip gradients, "
            "or check the data"
        )
    else:
        loop.off_the_clock(lambda: roll_back(loop, spike, problem), "rolling back")


def roll_back(loop: "Loop", spike: int, problem: str) -> None:
    """Go back to the last checkpoint before step `spike`, and skip the batches read since then.

    `problem` describes the spike.
    """
    broken_step, count = loop.step, loop.roll_backs + 1
    position = loop.loader.state_dict()
    content = loop.manager.restore(loop.registry(), up_to=spike)
    if content is None:
        say_main(
            f"warning: {problem}; there is no checkpoint from before it to go back to: lower "
            "log.every, at which spikes are checked, or raise checkpoint.keep"
        )
        return
    # The loader continues with new images, but takes the step, which selects the stage of
    # progressive growing, from the checkpoint.
    restored = content["state"]["loader"]
    for key in ("step", "batch"):
        if key in restored:
            position[key] = restored[key]
    loop.loader.load_state_dict(position)
    loop.rolled_back(count)
    say_main(
        f"warning: {problem}; went back to the checkpoint of step {loop.step} and on from there "
        f"with other images: those of the {broken_step - loop.step} steps since are left out "
        f"(roll-back {count} of {loop.config.spikes.limit})"
    )
