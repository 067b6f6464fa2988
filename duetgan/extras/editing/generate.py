"""The subcommand `edit` of generate.py."""

from argparse import Namespace
from dataclasses import replace

from duetgan.commands.generate import OUTPUTS, Add, Output, open_sampler
from duetgan.utils.checkpoint import resolve
from duetgan.utils.config.cli import number, positive
from duetgan.utils.errors import require_same_classes


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
    text = "samples of each of the two classes for the search of a direction"
    add("--samples", type=number(int, 2), default=100, metavar="N", help=text)


def edit(options: Namespace) -> str:
    """Write a picture whose rows are samples that change from one class to another.

    Returns a summary as text.
    """
    sampler, checkpoint, _ = open_sampler(options, several=False)
    from duetgan.extras.editing.editor import Editor, pair_of
    from duetgan.extras.editing.strips import make_strips, save_strips, summary
    from duetgan.inference.samples import captions, truncated_styles
    from duetgan.models.restore import classifier_from, read

    guide = read(resolve(options.classifier))
    names = guide["classes"]
    if sampler.generator.classes:
        require_same_classes(
            "the generator", checkpoint["classes"], f"the classifier {options.classifier}", names
        )
    classifier = classifier_from(guide, sampler.device)
    editor = Editor(replace(sampler, sources=()), classifier, names, options.samples)
    source, target = pair_of(names, options.source, options.target)
    if not sampler.sources:
        start = editor.starts(source, options.n or 4)
    else:
        sampler = replace(sampler, chosen=[source] if sampler.chosen else [])
        rows = range(len(sampler.sources))
        start = truncated_styles(sampler, rows)
        print("rows:", ", ".join(captions(sampler, names, rows)).replace("\n", " "))
    direction = editor.direction(source, target)
    strips = make_strips(editor, start, direction)
    save_strips(strips, options.out)
    return f"{summary(strips, names, direction)}\nwrote {options.out}"


OUTPUTS["edit"] = Output(
    "change images from one class of a classifier to another",
    edit,
    add_options,
    classes=False,
    sources={"seeds": "samples to edit, whatever the classifier predicts"},
)
