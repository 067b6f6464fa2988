"""Get started with Duet: pack images, train a GAN and a classifier, evaluate them, write a report.

Give a FOLDER with a subfolder for each class, a folder of images without classes, a zip, a CSV, or
anything else that `duet pack` reads; without one the sample images of Duet are used. At the first
start this machine's speed is measured, and a plan is made that fits the images and --minutes. Each
step is one of Duet's commands, which is printed before it runs. After an interruption the same
command resumes with the same plan.
"""

from pathlib import Path

from duetgan.commands.planning.steps import (
    QUICK_STEPS,
    SAMPLE,
    WEEK,
    Quickstart,
    default_folder,
    plan_for,
)
from duetgan.utils.config.cli import Parser, add_table_options, number
from duetgan.utils.errors import UserError


def main(argv: list[str]) -> int:
    parser = Parser(prog="quickstart.py", description=__doc__)
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        default=SAMPLE,
        metavar="FOLDER",
        help="images: a folder, zip or table (default: the sample images)",
    )
    add(
        "--minutes",
        type=number(float, 1, WEEK),
        default=15.0,
        help="time limit in minutes, for everything",
    )
    add_table_options(parser)
    weights = "ImageNet weights for the classifier (default: see docs/your-data.md)"
    add("--weights", metavar="FILE", help=weights)
    add(
        "--predict",
        metavar="IMAGES",
        help="classify these new images at the end, into predictions.csv",
    )
    add(
        "--seed",
        type=number(int, 0),
        default=0,
        help="seed of the split and of both trainings (default: 0)",
    )
    add("--dir", help="folder for the results (default: runs/quickstart, or runs/quickstart_NAME)")
    add(
        "--quick",
        action="store_true",
        help=f"train only {QUICK_STEPS} steps, to check that everything works",
    )
    options = parser.parse_args(argv)
    folder = default_folder(options.source, options.quick)
    if options.dir:
        folder = Path(options.dir).resolve()
    new_images = None
    if options.predict:
        new_images = Path(options.predict).expanduser().resolve()
        if not new_images.exists():
            raise UserError(f"--predict {options.predict}: there is no such file or folder")
    plan = plan_for(folder, options)
    return plan if isinstance(plan, int) else Quickstart(folder, plan, new_images).run()
