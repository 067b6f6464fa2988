"""A small argument parser for the small scripts: one line and exit code 2 on a bad option, `-` and `_` alike."""

import argparse
import difflib
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


def did_you_mean(name: str, known: Sequence[str] | Mapping[str, str]) -> str:
    """`" (did you mean 'x'?)"` when a known name is near, else an empty string. A mapping: what is shown for a name."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    shown = [known[key] if isinstance(known, Mapping) else key for key in near]
    return f" (did you mean {shown[0]!r}?)" if near else ""


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises UserError; write option names with underscores or hyphens, both are
    accepted.
    """

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.add_argument("--debug", action="store_true", help="print the traceback of an error")

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """argparse's, with hyphens and underscores alike."""
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

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the options")
