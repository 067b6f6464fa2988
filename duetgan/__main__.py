"""Run the command line `duet COMMAND ARGS`; `python -m duetgan COMMAND ARGS` does the same."""

import sys
from typing import NoReturn

from duetgan.commands import COMMANDS, run
from duetgan.utils.text import did_you_mean
from duetgan.version import __version__


def usage() -> str:
    listed = {name: text for name, (_, text) in COMMANDS.items() if text}
    width = max(map(len, listed))
    lines = [f"  {name:{width}}  {text}" for name, text in listed.items()]
    return "\n".join(["usage: duet COMMAND [ARGS]", "", *lines, "", "Every command has --help."])


def main() -> NoReturn:
    argv = sys.argv[1:]
    if not argv or argv[0] in ("help", "-h", "--help"):
        print(usage())
        sys.exit(0)
    if argv[0] == "--version":
        print(f"duet {__version__}")
        sys.exit(0)
    if argv[0] not in COMMANDS:
        hint = did_you_mean(argv[0], list(COMMANDS))
        print(f"error: no command {argv[0]}{hint}; `duet --help` lists them", file=sys.stderr)
        sys.exit(2)
    run(argv[0], argv[1:])


if __name__ == "__main__":
    main()
