"""The option `--counterfactual` of predict.py."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from duetgan.inference.additions import ADDITIONS, Addition, Answer
from duetgan.inference.settings import ProjectionConfig
from duetgan.utils.config.cli import positive
from duetgan.utils.errors import refuse

if TYPE_CHECKING:  # imports of torch take seconds, so the options are checked first
    from duetgan.inference.inputs import Inputs
    from duetgan.models.classifier import Classifier

STEPS = ProjectionConfig().steps


def add_options(add: Callable[..., object]) -> None:
    add(
        "--counterfactual",
        type=Path,
        metavar="DIR",
        help="write each image as it changes to another class, to show the differences (needs --generator)",
    )
    add(
        "--counterfactual-class",
        metavar="NAME",
        help="class to change to (default: the second most probable)",
    )
    add(
        "--generator",
        metavar="RUN_OR_FILE",
        help="a GAN with a w space and the same classes, which draws the change",
    )
    add(
        "--steps",
        type=positive,
        default=STEPS,
        help=f"steps of each image's projection (default: {STEPS})",
    )


def prepare(
    options: Namespace, inputs: "Inputs", classes: list[str], classifier: "Classifier"
) -> Callable[[str, Answer], Answer] | None:
    """Load the generator, and return a function that draws the counterfactual of an image.

    The function takes the name of an image and its prediction, and returns a dict with the results
    (`Counterfactuals.draw`). Without `--counterfactual`, return None. Raises UserError for invalid
    options, and for a generator with other classes.
    """
    from duetgan.extras.editing.strips import Counterfactuals
    from duetgan.inference.predictions import requested_files

    refuse(
        (
            options.counterfactual and options.generator is None,
            "--counterfactual draws with a generator of the same classes; add --generator RUN",
        ),
        (
            options.counterfactual and classifier.thresholds is not None,
            "--counterfactual is for one label an image; leave it out",
        ),
        (
            options.counterfactual and not inputs.are_files,
            "--counterfactual is for image files and folders; unpack the images first",
        ),
    )
    requested = requested_files(options, "counterfactual", "generator", inputs, classes)
    if not requested:
        return None
    files, label = requested
    strips = Counterfactuals(
        options.generator,
        classifier,
        classes,
        dict(zip(inputs.names(), files, strict=True)),
        target=label,
        steps=options.steps,
        batch_size=options.batch_size,
    )
    return lambda name, answer: strips.draw(name, answer["label"], resize=options.resize)


def text(strip: Answer) -> str:
    """Describe the counterfactual `strip` in words, to follow the text of the prediction."""
    if "error" in strip:
        return f"; no counterfactual: {strip['error']}"
    prefix = "" if strip["arrived"] else "threshold not reached, at best "
    return (
        f"; {prefix}{strip['class']} {strip['probability']:.3f}, pixels change by "
        f"{strip['pixel_change']:.3f} ({strip['image']})"
    )


ADDITIONS["counterfactual"] = Addition(add_options, prepare, "have no counterfactual", text)
