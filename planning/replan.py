"""What changes a plan after it was made: which of several networks suits the images, and what the parts took."""

from collections.abc import Mapping
from pathlib import Path

from duetgan.planning.plan import FILLED, GRIDS, STEPS, Plan
from duetgan.planning.sizes import cadence
from duetgan.utils.text import duration

PACE = (0.8, 5.0)  # how much longer than planned a part may take for others to be planned by it
LONGER = 1.05  # a GAN that could be longer by a smaller factor stays as it is


def settled(plan: Plan, found: Mapping[str, float], images: int) -> Plan:
    """The plan with the classifier whose network's features tell the images apart best, the first of equals. `found`:
    by file, the accuracy of a regression on that many training images, by cross-validation.
    """
    best, was = max(plan.choices, key=lambda each: found[each.weights]), plan.choices[0].why
    each = ", ".join(f"{accuracy:.3f} of {Path(file).name}" for file, accuracy in found.items())
    note = f"network: the best by a regression on features of {images:,} training images; accuracy {each}"
    seconds = plan.seconds["train classifier"] - max(each.seconds for each in plan.choices) + best.seconds
    return plan.model_copy(
        update={
            "classifier": best,
            "choices": [],
            "seconds": plan.seconds | {"train classifier": round(seconds, 1)},
            "notes": [f"classifier: {best.why}" if why == f"classifier: {was}" else why for why in plan.notes] + [note],
        }
    )


def replanned(plan: Plan, spent: Mapping[str, float]) -> Plan:
    """The plan with another length for the GAN, before it begins; `spent`: seconds that the parts before it took.

    The machine is taken to go on as much slower, or faster, as the classifier's training has shown it to be. A GAN that
    would no longer end within the minutes gets the time that is left of them; one for which there is clearly more time
    than planned gets that. Else the plan itself.
    """
    planned, gan = plan.seconds, plan.gan
    part = "train classifier"
    pace = min(max(spent[part] / planned[part], PACE[0]), PACE[1]) if part in spent else 1.0
    coming = {name: pace * seconds for name, seconds in planned.items() if name not in spent and name != "train gan"}
    start = pace * (planned["train gan"] - gan.seconds)
    others, rate = sum(spent.values()) + sum(coming.values()) + start, gan.images_per_second / pace

    def fitting(seconds: float) -> int:
        """The steps that end so many seconds after the quickstart's start."""
        steps = int((seconds - others) * rate / GRIDS / gan.batch_size)
        return max(STEPS["gan"], min(steps, gan.most or gan.steps))

    longer, steps = fitting(FILLED * 60 * plan.minutes), min(gan.steps, fitting(60 * plan.minutes))
    steps = longer if longer > LONGER * gan.steps else steps
    if steps == gan.steps:
        return plan
    took, meant = duration(sum(spent.values())), duration(sum(planned[name] for name in spent))
    why = f", because the parts before it took {took} instead of {meant}" if took != meant else ""
    note = f"GAN: {steps:,} steps instead of {gan.steps:,}{why}"
    often = cadence(steps, gan.batch_size / rate, evaluations=1)
    seconds = GRIDS * steps * gan.batch_size / rate
    change = {"steps": steps, "images_per_second": rate, "seconds": seconds}
    times = {**spent, **coming, "train gan": seconds + start}
    return plan.model_copy(
        update={
            "gan": gan.model_copy(update=change | {"overrides": [*gan.overrides[: -len(often)], *often]}),
            "seconds": {name: round(times[name], 1) for name in planned},
            "notes": [*plan.notes, note],
            "replanned": {"gan_steps": gan.steps, "seconds": round(plan.total, 1)},
        }
    )
