"""Add `--robustness` to evaluate.py."""

from duetgan.commands.evaluate import KINDS, OPTIONS
from duetgan.utils.config.cli import Parser


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "--robustness",
        action="store_true",
        help="classifier: measure the accuracy under blur, noise, JPEG, brightness and contrast, at five "
        "strengths each (25 passes)",
    )


OPTIONS.append(add_options)
for kind in KINDS.values():
    if kind.task == "gan":
        kind.unsupported.update(robustness=False)
