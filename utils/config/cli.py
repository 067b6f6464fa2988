"""A small argument parser for the small scripts: one line and exit code 2 on a bad option, `-` and `_` alike; and the
options that several of them share.
"""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from utils.errors import UserError


def normalise(argv: Sequence[str]) -> list[str]:
    """Turn `--some-name=x` into `--some_name=x`: hyphens and underscores are the same in option names, values stay."""
    normal: list[str] = []
    for index, token in enumerate(argv):
        if token == "--":
            return normal + list(argv[index:])
        name, equals, value = token.partition("=")
        if name.startswith("--") and len(name) > 2:
            name = "--" + name[2:].replace("-", "_")
        normal.append(name + equals + value)
    return normal


def hyphens(text: str) -> str:
    """A text for people whose options are written with hyphens: `--on-error`, not `--on_error`."""
    return re.sub(r"(?<![\w-])--[a-z][a-z_]*", lambda option: option[0].replace("_", "-"), text)


def did_you_mean(name: str, known: Sequence[str] | Mapping[str, str]) -> str:
    """`" (did you mean 'x'?)"` when a known name is near, else an empty string. A mapping: what is shown for a name."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    shown = [known[key] if isinstance(known, Mapping) else key for key in near]
    return f" (did you mean {shown[0]!r}?)" if near else ""


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises UserError; hyphens and underscores in option names are the same."""

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.add_argument("--debug", action="store_true", help="print the traceback of an error")

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        return super().add_argument(*normalise(names), **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(normalise(args))
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            self.error(f"unknown argument {unknown[0]}{did_you_mean(unknown[0].partition('=')[0], known)}")
        return parsed

    def parse_known(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """This parser's options, and the tokens that are not its own (config overrides)."""
        return self.parse_known_args(normalise(args))

    def format_help(self) -> str:
        return hyphens(super().format_help())

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{hyphens(message)}; `{self.prog} --help` lists the options")


def positive(text: str) -> int:
    """A whole number of at least 1, as an option's type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_speed_options(parser: argparse.ArgumentParser, precision: str) -> None:
    """`--precision`, with this default, `--fold` and `--tta`."""
    add = parser.add_argument
    choices = ("auto", "fp32", "bf16", "fp16")
    told = f"of a classifier's outputs; auto: fast on the accelerator, fp32 on a CPU (default: {precision})"
    add("--precision", choices=choices, default=precision, help=told)
    add("--fold", action="store_true", help="a classifier's convolutions do their BatchNorm's work: faster")
    views = "mean of a classifier's logits: flip: with the mirror image; shift: and moved by a pixel (default: off)"
    add("--tta", choices=("off", "flip", "shift"), default="off", help=views)


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`--checkpoint` (`required` or not), `--which`, `--device` and `--batch-size`."""
    add = parser.add_argument
    add("--checkpoint", required=required, metavar="RUN_OR_FILE", help="run folder or checkpoint file")
    add("--which", choices=("last", "best"), default="last", help="which checkpoint of a run folder (default: last)")
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add("--batch-size", type=positive, default=64, metavar="N", help="changes speed and memory only (default: 64)")
