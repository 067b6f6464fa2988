"""Change a quickstart's plan: choose the classifier's network, or fit the GAN's training to the
remaining time.

`duet quickstart-replan FOLDER` measures the GAN's speed again before its training begins, and
changes FOLDER/plan.json.
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

LONGER = 1.05  # smallest factor by which a GAN's training is extended


def settled(plan: Plan, accuracies: Mapping[str, float], images: int) -> Plan:
    """Return the plan with only the classifier whose pretrained network suits the images best.

    Args:
        accuracies: weights file -> cross-validated accuracy of a logistic regression on the
            network's features. The first of equal ones is chosen.
        images: number of training images on which the networks were compared.
    """
    best = max(plan.choices, key=lambda training: accuracies[training.weights])
    texts = [f"{accuracy:.3f} of {Path(file).name}" for file, accuracy in accuracies.items()]
    majority = plan.survey.largest_class / plan.survey.count
    note = (
        f"network: the best by a regression on features of {images:,} training images; "
        f"accuracy {', '.join(texts)} "
        f"(always predicting the most frequent class: {majority:.3f})"
    )
    slowest = max(training.seconds for training in plan.choices)
    seconds = plan.seconds["train classifier"] - slowest + best.seconds
    notes = list(plan.notes)
    if (old_note := f"classifier: {plan.choices[0].why}") in notes:
        notes[notes.index(old_note)] = f"classifier: {best.why}"
    return plan.model_copy(
        update={
            "classifier": best,
            "choices": [],
            "seconds": plan.seconds | {"train classifier": round(seconds, 1)},
            "notes": [*notes, note],
        }
    )


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


def replanned(
    plan: Plan, spent: Mapping[str, float], pace: float = 1.0, measuring: float = 0.0
) -> Plan:
    """Return the plan with a new length of the GAN's training, which has not begun yet.

    If the quickstart would exceed the plan's minutes, the training is shortened to fit. If clearly
    more time is left than planned, it is extended. Otherwise the plan is returned unchanged.

    Args:
        spent: seconds of each part of the plan that precedes the GAN's training.
        pace: planned speed of the machine divided by its present speed.
        measuring: seconds that measuring the present speed took.
    """
    planned = plan.seconds
    gan = plan.gan
    remaining = {}
    for name, seconds in planned.items():
        if name not in spent and name != "train gan":
            remaining[name] = pace * seconds
    start = pace * (planned["train gan"] - gan.seconds)
    other_seconds = sum(spent.values()) + measuring + sum(remaining.values()) + start
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


def main(argv: list[str]) -> None:
    from duetgan.commands.planning.measure import ThisMachine

    start = time.perf_counter()
    parser = Parser(
        prog="duet quickstart-replan",
        description="Measure the GAN's speed again and change its length to fit.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder with plan.json and timings.json"
    )
    files = [parser.parse_args(argv).folder / name for name in ("plan.json", "timings.json")]
    tree, timings = (json.loads(file.read_text()) for file in files)
    plan = Plan.read(tree, "plan")
    gan = plan.gan
    images = plan.survey
    if plan.pooled:
        images = images.model_copy(update={"classes": 0})
    with tempfile.TemporaryDirectory() as folder:
        speed = ThisMachine(Path(folder), [], tuning=False).speed(
            gan.config, gan.overrides, gan.resolution, images
        )
    pace = gan.images_per_second / speed.images_per_second
    changed = replanned(plan, spent_before_gan(plan, timings), pace, time.perf_counter() - start)
    print("the GAN keeps its length" if changed is plan else changed.notes[-1], flush=True)
    write_atomic(files[0], as_json(changed.model_dump()))
