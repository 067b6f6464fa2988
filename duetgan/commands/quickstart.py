"""Get started with Duet: pack images, train a GAN and a classifier, evaluate them, write a report.

Give a FOLDER with a subfolder for each class, a folder of images without classes, a zip, a CSV, or
anything else that `duet pack` reads; without one the sample images of Duet are used. At the first
start this machine's speed is measured, and a plan is made that fits the images and --minutes. Each
step is one of Duet's commands, which is printed before it runs. After an interruption the same
command resumes with the same plan.
"""

from pathlib import Path

from duetgan.commands.planning.measure import add_request_options
from duetgan.commands.planning.plan import SAMPLE
from duetgan.commands.planning.steps import Quickstart, default_folder, plan_for
from duetgan.utils.config.cli import Parser


def main(argv: list[str]) -> int:
    parser = Parser(prog="quickstart.py", description=__doc__)
    add_request_options(parser)
    parser.add_argument(
        "--dir", help="folder for the results (default: runs/quickstart, or runs/quickstart_NAME)"
    )
    options = parser.parse_args(argv)
    source = Path(options.source).expanduser()
    if options.source != SAMPLE and source.exists():
        options.source = str(source.resolve())
    if options.weights:
        options.weights = str(Path(options.weights).expanduser().resolve())
    folder = Path(options.dir or default_folder(options.source, options.quick)).resolve()
    plan = plan_for(folder, options)
    return plan if isinstance(plan, int) else Quickstart(folder, plan).run()
