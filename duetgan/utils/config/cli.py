"""An argument parser that raises UserError, and options that several commands share.

Hyphens and underscores in option names are equivalent.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from duetgan.utils.config import plugins
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.text import did_you_mean
from duetgan.version import __version__

T = TypeVar("T")
MAX_NUMBER = 2.0**63  # exclusive limit of an option's number


def normalise(argv: Sequence[str]) -> list[str]:
    """Return arguments with underscores instead of hyphens in the names of options.

    Values, and all arguments after `--`, are unchanged.
    """
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
    """Replace the underscores in a text's option names by hyphens: `--on_error` -> `--on-error`."""
    return re.sub(r"(?<![\w-])--[a-z][a-z_]*", lambda option: option[0].replace("_", "-"), text)


def entry(registry: Mapping[str, T], name: str, kind: str, *additional: str) -> T:
    """Return `registry[name]`.

    Raises UserError for an unknown name; the message suggests the most similar one.

    Args:
        kind: a word for what the registry holds, such as "loss", for the message.
        additional: further valid names, for the message.
    """
    if name not in registry:
        names = [*registry, *additional]
        listed = ", ".join(names) or "none, --import FILE adds some"
        raise UserError(
            f"{kind} {name!r} is unknown{did_you_mean(name, names)}; there are {listed}"
        )
    return registry[name]


