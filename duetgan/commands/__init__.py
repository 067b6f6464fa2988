"""Define and run the commands of `duet`.

The module of a command parses its options and has a function `main(arguments)`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from duetgan.utils import extras
from duetgan.utils.distributed.process import exit_cli, handle_interrupts

# Name -> (module with `main(arguments)`, line in `duet --help`). Without a line it is not listed.
COMMANDS = {
    "quickstart": (
        "duetgan.commands.quickstart",
        "train and evaluate a GAN and a classifier on the sample or on your own images",
    ),
    "pack": ("duetgan.commands.pack", "pack images into one file"),
    "inspect": (
        "duetgan.commands.inspect",
        "describe a packed file, and draw a grid of its images",
    ),
    "duplicates": (
        "duetgan.commands.duplicates",
        "find duplicate images within a packed file or between two",
    ),
    "train": (
        "duetgan.commands.train",
        "train a GAN or a classifier, or resume; --list prints the recipes",
    ),
    "evaluate": ("duetgan.commands.evaluate", "evaluate a checkpoint"),
    "compare-images": (
        "duetgan.commands.compare_images",
        "compare two sets of images: distances, precision, recall, copies",
    ),
    "generate": ("duetgan.commands.generate", "draw samples, films and projections with a GAN"),
    "predict": ("duetgan.commands.predict", "classify images"),
    "export": ("duetgan.commands.export", "write a model for use elsewhere"),
    "quickstart-plan": ("duetgan.commands.planning.measure", ""),
    **extras.commands(),
}
REQUIRED = ("lmdb", "pydantic", "torchvision")  # packages that `make setup` installs


def run(name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end this process with its exit code.

    Args:
        name: a key of COMMANDS.
        argv: the command's arguments (default: those of this process).
    """
    handle_interrupts()  # the imports below take seconds
    if sys.path and Path(sys.path[0], "inspect.py").is_file():
        # `python data/pack.py` puts data/ first; its inspect.py would hide the standard library's.
        del sys.path[0]
    if not all(map(importlib.util.find_spec, REQUIRED)):
        remedy = "needs the packages of this project: `make setup`, then .venv/bin/python ..."
        print(f"error: Duet {remedy}", file=sys.stderr)
        sys.exit(2)
    module = importlib.import_module(COMMANDS[name][0])
    exit_cli(module.main, list(sys.argv[1:] if argv is None else argv))
