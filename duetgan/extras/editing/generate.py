"""The subcommand `edit` of generate.py."""

from argparse import Namespace
from dataclasses import replace

from duetgan.commands.generate import (
    OUTPUTS,
    Add,
    Output,
    config_from,
    open_sampler,
)
from duetgan.extras.editing.config import EditConfig
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.config.cli import number, positive
from duetgan.utils.errors import require_same_classes

EDIT = EditConfig()  # defaults of options


def add_options(add: Add) -> None:
    add(
        "--classifier",
        required=True,
        metavar="RUN_OR_FILE",
        help="classifier whose prediction is changed",
    )
    add("--from", required=True, dest="source", metavar="CLASS", help="class of the images")
    add(
        "--to", required=True, dest="target", metavar="CLASS", help="class that they are changed to"
    )
    add(
        "--n",
        type=positive,
        metavar="N",
        help="number of samples, each with a strip of images (default: 4)",
    )
    add("--columns", type=number(int, 2), default=7, metavar="N", help="images per strip")
    text = "samples of each of the two classes for the search of a direction"
    add("--samples", type=number(int, 2), default=EDIT.samples, metavar="N", help=text)
    for name, noun in (("pixel", "pixels"), ("keep", "other classes")):
        text = f"weight of changes of {noun} in the loss"
        add(
            f"--{name}-weight",
            type=number(float, 0),
            default=EDIT.pixel_weight,
            metavar="X",
            help=text,
        )
    add(
        "--reach",
        type=number(float, 0, 1, inner=True),
        default=EDIT.reach,
        help="probability of the new class at which the edit is complete",
    )
    text = "longest step in the latent space"
    add("--limit", type=number(float, 0, inner=True), default=EDIT.limit, help=text)


def edit(options: Namespace) -> str:
    """Write strips of images that change from one class to another; return a summary of them."""
    config = config_from(options, EditConfig)
    sampler, checkpoint, _ = open_sampler(options, several=False)
    from duetgan.extras.editing.editor import Editor, pair_of
    from duetgan.extras.editing.strips import make_strips, save_strips, summary
    from duetgan.inference.samples import captions
    from duetgan.models.restore import classifier_from, read

    guide = read(resolve_for_people(options.classifier))
    names = guide["classes"]
    if sampler.generator.classes:
        require_same_classes(
            "the generator", checkpoint["classes"], f"the classifier {options.classifier}", names
        )
    editor = Editor(
        replace(sampler, sources=()), classifier_from(guide, sampler.device), names, config
    )
    source, target = pair_of(names, options.source, options.target)
    if not sampler.sources:
        start = editor.starts(source, options.n or 4)
    else:
        sampler = replace(sampler, chosen=[source] if sampler.chosen else [])
        rows = range(len(sampler.sources))
        start = editor.start(sampler, rows)
        print("rows:", ", ".join(captions(sampler, names, rows)).replace("\n", " "))
    direction = editor.direction(source, target)
    strips = make_strips(editor, start, direction, columns=options.columns)
    save_strips(strips, options.out)
    return f"{summary(strips, names, direction)}\nwrote {options.out}"


OUTPUTS["edit"] = Output(
    "change images from one class of a classifier to another, and as little else as possible",
    edit,
    add_options,
    classes=False,
    sources={"seeds": "samples to edit, whatever the classifier predicts"},
)