class UnknownKey(UserError):
    """The error for a key `name` that the configuration does not have.

    The message begins with `source`, a file or the command line, and suggests the most similar of
    `keys`, the valid dotted keys.
    """

    def __init__(self, source: str, name: str, keys: Sequence[str]) -> None:
        self.source = source
        self.name = name
        self.keys = keys
        # The user may have left out the section, or have named another one.
        leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(keys)}
        hint = did_you_mean(name.rpartition(".")[2], leaves) or did_you_mean(name, keys)
        super().__init__(f"{source}: unknown key {name!r}{hint}".removeprefix(": "))


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises UserError for invalid arguments.

    `-` and `_` in option names are equivalent. Each parser has the options --debug and --version.
    """

    def __init__(
        self, prog: str, description: str | None = None, epilog: str | None = None
    ) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.add_argument("--debug", action="store_true", help="print the traceback of an error")
        self.add_argument("--version", action="version", version=f"duet {__version__}")

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Add an argument as argparse does, and append its default to `help`.

        Nothing is appended if `help` names the default already.
        """
        default, text = kwargs.get("default"), kwargs.get("help", "")
        if (
            isinstance(default, str | int | float)
            and kwargs.get("action") is None
            and "default: " not in text
        ):
            default_text = default if isinstance(default, str) else f"{default:g}"
            kwargs["help"] = f"{text} (default: {default_text})".lstrip()
        return super().add_argument(*normalise(names), **kwargs)

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(normalise(args))
        if unknown:
            names: list[str] = []
            for action in self._actions:
                names += action.option_strings
            hint = did_you_mean(unknown[0].partition("=")[0], names)
            self.error(f"unknown argument {unknown[0]}{hint}")
        plugins.load(vars(parsed).pop("imports", ()))
        return parsed

    def parse_known(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of this parser's options, and the unknown tokens (config overrides)."""
        return self.parse_known_args(normalise(args))

    def format_help(self) -> str:
        return hyphens(super().format_help())

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{hyphens(message)}; `{self.prog} --help` lists the options")


def number(
    kind: type[int] | type[float],
    low: float = -MAX_NUMBER,
    high: float = MAX_NUMBER,
    *,
    inner: bool = False,
) -> Callable[[str], float]:
    """Return a function that parses an option's number, for `type` of `add_argument`.

    The function returns a finite int or float (`kind`) from `low` to `high`. If `inner` is True, it
    refuses `low` and `high` themselves.
    """
    words = "a whole number" if kind is int else "a finite number"
    if high < MAX_NUMBER:
        words += f" between {low:g} and {high:g}" if inner else f" from {low:g} to {high:,.15g}"
    elif low > -MAX_NUMBER:
        words += f" above {low:g}" if inner else f" of at least {low:g}"

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = math.nan
        if not (low < value < high if inner else low <= value <= high):
            limit = ", below 2^63" if abs(value) >= MAX_NUMBER else ""
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {words}{limit}")
        return value

    return read


positive = number(int, 1)


def file(*suffixes: str) -> Callable[[str], Path]:
    """Return a function that turns an option's file name into a Path, for `type` of `add_argument`.

    The function accepts names with one of these `suffixes`; "" accepts a name without a suffix.
    """

    def read(text: str) -> Path:
        path = Path(text)
        if not text or path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(
                f"{text}: its name must end in {' or '.join(filter(None, suffixes))}"
            )
        return path

    return read


def image_size(text: str) -> int | str:
    """Parse an option's size in px: the side of a square, or width x height such as 96x64.

    Returns an int for a square, else text.
    """
    if text.isdecimal() and len(text) < 10 and int(text) >= 4:
        return int(text)
    with explained(UserError, lambda error: argparse.ArgumentTypeError(str(error))):
        return ImageSpec.of(1, text[:40]).resolution


def add_speed_options(parser: argparse.ArgumentParser, precision: str) -> None:
    """Add `--precision` (default: `precision`), `--fold` and `--tta`."""
    add = parser.add_argument
    choices = ("auto", "fp32", "bf16", "fp16")
    add(
        "--precision",
        choices=choices,
        default=precision,
        help="number format of a classifier; auto: the fast one on an accelerator, fp32 on a CPU "
        f"(default: {precision})",
    )
    add(
        "--fold",
        action="store_true",
        help="merge a classifier's BatchNorm layers into its convolutions, which is faster",
    )
    add(
        "--tta",
        choices=("off", "flip", "shift"),
        default="off",
        help="test-time augmentation: average a classifier's logits with those of the mirror image "
        "(flip), or also of images that are shifted by a pixel (shift) (default: off)",
    )


TABLE_OPTIONS = {  # options of duet pack and the quickstart for reading a label table
    "path_column": ("NAME", "column of a table with the names of the image files"),
    "label_column": (
        "NAME",
        "column of a table, or field of a .tar file, with the labels; none: no labels",
    ),
    "label_separator": (
        "TEXT",
        "separator of several labels of an image, such as '|' (default: one label each)",
    ),
    "split_column": (
        "NAME",
        "column that marks held-out images; NAME=VALUE: the rows that are held out; none: use all rows",
    ),
    "root": (
        "DIR",
        "folder of the images in a table, or of the files of fashion-mnist, cifar10 or idx",
    ),
    "suffix": ("TEXT", "file name suffix that the table leaves out, such as .jpg"),
    "group_column": (
        "NAME",
        "column of a table: images with the same value, such as a patient, are not split between training and "
        "held-out images",
    ),
    "group_from": (
        "REGEX",
        "do as --group-column for images in whose file names the parentheses of this regular expression match "
        "the same text: 'patient([0-9]+)'",
    ),
}


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of TABLE_OPTIONS."""
    for name, (metavar, text) in TABLE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def table_words(options: argparse.Namespace) -> list[str]:
    """Return the table options that the user has given, as command-line arguments.

    A relative `--root` becomes absolute.
    """
    chosen = {
        name: getattr(options, name) for name in TABLE_OPTIONS if getattr(options, name) is not None
    }
    if "root" in chosen:
        chosen["root"] = os.path.abspath(os.path.expanduser(chosen["root"]))
    return [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]


PSI = number(float, -10, 10)


def add_truncation_options(parser: argparse.ArgumentParser, *, psi: bool = True) -> None:
    """Add `--truncation-mean` and, if `psi` is True, `--truncation-psi`."""
    if psi:
        text = "1: all variety; near 0: typical images (default: 1)"
        parser.add_argument("--truncation-psi", type=PSI, default=1.0, metavar="X", help=text)
    text = "truncate samples towards the mean w of their class, or of all samples (default: class)"
    parser.add_argument(
        "--truncation-mean", choices=("class", "global"), default="class", help=text
    )


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add `--import`. `Parser.parse_args` imports the files and modules that the user gives."""
    parser.add_argument(
        "--import",
        action="append",
        help="import your own losses, networks and so on from a .py file or an installed module; "
        "may be repeated",
        dest="imports",
        default=argparse.SUPPRESS,
        metavar="FILE",
    )


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--checkpoint`, `--which`, `--device`, `--batch-size` and `--import`."""
    add_import_option(parser)
    add = parser.add_argument
    add(
        "--checkpoint",
        required=required,
        metavar="RUN_OR_FILE",
        help="run folder or checkpoint file; for a classifier also torchvision:NAME or timm:NAME, "
        "optionally with =FILE (weights), or a folder that timm has saved",
    )
    add(
        "--which",
        choices=("last", "best"),
        default="last",
        help="checkpoint of a run folder: the last one, or the one with the best evaluation "
        "(default: last)",
    )
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="images per batch; changes speed and memory only (default: 64)",
    )
