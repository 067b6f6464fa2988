"""Command lines and output that the benchmarks share."""

import json
import statistics
from collections.abc import Mapping, Sequence

from duetgan.utils.config.cli import Parser

Result = Mapping[str, float | int | str | bool]


def parser_of(script: str, description: str | None) -> Parser:
    """Return the parser of `benchmarks/SCRIPT.py`, which knows --json."""
    parser = Parser(prog=f"benchmarks/{script}.py", description=description)
    parser.add_argument("--json", action="store_true", help="the last line is one flat JSON object")
    return parser


def show(result: Result, *, as_json: bool) -> None:
    """Print a line for each value, and with `as_json` all of them as a JSON object at the end."""
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:{width}} {value:,.4g}" if isinstance(value, float) else f"{name:{width}} {value}")
    if as_json:
        print(json.dumps(result))


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the repeats' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
