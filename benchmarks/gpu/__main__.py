"""`python -m benchmarks.gpu`: what the machine lacks is installed from the bundle before anything else is imported."""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import wheels


def main() -> int:
    """The packages, then the command line."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--bundle", type=Path, default=wheels.BUNDLE)
    early.add_argument("--out", type=Path, default=wheels.OUT)
    options = early.parse_known_args()[0]
    try:
        wheels.install(options.bundle / "wheels", options.out / "site")
    except wheels.Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from benchmarks.gpu import command
    from duetgan.utils.distributed.process import run_cli

    return run_cli(command.main)


if __name__ == "__main__":
    sys.exit(main())
