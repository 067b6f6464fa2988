"""The first minutes with Duet: pack images, train both models on this machine, evaluate them, write
a report.

Without a FOLDER the embedded sample; a FOLDER is one of class folders or a flat one, a zip, a CSV,
or whatever else `duet pack` reads. What fits the images, the machine and --minutes is measured and
chosen at the first start. Each step is one of Duet's own commands, printed before it runs. After an
interruption the same command resumes, by the same plan.
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
        help="images: folder, zip, table (default: the sample)",
    )
    add("--minutes", type=number(float, 1, WEEK), default=15.0, help="how long it may take in all")
    weights = "ImageNet weights to fine-tune the classifier from (default: see docs); of several the best are taken"
    add_table_options(parser)
    add("--weights", metavar="FILE", action="append", default=[], help=weights)
    add(
        "--predict",
        metavar="IMAGES",
        help="name these new images in the end: predictions.csv beside the report",
    )
    add(
        "--seed",
        type=number(int, 0),
        default=0,
        help="of the split and of both trainings (default: 0)",
    )
    add("--dir", help="folder of the results (default: runs/quickstart, or runs/quickstart_NAME)")
    add("--quick", action="store_true", help=f"train {QUICK_STEPS} steps only, as a quick check")
    options = parser.parse_args(argv)
    folder = (
        Path(options.dir).resolve()
        if options.dir
        else default_folder(options.source, options.quick)
    )
    new = Path(options.predict).expanduser().resolve() if options.predict else None
    if new is not None and not new.exists():
        raise UserError(f"--predict {options.predict}: there is no such file or folder")
    plan = plan_for(folder, options)
    return plan if isinstance(plan, int) else Quickstart(folder, plan, new).run()
