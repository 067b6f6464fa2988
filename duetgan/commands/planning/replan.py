"""What changes a plan after it was made: which of several networks suits the images, and what the
parts took: `duet quickstart-replan FOLDER` measures the GAN's speed again, before it begins, and
changes the plan there.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from duetgan.commands.planning.plan import FILLED, GRIDS, STEPS, Plan
from duetgan.commands.planning.sizes import cadence
from duetgan.utils.config.cli import Parser
from duetgan.utils.files import as_json, write_atomic
from duetgan.utils.text import duration

LONGER = 1.05  # a GAN that could be longer by a smaller factor stays as it is


def settled(plan: Plan, found: Mapping[str, float], images: int) -> Plan:
    """The plan with the classifier whose network's features tell the images apart best, the first
    of equals. `found`: by file, the accuracy of a regression on that many training images, by
    cross-validation.
    """
    best, was = max(plan.choices, key=lambda each: found[each.weights]), plan.choices[0].why
    each = ", ".join(f"{accuracy:.3f} of {Path(file).name}" for file, accuracy in found.items())
    majority = plan.survey.largest_class / plan.survey.count
    note = f"network: the best by a regression on features of {images:,} training images; accuracy {each}"
    note += f" (always predicting the most frequent class: {majority:.3f})"
    seconds = (
        plan.seconds["train classifier"] - max(each.seconds for each in plan.choices) + best.seconds
    )
    return plan.model_copy(
        update={
            "classifier": best,
            "choices": [],
            "seconds": plan.seconds | {"train classifier": round(seconds, 1)},
            "notes": [
                f"classifier: {best.why}" if why == f"classifier: {was}" else why
                for why in plan.notes
            ]
            + [note],
        }
    )


def spent_before_gan(plan: Plan, timings: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds that the plan's parts before the GAN took, by timings.json; as planned where nothing
    is noted.
    """
    found = {}
    for part in takewhile(lambda part: part != "train gan", plan.seconds):
        # packing may be two
        steps = [step["seconds"] for name, step in timings.items() if name.startswith(part)]
        found[part] = sum(steps) if steps else plan.seconds[part]
    return found


def replanned(
    plan: Plan, spent: Mapping[str, float], pace: float = 1.0, measuring: float = 0.0
) -> Plan:
    """The plan with another length for the GAN, before it begins. `spent`: seconds that the parts
    before it took, and `measuring` its speed; `pace`: how much slower than planned the machine is
    now.

    A GAN that would no longer end within the minutes gets the time that is left of them; one for
    which there is clearly more time than planned gets that. Else the plan itself.
    """
    planned, gan = plan.seconds, plan.gan
    coming = {
        name: pace * seconds
        for name, seconds in planned.items()
        if name not in spent and name != "train gan"
    }
    start = pace * (planned["train gan"] - gan.seconds)
    others, rate = (
        sum(spent.values()) + measuring + sum(coming.values()) + start,
        gan.images_per_second / pace,
    )

    def fitting(seconds: float) -> int:
        """The steps that end so many seconds after the quickstart's start."""
        return max(
            STEPS["gan"],
            min(int((seconds - others) * rate / GRIDS / gan.batch_size), gan.most or gan.steps),
        )

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
            "gan": gan.model_copy(
                update=change | {"overrides": [*gan.overrides[: -len(often)], *often]}
            ),
            "seconds": {name: round(times[name], 1) for name in planned},
            "notes": [*plan.notes, note],
            "replanned": {"gan_steps": gan.steps, "seconds": round(plan.total, 1)},
        }
    )


def main(argv: list[str]) -> None:
    from duetgan.commands.planning.measure import ThisMachine

    begun = time.perf_counter()
    parser = Parser(
        prog="duet quickstart-replan",
        description="Measure the GAN's speed again; change its length.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of plan.json and timings.json")
    files = [parser.parse_args(argv).folder / name for name in ("plan.json", "timings.json")]
    tree, timings = (json.loads(file.read_text()) for file in files)
    plan = Plan.read(tree, "plan")
    gan, images = (
        plan.gan,
        plan.survey.model_copy(update={"classes": 0}) if plan.pooled else plan.survey,
    )
    with tempfile.TemporaryDirectory() as folder:
        speed = ThisMachine(Path(folder), [], tuning=False).speed(
            gan.config, gan.overrides, gan.resolution, images
        )
    pace = gan.images_per_second / speed.images_per_second
    changed = replanned(plan, spent_before_gan(plan, timings), pace, time.perf_counter() - begun)
    print("the GAN keeps its length" if changed is plan else changed.notes[-1], flush=True)
    write_atomic(files[0], as_json(changed.model_dump()))
