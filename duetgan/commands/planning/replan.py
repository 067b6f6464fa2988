"""Fit the length of a quickstart's GAN training to the time that is left."""

from collections.abc import Mapping
from itertools import takewhile

from duetgan.commands.planning.plan import FILLED, GRIDS, STEPS, Plan
from duetgan.commands.planning.sizes import cadence
from duetgan.utils.text import duration

LONGER = 1.05  # smallest factor by which a GAN's training is extended


def spent_before_gan(plan: Plan, timings: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each part of the plan that precedes the GAN's training.

    `timings` is the content of timings.json. A part without an entry has its planned seconds.
    """
    spent = {}
    for part in takewhile(lambda part: part != "train gan", plan.seconds):
        # Packing may be several steps, such as `pack train`.
        steps = [step["seconds"] for name, step in timings.items() if name.startswith(part)]
        spent[part] = sum(steps) if steps else plan.seconds[part]
    return spent


def replanned(plan: Plan, spent: Mapping[str, float]) -> Plan:
    """Return the plan with a new length of the GAN's training, which has not begun yet.

    If the quickstart would exceed the plan's minutes, the training is shortened to fit. If clearly
    more time is left than planned, it is extended. Otherwise the plan is returned unchanged. The
    machine is assumed to keep the pace that it had in the classifier's training.

    Args:
        spent: seconds of each part of the plan that precedes the GAN's training.
    """
    planned = plan.seconds
    gan = plan.gan
    pace = 1.0
    if "train classifier" in spent:
        pace = spent["train classifier"] / planned["train classifier"]
    remaining = {}
    for name, seconds in planned.items():
        if name not in spent and name != "train gan":
            remaining[name] = pace * seconds
    start = pace * (planned["train gan"] - gan.seconds)
    other_seconds = sum(spent.values()) + sum(remaining.values()) + start
    rate = gan.images_per_second / pace

    def fitting(seconds: float) -> int:
        """Return the number of the GAN's steps with which the quickstart takes `seconds` in all."""
        steps = int((seconds - other_seconds) * rate / GRIDS / gan.batch_size)
        return max(STEPS["gan"], min(steps, gan.most or gan.steps))

    longer = fitting(FILLED * 60 * plan.minutes)
    steps = min(gan.steps, fitting(60 * plan.minutes))
    if longer > LONGER * gan.steps:
        steps = longer
    if steps == gan.steps:
        return plan
    note = f"GAN: {steps:,} steps instead of {gan.steps:,}"
    spent_text = duration(sum(spent.values()))
    planned_text = duration(sum(planned[name] for name in spent))
    if spent_text != planned_text:
        note += f", because the parts before it took {spent_text} instead of {planned_text}"
    options = cadence(steps, gan.batch_size / rate, evaluations=1)
    seconds = GRIDS * steps * gan.batch_size / rate
    change = {
        "steps": steps,
        "images_per_second": rate,
        "seconds": seconds,
        "overrides": [*gan.overrides[: -len(options)], *options],
    }
    times = {**spent, **remaining, "train gan": seconds + start}
    return plan.model_copy(
        update={
            "gan": gan.model_copy(update=change),
            "seconds": {name: round(times[name], 1) for name in planned},
            "notes": [*plan.notes, note],
            "replanned": {"gan_steps": gan.steps, "seconds": round(plan.total, 1)},
        }
    )
